"""How large the updates of a round were, and which are out of all proportion to the others.

An outlier is named, because one such update can undo a training: of a client whose data are wrong, whose steps blew
up, or that lies. A simulation uses it all the same. A server that adds up the reports of devices leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Times the usual norm. In trainings of all tasks, the largest norm of a round is up to 10 times it.
OUTLIER = 100.0
HEAVY = 1e6  # times the usual weight: clients may well differ a thousandfold in their examples


def usual(sizes: np.ndarray) -> float:
    """The median of the sizes above 0; of an even number, the smaller of the two in the middle, so that one of two
    can be an outlier. 0 if there is none."""
    there = np.sort(sizes[sizes > 0])
    return float(there[(len(there) - 1) // 2]) if len(there) else 0.0


def out_of_proportion(norms: np.ndarray, weights: np.ndarray, earlier: float = 0.0) -> np.ndarray:
    """Which reports of devices are left out: by the norm of their update, or by a weight that no client has whose
    data are at all like the others'."""
    return outlying(norms, earlier) | (weights > HEAVY * usual(weights))


def outlying(norms: np.ndarray, earlier: float = 0.0) -> np.ndarray:
    """Which norms are outliers of their round. `earlier` is the largest usual norm of the rounds before: if nearly
    all clients have nothing more to learn, those that still have are not outliers."""
    here = usual(norms)
    return norms > OUTLIER * max(here, earlier) if here else np.zeros(norms.shape, bool)


def spread_of(norms: np.ndarray) -> dict[str, float] | None:
    """Norms of a round for its record; None if there is none."""
    if not len(norms):
        return None
    low, high = np.quantile(norms, (0.1, 0.9))
    return {"low": float(low), "median": usual(norms), "high": float(high), "largest": float(norms.max())}


class Usual:
    """The largest usual norm of the rounds of a run, as their records come."""

    def __init__(self) -> None:
        self.norm = 0.0

    def outliers(self, record: Mapping[str, Any]) -> Sequence[Any]:
        """The clients of the next round that count as outliers. If a simulation's largest update was usual in
        earlier rounds, there are none; a server has compared with these itself."""
        norms, named = record.get("norms"), record.get("outliers") or ()  # older records have neither
        if "usual_norm" in record:  # of a server
            return named
        if not norms:
            return ()
        self.norm = max(self.norm, norms["median"])
        return named if norms["largest"] > OUTLIER * self.norm else ()
