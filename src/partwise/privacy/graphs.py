"""Who masks with whom: a random Harary graph, and how many neighbours are enough (Bell et al., CCS 2020).

With all pairs (Bonawitz et al., CCS 2017) a client's work grows with the number of clients. It is enough that
every client has `degree` neighbours, if the graph is drawn at random: clients stand in a random order on a
circle, and each has the nearest ones on both sides. Three things must hold but for a small chance (2^-40 for
what is secret, 2^-30 for what must succeed), if a share of the clients is corrupt and a share drops out:

* no honest client has `threshold` corrupt neighbours, so they cannot put its secrets together;
* of every client, `threshold` neighbours stay, so the server can;
* the honest clients who stay hang together. On the circle, only degree / 2 others in a row can cut them.

The chances are exact (hypergeometric) for one client or place, times the number of clients.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln

from partwise.types import UserError

SECRET_BITS = 40  # chance of a graph that keeps less than it promises: 2^-40
SUCCESS_BITS = 30  # chance of a round that stops though no more clients dropped out than was said: 2^-30
COMPLETE = 100  # up to so many clients, all pairs


class MaskSettings(NamedTuple):
    """What everyone in a round of a secure sum knows.

    seed:      draws the graph; public
    degree:    neighbours of a client; all others, if there are not more
    threshold: shares that give a secret back. Also the fewest of a client and its neighbours who must have
               uploaded before the client helps to unmask
    least:     the fewest clients at any stage up to the upload, so the fewest that a sum is of
    """

    seed: bytes
    degree: int
    threshold: int
    least: int


def mask_settings(num_clients: int, seed: bytes) -> MaskSettings:
    """The settings for so many clients (those who have advertised keys), of whom a fifth may be corrupt and
    another fifth may drop out. Up to 100 clients, a third may."""
    degree, threshold = degree_and_threshold(num_clients)
    least = threshold if num_clients <= COMPLETE else num_clients - _part(0.2, num_clients)
    return MaskSettings(seed, degree, threshold, least)


def degree_and_threshold(num_clients: int, corrupt: float = 0.2, dropped: float = 0.2) -> tuple[int, int]:
    """The smallest degree that keeps the three conditions with a threshold above half of it, and that
    threshold.

    Above half, because otherwise a lying server could ask some neighbours for one secret of a client and the
    others for the other one. Up to 100 clients: all pairs, and two thirds.
    """
    if num_clients < 2:
        raise UserError(f"a secure sum is of at least 2 clients, not of {num_clients}")
    if num_clients <= COMPLETE:
        return num_clients - 1, -(-2 * num_clients // 3)
    for degree in range(2, num_clients - 1, 2):
        good = [t for t in thresholds(num_clients, degree, corrupt, dropped) if t > degree // 2]
        if good:
            return degree, good[0]
    raise UserError(
        f"no graph of {num_clients:,} clients is safe if {corrupt:.0%} are corrupt and {dropped:.0%} drop out: "
        f"assume fewer of both, together less than a half"
    )


def thresholds(num_clients: int, degree: int, corrupt: float, dropped: float) -> list[int]:
    """All thresholds that keep the three conditions with this degree; none if there are none."""
    bad, gone = _part(corrupt, num_clients), _part(dropped, num_clients)
    bits = math.log2(num_clients)
    complete = degree >= num_clients - 1
    if not complete and _row_bits(num_clients, bad + gone, degree // 2) < SECRET_BITS + bits:
        return []
    numbers = np.arange(degree + 1)
    others = num_clients - 1
    at_least = np.logaddexp2.accumulate(_chances(numbers, others, bad, degree)[::-1])[::-1]
    fewer = np.logaddexp2.accumulate([-np.inf, *_chances(numbers, others, others - gone, degree)[:-1]])
    good = (at_least <= -SECRET_BITS - bits) & (fewer <= -SUCCESS_BITS - bits)
    return [int(t) for t in numbers[good] if t > 0]


def _chances(numbers: np.ndarray, total: int, special: int, drawn: int) -> np.ndarray:
    """log2 of the hypergeometric chances to draw so many of the special ones."""
    possible = (numbers <= special) & (drawn - numbers <= total - special)
    some = np.where(possible, numbers, max(0, drawn - total + special))
    found = (
        _log_choose(special, some) + _log_choose(total - special, drawn - some) - _log_choose(total, drawn)
    )
    return np.where(possible, found, -np.inf)


def _log_choose(total: int, chosen: np.ndarray | int) -> np.ndarray:
    """log2 of the number of ways to choose."""
    chosen = np.asarray(chosen)
    return (gammaln(total + 1) - gammaln(chosen + 1) - gammaln(total - chosen + 1)) / math.log(2)


def _row_bits(num_clients: int, bad: int, length: int) -> float:
    """-log2 of the chance that so many in a row are all of the `bad` ones."""
    if length > bad:
        return math.inf
    return float(_log_choose(num_clients, length) - _log_choose(bad, length))


def _part(share: float, number: int) -> int:
    return math.floor(round(share * number, 6))


@lru_cache(16)
def harary_graph(seed: bytes, number: int, degree: int) -> tuple[tuple[int, ...], ...]:
    """The neighbours of each of the positions 0 to number - 1, in rising order. It is the same everywhere for
    the same seed: the order on the circle is that of hashes."""
    if degree >= number - 1:
        return tuple((*range(at), *range(at + 1, number)) for at in range(number))
    if degree < 2 or degree % 2:
        raise UserError(f"clients have an even number of neighbours, unless they have all: not {degree}")
    hashed = lambda at: hashlib.blake2b(at.to_bytes(4, "little") + seed, digest_size=16).digest()
    circle = sorted(range(number), key=hashed)
    steps = [*range(-(degree // 2), 0), *range(1, degree // 2 + 1)]
    around = {at: sorted(circle[(i + step) % number] for step in steps) for i, at in enumerate(circle)}
    return tuple(tuple(around[at]) for at in range(number))
