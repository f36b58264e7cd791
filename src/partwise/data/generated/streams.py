"""What the generators share: random streams, numbers of examples, blocks of clients.

Every block of clients has its own random stream. It is drawn completely and then cut. So client k is the same
for any number of clients.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from partwise.data.store_folder import Block
from partwise.types import UserError


def stream(seed: int, purpose: int, block: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, purpose, block])))


def log_normal_counts(
    rng: np.random.Generator, num_clients: int, median: float, sigma: float, limits: tuple[int, int]
) -> np.ndarray:
    """Numbers of examples, [num_clients] int64; `sigma` is the spread of their logarithm."""
    drawn = median * np.exp(sigma * rng.standard_normal(num_clients))
    return np.clip(np.rint(drawn), *limits).astype(np.int64)


def draw_each(rng: np.random.Generator, weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """For every entry of `rows`, a draw from that row of `weights` [C, K]; the result is [N] int64."""
    ends = np.cumsum(weights, axis=1)
    ends /= ends[:, -1:]
    ends[:, -1] = 1.0
    return np.sum(ends[rows] <= rng.random((len(rows), 1)), axis=1)


def cut_block(block: int, counts: np.ndarray, columns: Mapping[str, np.ndarray], num_clients: int) -> Block:
    """The wanted clients of a block that was drawn completely. Clients are numbered across all blocks."""
    first = block * len(counts)
    client_ids = np.arange(first, min(first + len(counts), num_clients))
    counts = counts[: len(client_ids)]
    return Block(client_ids, counts, {name: values[: counts.sum()] for name, values in columns.items()})


def check_numbers(arguments: Mapping[str, float], positive: set[str]) -> None:
    """Raise `UserError` unless every argument is at least 0, and those in `positive` at least 1."""
    for name, value in arguments.items():
        least = 1 if name in positive else 0
        if not least <= value < np.inf:
            raise UserError(f"{name} is {value}: give at least {least}")
