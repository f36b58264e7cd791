"""Hold-outs: clients, or each client's examples, cut into parts.

n things are cut at floor(n x cumulative fraction): 6040 by 0.8, 0.1, 0.1 gives 4832, 604, 604, and 5 gives 4, 0, 1.
Every thing lands in exactly one part. Parts are views that share the rows of one store.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partwise.data.store import ClientStore
from partwise.types import UserError

FRACTIONS = (0.8, 0.1, 0.1)


def by_client(
    store: ClientStore, fractions: Sequence[float] = FRACTIONS, seed: int = 42
) -> tuple[ClientStore, ...]:
    """Whole clients, shuffled by `numpy.random.default_rng(seed)`: the later parts hold unseen clients."""
    cuts = _cuts(np.array(store.num_clients), fractions)
    positions = np.random.default_rng(seed).permutation(store.num_clients)
    return tuple(store.take(positions[first:last]) for first, last in zip(cuts[:-1], cuts[1:], strict=True))


def by_example(
    store: ClientStore, fractions: Sequence[float] = FRACTIONS, seed: int = 42
) -> tuple[ClientStore, ...]:
    """Each client's examples at random. Every part has every client; too small a client has 0 examples in some."""
    return by_order(store.reorder(seed=seed), fractions, by=None)


def by_order(
    store: ClientStore, fractions: Sequence[float] = FRACTIONS, by: str | None = "time"
) -> tuple[ClientStore, ...]:
    """Each client's examples in the order of a column, or as they lie (`by=None`): the earliest for the first part.

    Every part has every client; too small a client has 0 examples in some.
    """
    cuts = _cuts(store.counts, fractions)
    ordered = store if by is None else store.reorder(by=by)
    return tuple(ordered.narrow(first, last - first) for first, last in zip(cuts[:-1], cuts[1:], strict=True))


def _cuts(counts: np.ndarray, fractions: Sequence[float]) -> np.ndarray:
    """Where the parts begin and end, [parts + 1, ...]."""
    shares = np.asarray(fractions, float)
    if shares.ndim != 1 or len(shares) < 1 or not np.all(shares >= 0) or abs(shares.sum() - 1) > 1e-6:
        raise UserError(
            f"fractions are {tuple(fractions)}: give shares from 0 to 1 that add up to 1, like (0.8, 0.1, 0.1)"
        )
    ends = np.floor(np.multiply.outer(np.cumsum(shares), counts) + 1e-6).astype(
        np.int64
    )  # 0.7 + 0.1 is not 0.8
    ends[-1] = counts
    return np.concatenate([np.zeros_like(ends[:1]), ends])
