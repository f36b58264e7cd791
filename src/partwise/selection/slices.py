"""Ids to rows: what a client is sent, and inside a step which of its rows a batch needs.

*Select twice.* The server sends a client the rows of its keys (Federated Select, Algorithm 2); inside a step
the batch's rows are selected from those, and the batch's ids become positions 0..B-1 in them. The gradient is
then of the batch's rows only. The model's functions run unchanged: they index whatever table they are given.

A client's change of its rows is kept as a *delta* on its own keys, beside the rows it received: in a
simulation all clients of a cohort read one table, and no client copies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partwise.model.partition import DEFAULT, Partition, neutral_twin
from partwise.model.spec import Batch


class Received(NamedTuple):
    """What a client has from the server during a round, flat by path."""

    shared: Mapping[str, jax.Array]  # shared leaves and learned defaults
    frozen: Mapping[str, jax.Array]
    tables: Mapping[str, jax.Array]  # keyed leaves, rows first


def receive(partition: Partition, server: Mapping[str, jax.Array]) -> Received:
    """Sort the server's leaves by role; the tables may be whole or sliced."""
    keyed, frozen = set(partition.of("keyed")), set(partition.of("frozen"))
    return Received(
        {path: leaf for path, leaf in server.items() if path not in keyed | frozen},
        {path: server[path] for path in partition.of("frozen")},
        {path: server[path] for path in partition.of("keyed")},
    )


class Keys(NamedTuple):
    """The keys of one client in one space: `rows[start + p]` is the table row of its key number p."""

    rows: jax.Array  # [sum of keys] of all clients at hand
    start: jax.Array  # where this client's keys begin
    count: jax.Array  # how many it has
    capacity: int  # the most that any client has


def own_rows(keys: Keys, first: jax.Array, size: int, num_rows: int) -> jax.Array:
    """The table rows of `size` of a client's keys; past its last key, a row that does not exist."""
    position = first + jnp.arange(size)
    rows = keys.rows[jnp.minimum(keys.start + position, keys.rows.shape[0] - 1)]
    return jnp.where(position < keys.count, rows, num_rows)


class BatchRows(NamedTuple):
    """The rows a batch needs, by key space, and the batch with its ids re-numbered to them."""

    positions: dict[str, jax.Array]  # space -> [r] position among the client's own keys
    batch: Batch


def batch_rows(partition: Partition, batch: Batch, positions: Mapping[str, jax.Array]) -> BatchRows:
    """Select the second time: one row for every id that occurs in the batch (repeats included)."""
    own, renumbered = {}, dict(batch)
    for space in partition.spaces:
        names = partition.columns[space]
        own[space] = jnp.concatenate([positions[name].ravel() for name in names])
        offset = 0
        for name in names:
            size = positions[name].size
            renumbered[name] = offset + jnp.arange(size).reshape(positions[name].shape)
            offset += size
    return BatchRows(own, renumbered)


def gather(
    partition: Partition,
    tables: Mapping[str, jax.Array],
    deltas: Mapping[str, jax.Array],
    need: BatchRows,
    keys: Mapping[str, Keys],
) -> dict[str, jax.Array]:
    """The rows a batch needs: as received, plus the client's own change of them (if it has any yet)."""
    result = {}
    for path, table in tables.items():
        space = partition.roles[path].space
        positions, own = need.positions[space], keys[space]
        rows = table[own.rows[own.start + positions]]
        if path in deltas:
            rows = rows + deltas[path][positions]
        result[path] = rows
    return result


def scatter(
    partition: Partition, into: Mapping[str, jax.Array], rows: Mapping[str, jax.Array], need: BatchRows
) -> dict[str, jax.Array]:
    """Add rows of a batch to deltas at the client's positions; repeated ids add up."""
    return {
        path: into[path].at[need.positions[partition.roles[path].space]].add(rows[path], mode="drop")
        for path in into
    }


def empty_deltas(
    partition: Partition, tables: Mapping[str, jax.Array], capacities: Mapping[str, int]
) -> dict[str, jax.Array]:
    """Zero change for every keyed leaf, one row for every key that a client may have."""
    return {
        path: jnp.zeros((capacities[partition.roles[path].space], *table.shape[1:]), table.dtype)
        for path, table in tables.items()
    }


def initial_local(partition: Partition, received: Received, params: Any) -> dict[str, jax.Array]:
    """Where a client's own leaves start: random (as the model draws them), zero, or the learned default."""
    _, own = partition.split(params)
    start = {}
    for path, leaf in own.items():
        role = partition.roles[path]
        if role.twin:
            start[path] = neutral_twin(role, received.shared[path])
        elif role.initial == "learned":
            start[path] = received.shared[DEFAULT + path]
        else:
            start[path] = leaf if role.initial == "random" else jnp.zeros_like(leaf)
    return start
