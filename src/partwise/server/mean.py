"""Means of client updates: the weight of a client, and the number by which the sum is divided."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from partwise import tree
from partwise.model.partition import Partition
from partwise.server.total import Aggregator, Carried, Contribution, Encode, Report, Total

Weigh = Callable[[Report], jax.Array]


def by_examples(report: Report) -> jax.Array:
    """The weight n_i, that of the query set (FedRecon, Algorithm 1; patent claim 11)."""
    return report.weight


def uniform(report: Report) -> jax.Array:
    """The same weight for every client (appendix B: weights "can be omitted")."""
    return jnp.ones(())


def weighted(weigh: Weigh) -> Encode:
    """Make the function that turns a report into a contribution with the weight `weigh(report)`. A client
    without query examples, such as an empty lane, always has weight 0."""

    def encode(report: Report, rng: jax.Array) -> Contribution:
        weight = jnp.where(report.weight > 0, weigh(report), 0)
        # A division: XLA computes it once for its two uses, the check and the sum. A product is computed twice.
        update = {
            path: change.astype(tree.wide(change)) / (1 / weight) for path, change in report.update.items()
        }
        valid = jnp.isfinite(tree.norm(update) + weight)
        return Contribution(update, weight, (weight > 0).astype(weight.dtype), report.loss, valid)

    return encode


def mean(weigh: Weigh = by_examples, over_holders: tuple[str, ...] = ()) -> Aggregator:
    """Sum of (n_i / n) delta_i over the cohort. In the key spaces `over_holders`, the sum and n are over the
    clients that hold the row.

    A row that only one client can hold then takes the whole update of that client. So the server stores that
    client's state (FedRecon, footnote 4).
    """

    def decode(
        partition: Partition, total: Total, carried: Carried, rng: jax.Array
    ) -> tuple[dict[str, jax.Array], Carried]:
        result = {}
        for path, summed in total.update.items():
            space = partition.roles[path].space if path in partition.roles else ""
            weight = total.held[space] if space in over_holders else total.weight
            weight = weight.reshape(-1, *[1] * (summed.ndim - 1)) if weight.ndim else weight
            result[path] = summed * (
                1 / jnp.where(weight > 0, weight, 1)
            )  # XLA fuses a product, not a division
        return result, carried

    return Aggregator(weighted(weigh), decode, over_holders)
