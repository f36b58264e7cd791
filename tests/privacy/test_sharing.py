"""Shamir's sharing: any `threshold` shares give the secret, fewer give none, and others' programs agree."""

from __future__ import annotations

import itertools
import os
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.privacy.sharing import (
    PRIME,
    combine,
    lagrange_weights,
    share_from_bytes,
    share_to_bytes,
    split,
)
from partwise.types import UserError


def slow_secret(points: dict[int, int], prime: int) -> int:
    """Lagrange's formula at 0, as in a textbook."""
    total = 0
    for x, y in points.items():
        term = y
        for other in points.keys() - {x}:
            term = term * -other * pow(x - other, -1, prime) % prime
        total += term
    return total % prime


def is_prime(number: int) -> bool:
    """Miller and Rabin's test with forty bases."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(
        pow(base, odd, number) == 1 or any(pow(base, odd << i, number) == number - 1 for i in range(twos))
        for base in range(2, 42)
    )


def test_the_field_is_one():
    assert is_prime(PRIME)
    assert PRIME == 2**128 + 51


@given(
    secret=st.binary(min_size=16, max_size=16),
    holders=st.lists(st.integers(1, 20_000), min_size=1, max_size=12, unique=True),
    data=st.data(),
)
def test_any_threshold_shares_give_the_secret(secret, holders, data):
    threshold = data.draw(st.integers(1, len(holders)))
    shares = dict(zip(holders, split(secret, holders, threshold, os.urandom), strict=True))
    chosen = data.draw(st.permutations(holders))[:threshold]
    some = {holder: shares[holder] for holder in chosen}
    assert combine(some) == secret
    assert slow_secret(some, PRIME) == int.from_bytes(secret, "little")
    assert [share_from_bytes(share_to_bytes(share)) for share in shares.values()] == list(shares.values())


def test_one_share_too_few_gives_something_else():
    shares = split(bytes(16), range(1, 8), 5, os.urandom)
    for four in itertools.combinations(range(7), 4):
        assert slow_secret({i + 1: shares[i] for i in four}, PRIME) != 0


def test_fewer_shares_tell_nothing():
    """In the field of 7 elements, over all polynomials of degree 2: any two shares of any secret are equally likely
    to be any pair of numbers, whatever the secret."""
    prime = 7
    for pair in itertools.combinations(range(4), 2):
        for secret in range(prime):
            seen = Counter()
            for coefficients in itertools.product(range(prime), repeat=2):
                drawn = b"".join(c.to_bytes(32, "little") for c in coefficients)
                found = split(bytes([secret]), [1, 2, 3, 4], 3, lambda number, drawn=drawn: drawn, prime)
                seen[tuple(found[i] for i in pair)] += 1
            assert len(seen) == prime**2
            assert set(seen.values()) == {1}


def test_another_program_agrees():
    shamirs = pytest.importorskip("shamirs")
    secret = os.urandom(16)
    value = int.from_bytes(secret, "little")
    theirs = shamirs.shares(value, quantity=10, modulus=PRIME, threshold=7)
    assert combine({each.index: each.value for each in theirs[2:9]}) == secret
    ours = split(secret, range(1, 11), 7, os.urandom)
    pairs = [shamirs.share(index + 1, ours[index], PRIME) for index in range(3, 10)]
    assert shamirs.interpolate(pairs, threshold=7) == value


def test_weights_add_up_to_one():
    """They give the constant 1 back."""
    assert sum(lagrange_weights((3, 5, 900, 77))) % PRIME == 1


@pytest.mark.parametrize(
    ("holders", "threshold"), [([1, 2], 3), ([1, 1, 2], 2), ([0, 1, 2], 2), ([], 1), ([1], 0)]
)
def test_what_cannot_be_shared(holders, threshold):
    with pytest.raises(UserError, match="holders"):
        split(bytes(16), holders, threshold, os.urandom)


def test_bad_shares_are_refused():
    for data in (bytes(16), bytes(18), PRIME.to_bytes(17, "little"), b"\xff" * 17):
        with pytest.raises(UserError, match="a share has 17 bytes"):
            share_from_bytes(data)
    with pytest.raises(UserError, match="not of one secret"):
        combine({1: 2**128 + 3})
    with pytest.raises(UserError, match="different numbers"):
        combine({0: 3})
