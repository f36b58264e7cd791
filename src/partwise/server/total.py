"""The sum: all that passes between clients and server.

A client's report is an update, a weight and a few numbers; a total is their sum. Because it only adds up, a
cohort can be summed in any order, in chunks, over devices, over a network, and under secure aggregation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partwise import tree
from partwise.metrics import Sums, add_sums, zero_sums
from partwise.model.partition import Partition


class Report(NamedTuple):
    """What a client returns (FedRecon, Algorithm 1: delta_i and n_i)."""

    update: Mapping[str, jax.Array]  # shared leaves: the change; keyed leaves: the change of its own rows
    weight: jax.Array  # n_i = weight of the query set; 0 if it is empty
    loss: Sums  # of the batches it trained on
    keep: Mapping[str, jax.Array] = {}  # stays with the client until its next round; never sent


class Total(NamedTuple):
    """Sum over clients of weight * update, and of the weights."""

    update: Mapping[str, jax.Array]  # keyed leaves: by table row
    held: Mapping[str, jax.Array]  # key space -> weight of the clients that hold each row, where asked for
    weight: jax.Array
    clients: jax.Array  # how many clients have a weight
    loss: Sums


def zero_total(
    partition: Partition,
    server: Mapping[str, jax.Array],
    trainable: tuple[str, ...],
    held: tuple[str, ...] = (),
) -> Total:
    """Nobody has reported yet. `held` are the key spaces in which holders are to be summed."""
    zero = jnp.zeros(())
    update = {path: jnp.zeros(server[path].shape, tree.wide(server[path])) for path in trainable}
    rows = {space: jnp.zeros(server[partition.spaces[space][0]].shape[0]) for space in held}
    return Total(update, rows, zero, zero, zero_sums())


def add_report(
    partition: Partition, total: Total, report: Report, weight: jax.Array, rows: Mapping[str, Any]
) -> Total:
    """Add one client's report; `rows[space]` are the table rows of its keys (out of range: padding)."""
    update = {}
    for path, summed in total.update.items():
        change = weight * report.update[path]
        if path in partition.of("keyed"):
            update[path] = summed.at[rows[partition.roles[path].space]].add(change, mode="drop")
        else:
            update[path] = summed + change
    return Total(
        update,
        {space: summed.at[rows[space]].add(weight, mode="drop") for space, summed in total.held.items()},
        total.weight + weight,
        total.clients + (weight > 0),
        add_sums(total.loss, report.loss),
    )
