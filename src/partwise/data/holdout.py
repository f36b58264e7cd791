"""Hold-outs: clients, or each client's examples, divided into parts.

n things are cut at floor(n x cumulative share): 6040 by 0.8, 0.1, 0.1 gives 4832, 604, 604; 5 gives 4, 0, 1.
Every thing is in exactly one part. Parts are views that share the rows of one store.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from partwise.data.ragged import owners
from partwise.data.store import ClientStore
from partwise.types import UserError

FRACTIONS = (0.8, 0.1, 0.1)


def by_client(
    store: ClientStore, fractions: Sequence[float] = FRACTIONS, seed: int = 42
) -> tuple[ClientStore, ...]:
    """Divide whole clients, so that the later parts hold unseen clients.

    Args:
        store: The clients.
        fractions: The share of each part. The shares must add up to 1.
        seed: Clients are shuffled by `numpy.random.default_rng(seed)`.

    Returns:
        One store for each fraction.
    """
    cuts = _cuts(np.array(store.num_clients), fractions)
    if seed < 0:
        raise UserError(f"seed is {seed}: give a whole number from 0 on")
    positions = np.random.default_rng(seed).permutation(store.num_clients)
    return tuple(store.take(positions[first:last]) for first, last in itertools.pairwise(cuts))


def by_example(
    store: ClientStore, fractions: Sequence[float] = FRACTIONS, seed: int = 42
) -> tuple[ClientStore, ...]:
    """Divide each client's examples at random. Every part has every client; a small part may have 0 examples
    of a client."""
    return by_order(store.reorder(seed=seed), fractions, by=None)


def by_order(
    store: ClientStore, fractions: Sequence[float] = FRACTIONS, by: str | None = "time"
) -> tuple[ClientStore, ...]:
    """Divide each client's examples in the order of a column, or as they are stored (`by=None`). The earliest
    come first.

    Every part has every client; a small part may have 0 examples of a client.
    """
    cuts = _cuts(store.counts, fractions)
    ordered = store if by is None else store.reorder(by=by)
    return tuple(ordered.narrow(first, last - first) for first, last in itertools.pairwise(cuts))


def by_value(store: ClientStore, by: str, last: float) -> tuple[ClientStore, ClientStore]:
    """Each client's examples up to the value `last` of a column (for example a time), and those after it, in
    the order of the column. Both parts have every client, perhaps with 0 examples."""
    ordered = store.reorder(by=by)
    early = ordered.columns[by] <= last
    counts = np.bincount(owners(ordered.counts)[early], minlength=ordered.num_clients)
    return (
        ordered.narrow(np.zeros_like(counts), counts),
        ordered.narrow(counts, ordered.counts - counts),
    )


def _cuts(counts: np.ndarray, fractions: Sequence[float]) -> np.ndarray:
    """Where the parts begin and end, [parts + 1, ...]."""
    shares = np.asarray(fractions, float)
    if shares.ndim != 1 or len(shares) < 1 or not np.all(shares >= 0) or abs(shares.sum() - 1) > 1e-6:
        raise UserError(f"fractions are {tuple(fractions)}: give shares from 0 to 1 that add up to 1")
    ends = np.floor(np.multiply.outer(np.cumsum(shares), counts) + 1e-6)  # 0.7 + 0.1 falls short of 0.8
    ends[-1] = counts
    return np.concatenate([np.zeros_like(ends[:1]), ends]).astype(np.int64)
