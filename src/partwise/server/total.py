"""The sum: all that passes from clients to the server.

A client's contribution is an update, a weight and a few numbers; a total is their sum. Because it only adds up, a
cohort can be summed in any order, in chunks, over devices, over a network, and under secure aggregation. An
aggregator says what a client adds (`encode`, on the client) and what the sum means (`decode`, on the server).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partwise import tree
from partwise.metrics import Sums, add_sums
from partwise.model.partition import Partition
from partwise.server.step import trainable


class Report(NamedTuple):
    """What a client found in a round (FedRecon, Algorithm 1: delta_i and n_i). It stays on the client: what leaves
    is what the aggregator's `encode` makes of it."""

    update: Mapping[str, jax.Array]  # shared leaves: the change; keyed leaves: the change of its own rows
    weight: jax.Array  # n_i = weight of the query set; 0 if it is empty
    loss: Sums  # of the batches it trained on
    keep: Mapping[str, jax.Array] = {}  # stays with the client until its next round


class Contribution(NamedTuple):
    """What leaves a client: its part of every sum, and whether it may be added."""

    update: Mapping[str, jax.Array]  # weight * update; keyed leaves: of its own rows
    weight: jax.Array
    clients: jax.Array  # 1 if it has a weight
    loss: Sums
    valid: jax.Array  # False: it is not finite. Nothing of it is added, and a device sends nothing but this


class Total(NamedTuple):
    """The sum of contributions."""

    update: Mapping[str, jax.Array]  # keyed leaves: by table row
    held: Mapping[str, jax.Array]  # key space -> weight of the clients that hold each row, where asked for
    weight: jax.Array
    clients: jax.Array  # how many clients have a weight
    loss: Sums


# What an aggregator carries from round to round: by name, and there by key space or path of a leaf (in both cases
# rows of tables, which are cut and checkpointed as the tables are), or by any other word.
Carried = Mapping[str, Mapping[str, Any]]
Encode = Callable[[Report, jax.Array], Contribution]
Decode = Callable[[Partition, Total, Carried, jax.Array], tuple[Mapping[str, jax.Array], Carried]]


def wide_zeros(leaf: Any) -> jax.Array:
    """Zeros like a leaf, in at least 32 bits."""
    return jnp.zeros(leaf.shape, tree.wide(leaf))


class Aggregator(NamedTuple):
    """How contributions are made, added up and read.

    encode:   (report, randomness of the client) -> contribution, on the client
    decode:   (partition, total, what it carries, randomness of the round) -> (mean update, what it carries on)
    held:     the key spaces whose holders the total must sum, for `decode`
    init:     partition -> what it carries at the start
    zero:     leaf -> where the sum of such leaves begins. Its type is that of the sum, and of contributions
    reveal:   total -> the same in ordinary numbers, for `decode` and for records (default: it is that already)
    all_rows: whether `decode` must see the whole tables, because it moves rows that no client sent
    """

    encode: Encode
    decode: Decode
    held: tuple[str, ...] = ()
    init: Callable[[Partition], Carried] = lambda partition: {}
    zero: Callable[[Any], jax.Array] = wide_zeros
    reveal: Callable[[Total], Total] = lambda total: total
    all_rows: bool = False


def zero_total(aggregator: Aggregator, partition: Partition, params: Mapping[str, Any]) -> Total:
    """Nobody has contributed yet; `params` are the server's leaves."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    rows = lambda space: jax.ShapeDtypeStruct(params[partition.spaces[space][0]].shape[:1], jnp.float32)
    return Total(
        update={path: aggregator.zero(params[path]) for path in trainable(partition, params)},
        held={space: aggregator.zero(rows(space)) for space in aggregator.held},
        weight=aggregator.zero(number),
        clients=aggregator.zero(number),
        loss=Sums(aggregator.zero(number), aggregator.zero(number)),
    )


def add(partition: Partition, total: Total, sent: Contribution, rows: Mapping[str, Any]) -> Total:
    """Add one client's valid contribution; `rows[space]` are the table rows of its keys (out of range: padding)."""
    update = {}
    for path, summed in total.update.items():
        if path in partition.of("keyed"):
            at = rows[partition.roles[path].space]
            update[path] = summed.at[at].add(sent.update[path], mode="drop")
        else:
            update[path] = summed + sent.update[path]
    return Total(
        update,
        {space: summed.at[rows[space]].add(sent.weight, mode="drop") for space, summed in total.held.items()},
        total.weight + sent.weight,
        total.clients + sent.clients,
        add_sums(total.loss, sent.loss),
    )
