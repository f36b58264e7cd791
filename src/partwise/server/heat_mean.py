"""Means corrected by heat (FedSubAvg, Algorithm 1, line 9): a row's mean over the cohort times N / n_m.

The expectation of this over cohorts is the mean over the clients that hold the row. So rows that few clients
hold move as fast as rows that all clients hold. The correction is a factor on the mean, for any weighting. It
is applied before the server optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from partwise.data.heat import Heat, coefficients
from partwise.data.heat_estimate import Seen
from partwise.model.partition import Partition
from partwise.server.mean import Weigh, mean, uniform, weighted
from partwise.server.total import Aggregator, Carried, Total
from partwise.types import UserError, unknown


def sub_mean(heats: Mapping[str, Heat], weigh: Weigh = uniform, cap: float | None = None) -> Aggregator:
    """The mean over the cohort, times N / n_m in the key spaces whose heat is given.

    Args:
        heats: {key space: heat}. Count heat by clients if all clients have the same weight. Count it by
            samples (as in the authors' code) if clients are weighted by their examples.
        weigh: The weight of a client.
        cap: The largest factor; None for no limit.
    """

    def init(partition: Partition) -> Carried:
        for space in heats:
            if space not in partition.spaces:
                raise unknown("key space of heat", space, partition.spaces)
        factors = {
            space: jnp.asarray(coefficients(heat, cap, partition.num_keys(space)))
            for space, heat in heats.items()
        }
        return {"factors": factors}

    def decode(
        partition: Partition, total: Total, carried: Carried, rng: jax.Array
    ) -> tuple[dict[str, jax.Array], Carried]:
        return _corrected(partition, total, carried["factors"], rng), carried

    return Aggregator(weighted(weigh), decode, (), init)


def estimated_sub_mean(
    spaces: tuple[str, ...], weigh: Weigh = uniform, cap: float | None = None
) -> Aggregator:
    """Like `sub_mean`, for N and n_m that are unknown. They are replaced by the share of holders among all
    clients that have reported so far, this round included (`data.heat_estimate` states the error). Holders
    are counted with the weights of the clients."""

    def init(partition: Partition) -> Carried:
        holders = {space: jnp.zeros(partition.num_keys(space)) for space in spaces}
        return {"holders": holders, "seen": {"weight": jnp.zeros(())}}

    def decode(
        partition: Partition, total: Total, carried: Carried, rng: jax.Array
    ) -> tuple[dict[str, jax.Array], Carried]:
        seen = {
            space: Seen(holders, carried["seen"]["weight"]).add(total.held[space], total.weight)
            for space, holders in carried["holders"].items()
        }
        factors = {space: each.coefficients(cap=cap) for space, each in seen.items()}
        now = {space: each.holders for space, each in seen.items()}
        weight = {"weight": carried["seen"]["weight"] + total.weight}
        return _corrected(partition, total, factors, rng), {"holders": now, "seen": weight}

    if not spaces:
        raise UserError("heat is of key spaces, and there is none: give some leaf the role keyed(space)")
    return Aggregator(weighted(weigh), decode, spaces, init)


def _corrected(
    partition: Partition, total: Total, factors: Mapping[str, Any], rng: jax.Array
) -> dict[str, jax.Array]:
    """The mean over the cohort, with the rows of keyed leaves multiplied by their factors."""
    plain, _ = mean().decode(partition, total, {}, rng)
    space_of = lambda path: partition.roles[path].space if path in partition.roles else ""
    over_rows = lambda path: factors[space_of(path)].reshape(-1, *[1] * (plain[path].ndim - 1))
    return {
        path: update * over_rows(path) if space_of(path) in factors else update
        for path, update in plain.items()
    }
