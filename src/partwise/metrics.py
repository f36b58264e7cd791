"""Metrics are pairs of sums that add up; a mean is taken once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PERCENTILES = (5, 25, 50, 75, 95)


class Sums(NamedTuple):
    """A sum of values and of their weights; sums of sums are sums."""

    value: Any
    weight: Any


def zero_sums() -> Sums:
    """Nothing summed yet."""
    return Sums(jnp.zeros(()), jnp.zeros(()))


def add_sums(a: Sums, b: Sums) -> Sums:
    """Both together."""
    return Sums(a.value + b.value, a.weight + b.weight)


def over_examples(
    sums: Mapping[str, Sums], finish: Mapping[str, Callable[[float], float]]
) -> dict[str, float]:
    """Every metric pooled over all examples (a client's sums may have a leading client axis).

    NaN where there were no examples.
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
        means = np.asarray(total.value, np.float64)[held] / np.asarray(total.weight, np.float64)[held]
        values = np.vectorize(finish.get(name, float), otypes=[float])(means)
        result[name] = {"clients": int(held.sum()), "mean": float(values.mean())}
        with np.errstate(invalid="ignore"):  # a client may have diverged; then so says its percentile
            result[name] |= {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return result


def _finished(finish: Callable[[float], float] | None, value: Any, weight: Any) -> float:
    if not weight > 0:
        return float("nan")
    mean = float(value) / float(weight)
    return float(finish(mean)) if finish else mean


def to_host(tree: Any) -> Any:
    """The same tree with numpy leaves."""
    return jax.tree_util.tree_map(np.asarray, tree)
