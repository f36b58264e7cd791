"""Means of client updates. An aggregator says what a client weighs, and what the sum means to the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from partwise.aggregation.total import Report, Total


class Aggregator(NamedTuple):
    """weigh: report -> weight of the client (0: it does not take part); decode: total -> mean update."""

    weigh: Callable[[Report], jax.Array]
    decode: Callable[[Total], Mapping[str, jax.Array]]


def _over_weight(total: Total) -> dict[str, jax.Array]:
    weight = jnp.where(total.weight > 0, total.weight, 1)
    return {path: summed / weight for path, summed in total.update.items()}


def weighted() -> Aggregator:
    """Sum of (n_i / n) delta_i (FedRecon, Algorithm 1; patent claim 11)."""
    return Aggregator(lambda report: report.weight, _over_weight)


def uniform() -> Aggregator:
    """Every client that has query examples counts the same (appendix B: weights "can be omitted")."""
    return Aggregator(lambda report: (report.weight > 0).astype(jnp.float32), _over_weight)
