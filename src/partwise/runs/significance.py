"""Whether a metric of two sets of settings differs by more than seeds do.

Runs of the same seed begin with the same values and draw the same cohorts, so they are compared seed by seed
(paired t-test). Otherwise their means are compared (Welch's t-test, which does not take their spreads to be
equal). Both need at least two seeds; from one, nothing follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

LEVEL = 0.95


class Difference(NamedTuple):
    """How much higher a metric is than that of the first row.

    difference: of the means
    low, high:  95 % interval of the difference; None if there are too few seeds
    p:          how often seeds alone would make a difference this large; None if it cannot be told
    method:     how it was found, with the number of seeds
    why:        why there is no interval, or no difference
    """

    difference: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    method: str = ""
    why: str = ""


def difference(first: Mapping[int, float | None], other: Mapping[int, float | None]) -> Difference:
    """The difference of a metric by seed, of two sets of settings."""
    one, two = _known(first), _known(other)
    if not one or not two:
        return Difference(None, why="a row has no value of the metric")
    mean = _mean(two.values()) - _mean(one.values())
    if min(len(one), len(two)) < 2:
        return Difference(mean, why="one seed tells nothing about the spread over seeds")
    if set(one) == set(two):
        pairs = np.array([two[seed] - one[seed] for seed in sorted(one)], float)
        error, freedom = pairs.std(ddof=1) / math.sqrt(len(pairs)), len(pairs) - 1.0
        method = f"paired by {len(pairs)} seeds"
    else:
        error, freedom = _welch(one.values(), two.values())
        method = f"Welch, {len(one)} and {len(two)} seeds"
    return _interval(mean, error, freedom, method)


def _known(values: Mapping[int, float | None]) -> dict[int, float]:
    return {seed: value for seed, value in values.items() if value is not None and math.isfinite(value)}


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


def _welch(one: Any, two: Any) -> tuple[float, float]:
    """The standard error of a difference of means, and its degrees of freedom (Welch and Satterthwaite)."""
    shares = [np.var(list(each), ddof=1) / len(each) for each in (one, two)]
    total = sum(shares)
    if total == 0:
        return 0.0, float(len(one) + len(two) - 2)
    parts = sum(share**2 / (len(each) - 1) for share, each in zip(shares, (one, two), strict=True))
    return math.sqrt(total), float(total**2 / parts)


def _interval(mean: float, error: float, freedom: float, method: str) -> Difference:
    from scipy.special import stdtr, stdtrit  # Student's t: its distribution and quantiles

    reach = float(stdtrit(freedom, (1 + LEVEL) / 2)) * error
    p = float(2 * stdtr(freedom, -abs(mean / error))) if error > 0 else None
    return Difference(mean, mean - reach, mean + reach, p, method)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p values, corrected for the number of comparisons (Holm)."""
    known = sorted((p, i) for i, p in enumerate(values) if p is not None)
    found: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (p, i) in enumerate(known):
        largest = max(largest, min(p * (len(known) - rank), 1.0))
        found[i] = largest
    return found
