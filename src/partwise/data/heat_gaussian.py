"""Heat with differential privacy of clients: counts of holders with Gaussian noise (a secure sum, or a trusted
server, adds the clients' bits).

A client counts for at most `most` of its keys, drawn at random over all key spaces, so it adds a vector with a
norm of at most sqrt(most) to the counts. One number more tells which share of its keys was counted; its sum is
N_eff, the number of clients as far as they were counted, and N_eff / n_m is FedSubAvg's factor. The share costs one
more coordinate: a client adds at most sqrt(most + 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from partwise.data.heat import Heat
from partwise.types import UserError

SURE = 2.0  # counts below so many standard deviations of their noise are not told from it


class Counted(NamedTuple):
    """How often keys were counted, before any noise.

    counts:  {key space: [K] number of clients that counted the key}
    clients: N_eff, the sum of the shares of their keys that clients counted
    total:   N, the number of clients
    """

    counts: Mapping[str, np.ndarray]
    clients: float
    total: int


def count_limited(
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]],
    num_keys: Mapping[str, int],
    total: int,
    most: int,
    rng: np.random.Generator,
) -> Counted:
    """Count every client for at most `most` keys.

    Args:
        pairs: {key space: (client, key)}, every pair of a client and a key that it holds, each once.
        num_keys: {key space: K}.
        total: N.
        most: The largest number of a client's keys that are counted, over all spaces.
        rng: Draws the keys of clients that have more.
    """
    if most < 1:
        raise UserError(f"at least 1 key of a client must be counted, not {most}")
    space = np.concatenate([np.full(len(keys), i) for i, (_, keys) in enumerate(pairs.values())])
    client = np.concatenate([clients for clients, _ in pairs.values()])
    key = np.concatenate([keys for _, keys in pairs.values()])
    order = np.lexsort((rng.random(len(client)), client))
    held = np.bincount(client, minlength=total)
    rank = np.arange(len(client)) - np.repeat(np.cumsum(held) - held, held)
    kept = order[rank < most]
    count = lambda i, name: np.bincount(key[kept[space[kept] == i]], minlength=num_keys[name])
    share = np.minimum(1.0, most / np.maximum(held, 1))
    return Counted({name: count(i, name) for i, name in enumerate(pairs)}, float(share.sum()), total)


def deviation(noise: float, most: int) -> float:
    """The standard deviation of every count, for a noise in units of what a client adds."""
    return noise * math.sqrt(most + 1)


def gaussian_heats(counted: Counted, noise: float, most: int, rng: np.random.Generator) -> dict[str, Heat]:
    """Heat from counts to which noise is added here.

    Args:
        counted: The counts.
        noise: Standard deviation of the noise in units of what a client adds, sqrt(most + 1).
        most: As in `count_limited`.
        rng: Draws the noise.
    """
    sd = deviation(noise, most)
    clients = counted.clients + sd * rng.normal()
    noisy = {space: counts + sd * rng.normal(size=len(counts)) for space, counts in counted.counts.items()}
    return scaled_heats(Counted(noisy, clients, counted.total), sd)


def scaled_heats(counted: Counted, sd: float) -> dict[str, Heat]:
    """Heat from counts whose noise has this standard deviation (0: they are exact), scaled to all N clients. A
    count is at least twice the standard deviation of its noise: N / n_m of a smaller one would be noise. Exact
    counts are left as they are, and N is the number of clients that counted, because scaling rounds."""
    if not sd and float(counted.clients).is_integer():
        return {
            space: Heat(space, np.rint(counts).astype(np.int64), int(counted.clients))
            for space, counts in counted.counts.items()
        }
    scale = counted.total / min(max(counted.clients, 1.0), counted.total)
    least = 1 if sd else 0  # noise may hide that somebody holds a key
    heats = {}
    for space, counts in counted.counts.items():
        noisy = np.maximum(np.asarray(counts, np.float64), SURE * sd) * scale
        whole = np.clip(np.rint(noisy), least, counted.total).astype(np.int64)
        heats[space] = Heat(space, whole, counted.total)
    return heats
