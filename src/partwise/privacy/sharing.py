"""Shamir's secret sharing (1979): a secret is cut into shares, of which any `threshold` give it back and
fewer tell nothing.

Secrets have 16 bytes, one element of the field of the prime 2^128 + 51, so that one share is one element too.
It is written as 17 bytes. A share belongs to a holder, who has a number: the point where the polynomial was
evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from operator import mul

from partwise.types import UserError

PRIME = 2**128 + 51
SECRET_BYTES = 16
SHARE_BYTES = 17
_COEFFICIENT_BYTES = (
    32  # twice as many as the prime has: what is left over after division is uniform to 2^-127
)


def split(
    secret: bytes,
    holders: Sequence[int],
    threshold: int,
    random: Callable[[int], bytes],
    prime: int = PRIME,
) -> list[int]:
    """A share for every holder. Holders are different numbers from 1 on."""
    value = int.from_bytes(secret, "little")
    if value >= prime or not 1 <= threshold <= len(holders):
        raise UserError(
            f"a secret below {prime} is cut into at least {threshold} shares, of which {threshold} give it back; "
            f"there are {len(holders)} holders"
        )
    if len(set(holders)) < len(holders) or not all(0 < holder < prime for holder in holders):
        raise UserError("the holders of shares are different numbers from 1 on: the share of 0 is the secret")
    drawn = random(_COEFFICIENT_BYTES * (threshold - 1))
    coefficients = [
        int.from_bytes(drawn[start : start + _COEFFICIENT_BYTES], "little") % prime
        for start in range(0, len(drawn), _COEFFICIENT_BYTES)
    ]
    polynomial = [value, *coefficients]
    return [sum(map(mul, polynomial, _powers(holder, threshold, prime))) % prime for holder in holders]


@lru_cache(1024)
def _powers(point: int, number: int, prime: int) -> list[int]:
    """1, x, x^2 and so on. They are kept, because two secrets are shared among the same holders."""
    return list(accumulate(repeat(point, number - 1), lambda power, x: power * x % prime, initial=1))


def combine(shares: Mapping[int, int], prime: int = PRIME, num_bytes: int = SECRET_BYTES) -> bytes:
    """The secret of as many shares as the threshold is. Shares that do not belong together give another
    secret, or none: compare it with something that is known of it."""
    weights = lagrange_weights(tuple(shares), prime)
    value = sum(w * s for w, s in zip(weights, shares.values(), strict=True)) % prime
    try:
        return value.to_bytes(num_bytes, "little")
    except OverflowError:
        raise UserError("these shares are not of one secret: one of them was changed") from None


@lru_cache(4096)
def lagrange_weights(holders: tuple[int, ...], prime: int = PRIME) -> tuple[int, ...]:
    """What the shares of these holders are multiplied with to give the secret. They are kept, because in a
    complete graph the same holders answer for every secret of a round."""
    if len(set(holders)) < len(holders) or not all(0 < holder < prime for holder in holders):
        raise UserError("the holders of shares are different numbers from 1 on")
    below = [
        holder * math.prod(other - holder for other in holders if other != holder) % prime
        for holder in holders
    ]
    above = math.prod(holders) % prime
    return tuple(above * inverse % prime for inverse in _inverses(below, prime))


def _inverses(values: Sequence[int], prime: int) -> list[int]:
    """The inverses of many numbers with one inversion (Montgomery's trick)."""
    products = [1]
    for value in values:
        products.append(products[-1] * value % prime)
    rest, found = pow(products[-1], -1, prime), []
    for value, before in zip(reversed(values), reversed(products[:-1]), strict=True):
        found.append(rest * before % prime)
        rest = rest * value % prime
    return found[::-1]


def share_to_bytes(share: int) -> bytes:
    return share.to_bytes(SHARE_BYTES, "little")


def share_from_bytes(data: bytes | memoryview) -> int:
    """A share, refused if it is not an element of the field."""
    share = int.from_bytes(data, "little")
    if len(data) != SHARE_BYTES or share >= PRIME:
        raise UserError(
            f"a share has {SHARE_BYTES} bytes and is below 2^128 + 51; this one has {len(data)} bytes"
        )
    return share
