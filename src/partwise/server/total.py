"""The sum: everything that goes from clients to the server.

A client's contribution is an update, a weight and a few numbers. A total is the sum of contributions. Because
contributions are only added, a cohort can be summed in any order, in chunks, over devices, over a network,
and with secure aggregation. An aggregator defines what a client adds (`encode`, on the client) and what the
sum means (`decode`, on the server).
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
    """The result of a client's round (FedRecon, Algorithm 1: delta_i and n_i). It stays on the client. Only
    the contribution that the aggregator's `encode` makes from it leaves the client."""

    update: Mapping[str, jax.Array]  # shared leaves: the change; keyed leaves: that of the client's rows
    weight: jax.Array  # n_i = weight of the query set; 0 if it is empty
    loss: Sums  # over the batches that the client trained on
    keep: Mapping[str, jax.Array] = {}  # stays on the client until its next round


class Contribution(NamedTuple):
    """What leaves a client: its part of every sum, and whether it may be added. What leaves a site of several
    clients is the sum of theirs."""

    update: Mapping[str, jax.Array]  # weight * update; keyed leaves: of the client's rows
    weight: jax.Array
    clients: jax.Array  # 1 if the weight is above 0, else 0; of several clients: how many have such a weight
    loss: Sums
    valid: jax.Array  # False if not finite: then nothing is added, and a device sends only this flag
    held: Mapping[
        str, Any
    ] = {}  # of several clients: as in `Total`, by row; one client has its weight for all rows


class Total(NamedTuple):
    """The sum of contributions."""

    update: Mapping[str, jax.Array]  # keyed leaves: by table row
    held: Mapping[str, jax.Array]  # key space -> weight of the clients that hold each row, if needed
    weight: jax.Array
    clients: jax.Array  # how many clients have a weight above 0
    loss: Sums


# What an aggregator carries from round to round: {name: {word: array}}. If the word is a key space or the path of a
# keyed leaf, the array has the rows of a table, and is cut and checkpointed like the tables. Any other word is
# allowed too.
Carried = Mapping[str, Mapping[str, Any]]


class Known(NamedTuple):
    """What a client knows besides its report.

    public: the numbers that the aggregator carries under the name `PUBLIC`, which every client is told
    keys:   key space -> how many keys the client asked for
    """

    public: Mapping[str, Any] = {}
    keys: Mapping[str, Any] = {}


PUBLIC = "public"
NOTHING = Known()
Encode = Callable[..., Contribution]
Decode = Callable[[Partition, Total, Carried, jax.Array], tuple[Mapping[str, jax.Array], Carried]]


Reveal = Callable[[Total, Carried, jax.Array | None], tuple[Total, Carried]]


def wide_zeros(leaf: Any) -> jax.Array:
    """Zeros of the leaf's shape, in at least 32 bits."""
    return jnp.zeros(leaf.shape, tree.wide(leaf))


class Aggregator(NamedTuple):
    """How contributions are made, added up and read.

    encode:   (report, randomness of the client) -> contribution; runs on the client. If `informed`, it has a third
              argument, `Known`
    decode:   (partition, total, carried values, randomness of the round) -> (mean update, new carried values)
    held:     key spaces for which the total must sum the weights of the clients that hold each row
    init:     partition -> carried values before the first round
    zero:     leaf -> zeros at which the sum of such leaves starts, with the type of the sum and of contributions
    reveal:   (total, carried values, randomness of the round) -> (the total in ordinary numbers, for `decode` and
              for records, new carried values) (default: unchanged). Nobody sees the total before. Without
              randomness (None), no noise is added: it is in the total already
    all_rows: whether `decode` must see whole tables, because it moves rows that no client sent
    private:  whether nothing of a round may be told but what `reveal` returns
    informed: whether `encode` is told what every client is (see `Known`)
    """

    encode: Encode
    decode: Decode
    held: tuple[str, ...] = ()
    init: Callable[[Partition], Carried] = lambda partition: {}
    zero: Callable[[Any], jax.Array] = wide_zeros
    reveal: Reveal = lambda total, carried, rng: (total, carried)
    all_rows: bool = False
    private: bool = False
    informed: bool = False


def zero_total(aggregator: Aggregator, partition: Partition, params: Mapping[str, Any]) -> Total:
    """The total before any client has contributed. `params` are the server's leaves."""
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
    """Add a valid contribution, of one client or of several. `rows[space]` are the table rows of its keys; rows out
    of range are padding."""
    update = {}
    for path, summed in total.update.items():
        if path in partition.of("keyed"):
            at = rows[partition.roles[path].space]
            update[path] = summed.at[at].add(sent.update[path], mode="drop")
        else:
            update[path] = summed + sent.update[path]
    weights = lambda space: sent.held.get(space, sent.weight)
    held = {s: summed.at[rows[s]].add(weights(s), mode="drop") for s, summed in total.held.items()}
    return Total(
        update,
        held,
        total.weight + sent.weight,
        total.clients + sent.clients,
        add_sums(total.loss, sent.loss),
    )
