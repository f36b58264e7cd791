"""Metrics are pairs of sums. Sums are added, and the mean is taken once, at the end. Metrics that are not a
mean (the area under the ROC curve, the coverage of a catalogue) are computed from what all examples give
together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PERCENTILES = (5, 25, 50, 75, 95)


class Sums(NamedTuple):
    """A sum of values and a sum of their weights. Sums can be added again."""

    value: Any
    weight: Any


def zero_sums() -> Sums:
    """Sums of nothing."""
    return Sums(jnp.zeros(()), jnp.zeros(()))


def add_sums(a: Sums, b: Sums) -> Sums:
    """The sum of two sums."""
    return Sums(a.value + b.value, a.weight + b.weight)


def over_examples(
    sums: Mapping[str, Sums], finish: Mapping[str, Callable[[float], float]]
) -> dict[str, float]:
    """Every metric pooled over all examples. The sums may have a leading client axis.

    NaN if there were no examples.
    """
    return {name: _finished(finish.get(name), np.sum(s.value), np.sum(s.weight)) for name, s in sums.items()}


def over_clients(
    sums: Mapping[str, Sums], finish: Mapping[str, Callable[[float], float]]
) -> dict[str, dict[str, float]]:
    """Every metric per client, then its mean and percentiles over the clients that had examples."""
    result = {}
    for name, total in sums.items():
        held = np.asarray(total.weight) > 0
        if not held.any():
            result[name] = {"clients": 0}
            continue
        values = each_client(total, finish.get(name, float))[held]
        result[name] = {"clients": int(held.sum()), "mean": float(values.mean())}
        with np.errstate(invalid="ignore"):  # a client may have diverged; its percentile is then not finite
            result[name] |= {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return result


def each_client(total: Sums, finish: Callable[[float], float]) -> np.ndarray:
    """A metric of every client [clients]; not a number for those that had no examples."""
    value, weight = (np.asarray(part, np.float64) for part in total)
    held = weight > 0
    values = np.full(len(weight), np.nan)
    if held.any():
        values[held] = np.vectorize(finish, otypes=[float])(value[held] / weight[held])
    return values


def _finished(finish: Callable[[float], float] | None, value: Any, weight: Any) -> float:
    if not weight > 0:
        return float("nan")
    mean = float(value) / float(weight)
    return float(finish(mean)) if finish else mean


class Pairs(NamedTuple):
    """A score and a label for every example. `held` says which entries are real; the others are padding."""

    scores: Any
    labels: Any
    held: Any


Measured = dict[str, Sums | Pairs]  # every metric of a client, by name


class UndefinedError(ValueError):
    """A metric has no value for these examples; the message says why."""


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """The probability that an example with a label above 0 has a higher score than an example without; ties
    count half.

    The result is exact, because ranks are added as whole numbers. It is NaN if a score is NaN.
    """
    positive = np.asarray(labels) > 0
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        raise UndefinedError(_one_class(num_positive, num_negative))
    if np.isnan(scores).any():
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    doubled_ranks = 2 * np.cumsum(counts) - counts + 1  # twice the rank; for equal scores the middle rank
    doubled = int(doubled_ranks[inverse][positive].sum()) - num_positive * (num_positive + 1)
    return doubled / (2 * num_positive * num_negative)


def share_of_catalogue(found: np.ndarray, num_items: int) -> float:
    """The share of the items 0 .. num_items - 1 that are somewhere in `found`, in which -1 is nothing."""
    if not len(found):
        raise UndefinedError("there are no examples")
    return len(np.unique(found[found >= 0])) / num_items


def _one_class(num_positive: int, num_negative: int) -> str:
    if not num_positive and not num_negative:
        return "there are no examples"
    which = "positive" if num_positive else "negative"
    return f"all {num_positive + num_negative} labels are {which}, and both kinds are needed"


def over_pairs(
    pairs: Mapping[str, Pairs], finish: Mapping[str, Callable[[np.ndarray, np.ndarray], float]]
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Every metric of pooled pairs, None if it is undefined, and the reasons for undefined metrics."""
    values: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for name, pooled in pairs.items():
        held = np.asarray(pooled.held, bool)
        try:
            values[name] = float(
                finish[name](np.asarray(pooled.scores)[held], np.asarray(pooled.labels)[held])
            )
        except UndefinedError as error:
            values[name], reasons[name] = None, str(error)
    return values, reasons


def to_host(tree: Any) -> Any:
    """The same tree with numpy leaves."""
    return jax.tree_util.tree_map(np.asarray, tree)
