"""Means of client updates. An aggregator says what a client weighs, and what the sum means to the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partwise.model.partition import Partition
from partwise.server.total import Report, Total

# What an aggregator carries from round to round: by name, and there by key space or path of a leaf (in both cases
# rows of tables, which are cut and checkpointed as the tables are), or by any other word.
Carried = Mapping[str, Mapping[str, Any]]


class Aggregator(NamedTuple):
    """weigh:  report -> weight of the client (0: it does not take part); see `weight_of`
    decode: (partition, total, what it carries) -> (mean update, what it carries on)
    held:   the key spaces whose holders the total must sum, for `decode`
    init:   partition -> what it carries at the start
    """

    weigh: Callable[[Report], jax.Array]
    decode: Callable[[Partition, Total, Carried], tuple[Mapping[str, jax.Array], Carried]]
    held: tuple[str, ...] = ()
    init: Callable[[Partition], Carried] = lambda partition: {}


def weight_of(aggregator: Aggregator, report: Report) -> jax.Array:
    """What a client weighs. Who has no query example, an empty lane among them, never takes part, whatever the
    aggregator says."""
    return jnp.where(report.weight > 0, aggregator.weigh(report), 0)


def by_examples(report: Report) -> jax.Array:
    """n_i, the weight of the query set (FedRecon, Algorithm 1; patent claim 11)."""
    return report.weight


def uniform(report: Report) -> jax.Array:
    """Every client counts the same (appendix B: weights "can be omitted")."""
    return jnp.ones(())


def mean(
    weigh: Callable[[Report], jax.Array] = by_examples, over_holders: tuple[str, ...] = ()
) -> Aggregator:
    """Sum of (n_i / n) delta_i over the cohort; in the key spaces `over_holders`, over the clients that hold
    the row. A row that only one client can hold then takes that client's update whole: its state, kept on the
    server (FedRecon, footnote 4)."""

    def decode(partition: Partition, total: Total, carried: Carried) -> tuple[dict[str, jax.Array], Carried]:
        result = {}
        for path, summed in total.update.items():
            space = partition.roles[path].space if path in partition.roles else ""
            weight = total.held[space] if space in over_holders else total.weight
            weight = weight.reshape(-1, *[1] * (summed.ndim - 1)) if weight.ndim else weight
            result[path] = summed * (
                1 / jnp.where(weight > 0, weight, 1)
            )  # XLA fuses a product, not a division
        return result, carried

    return Aggregator(weigh, decode, over_holders)
