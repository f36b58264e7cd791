"""From ids to rows: what a client is sent, and which of its rows a batch needs in a step.

*Select twice.* The server sends a client the rows of its keys (Federated Select, Algorithm 2). In a step, the
batch's rows are selected from these, and the batch's ids become positions 0..B-1 in them. So the gradient is
only with respect to the batch's rows. The model's functions do not change: they index the table that they are
given.

The change that a client makes to its rows is kept as a *delta* on its own keys, beside the rows it received.
In a simulation, all clients of a cohort read one table, and no client copies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from partwise.data.ragged import pad_to_power
from partwise.model.columns import masked
from partwise.model.partition import DEFAULT, Partition
from partwise.model.psi import take
from partwise.model.roles import Role, neutral_twin
from partwise.model.spec import Batch, add_to_bags, bag, lookup


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
    """The keys of one client in one space: `rows[start + p]` is the table row of its key number p.

    If keys are chosen again in every round, examples hold positions among the client's *own* keys. Then
    `place[place_start + p]` is the number of key p among the keys it asked for (-1: not among them).
    """

    rows: jax.Array | None  # [sum of keys] of many clients; None: all rows of the table, in order
    start: jax.Array  # where this client's keys begin
    count: jax.Array  # how many keys it has
    capacity: int  # room for the keys of any client
    place: jax.Array | None = None
    place_start: jax.Array | int = 0
    complete: bool = True  # every id of the client's examples is among its keys
    whole: jax.Array | None = (
        None  # if `rows` number those of a cut table, and the client reads a whole one: its rows
    )
    shift: jax.Array | int = (
        0  # if the table that it reads has several versions, one after another: where its own begins
    )


def take_keys(table: Any, keys: np.ndarray) -> np.ndarray:
    """The rows of these keys, on the host. The rest of the table is not copied."""
    if isinstance(table, np.ndarray):
        return table[keys]
    return np.asarray(_take(table, pad_to_power(keys)))[: len(keys)]


_take = jax.jit(lambda table, rows: table.at[rows].get(mode="clip"))


def own_rows(keys: Keys, first: jax.Array | int, size: int, num_rows: int) -> jax.Array:
    """The table rows of `size` of a client's keys. After its last key, a row number that does not exist."""
    position = first + jnp.arange(size)
    rows = position if keys.rows is None else _row(keys, position)
    return jnp.where(position < keys.count, rows, num_rows)


def _row(keys: Keys, position: jax.Array) -> jax.Array:
    if keys.rows is None:
        return position
    return keys.rows[jnp.minimum(keys.start + position, keys.rows.shape[0] - 1)]


def _read(keys: Keys, position: jax.Array) -> jax.Array:
    """Where the client reads the row of a key."""
    row = _row(keys, position)
    return (row if keys.whole is None else keys.whole[row]) + keys.shift


def own_slice(partition: Partition, path: str, table: jax.Array, keys: Keys) -> jax.Array:
    """A client's slice of a keyed leaf as it received it [capacity, ...], padded after its last key."""
    role = partition.roles[path]
    if keys.rows is None and keys.capacity == table.shape[0]:
        return role.psi.received(table)
    taken = role.psi.received(table[_read(keys, jnp.arange(keys.capacity))])
    return jnp.where(is_key(keys, taken.ndim), taken, jnp.asarray(role.fill, taken.dtype))


def is_key(keys: Keys, ndim: int) -> jax.Array:
    """Which rows of a slice are keys and not padding, shaped for broadcasting against the slice."""
    return (jnp.arange(keys.capacity) < keys.count).reshape(-1, *[1] * (ndim - 1))


class BatchRows(NamedTuple):
    """The rows that a batch needs, by key space, and the batch with its ids renumbered to these rows."""

    positions: dict[
        str, jax.Array
    ]  # space -> [r] position among the client's keys; -1: no row. Summed: [B, L]
    batch: Batch
    mask: jax.Array  # [B]: the example is real, and its id is in the slice


def batch_rows(
    partition: Partition,
    batch: Batch,
    positions: Mapping[str, jax.Array],
    mask: jax.Array,
    keys: Mapping[str, Keys],
) -> BatchRows:
    """The second selection: one row for every id in the batch (repeats included). If steps work on the whole
    slice, the ids become positions in the slice.

    An id outside the client's slice becomes -1. If a column holds one id per example, an example whose id is
    outside the slice is left out. If a model uses only sums of rows, an example's ids become one: that of its sum.
    The batch has the mask that says which examples are then left (`model.columns`).
    """
    needed, renumbered = {}, dict(batch)
    for space in partition.spaces:
        block, own, offset = partition.block(space), keys[space], 0
        parts = []
        for name in partition.columns[space]:
            at = _asked(positions[name], own, block)
            if not own.complete and at.ndim == 1:
                mask = mask & (at >= 0)
            if partition.is_whole(space):
                renumbered[name] = at
                continue
            if partition.is_summed(space):
                needed[space] = at.reshape(at.shape[0], -1)
                renumbered[name] = jnp.arange(at.shape[0]).reshape(-1, *[1] * (at.ndim - 1))
                continue
            number = offset + jnp.arange(at.size).reshape(at.shape)
            number = number * block + at % block if block > 1 else number
            may_miss = at.ndim > 1 or not own.complete
            renumbered[name] = jnp.where(at >= 0, number, -1) if may_miss else number
            parts.append((jnp.where(at >= 0, at // block, -1) if block > 1 else at).ravel())
            offset += at.size
        if parts:
            needed[space] = jnp.concatenate(parts)
    return BatchRows(needed, masked(renumbered, mask), mask)


def _asked(positions: jax.Array, keys: Keys, block: int) -> jax.Array:
    """Positions among the keys that the client asked for."""
    if keys.place is None:
        return positions
    last = keys.place.shape[0] - 1
    at = keys.place[jnp.clip(keys.place_start + positions // block, 0, last)]
    return jnp.where((positions >= 0) & (at >= 0), at * block + positions % block, -1)


def gather(
    partition: Partition,
    tables: Mapping[str, jax.Array],
    deltas: Mapping[str, jax.Array],
    need: BatchRows,
    keys: Mapping[str, Keys],
) -> dict[str, jax.Array]:
    """The rows that a batch needs: as received, plus the client's own change of them (if there is one yet). A
    missing row (position -1) is 0 if the batch can have one. Sums are of the client's values if it has them."""
    result = {}
    for path, table in tables.items():
        role = partition.roles[path]
        positions, own = need.positions[role.space], keys[role.space]
        if role.summed:
            values = deltas.get(path)
            result[path] = _sums(role, table, own, positions) if values is None else bag(values, positions)
            continue
        rows = role.psi.received(table[_read(own, positions)])
        if path in deltas:
            rows = rows + deltas[path][positions]
        if not own.complete or any(need.batch[name].ndim > 1 for name in partition.columns[role.space]):
            rows = jnp.where((positions >= 0).reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)
        result[path] = rows
    return result


def _sums(role: Role, table: jax.Array, keys: Keys, positions: jax.Array) -> jax.Array:
    """The sums of rows as received."""
    rows = jnp.where(positions >= 0, _read(keys, positions), -1)
    if role.psi is take:
        return bag(table, rows)
    sent = role.psi.received(lookup(table, rows.ravel())).reshape(*rows.shape, *table.shape[1:])
    return jnp.where((rows >= 0).reshape(*rows.shape, *[1] * (table.ndim - 1)), sent, 0).sum(axis=1)


def scatter(
    partition: Partition, into: Mapping[str, jax.Array], rows: Mapping[str, jax.Array], need: BatchRows
) -> dict[str, jax.Array]:
    """Add rows of a batch to deltas at the client's positions. Repeated ids add up; position -1 adds nothing. What
    is added to a sum is added to each of its rows."""
    result = {}
    for path, delta in into.items():
        positions = need.positions[partition.roles[path].space]
        if partition.roles[path].summed:
            result[path] = add_to_bags(delta, positions, rows[path])
            continue
        at = jnp.where(positions >= 0, positions, delta.shape[0])
        result[path] = delta.at[at].add(rows[path], mode="drop")
    return result


def empty_deltas(
    partition: Partition, tables: Mapping[str, jax.Array], capacities: Mapping[str, int]
) -> dict[str, jax.Array]:
    """A change of zero for every keyed leaf, with one row for every key that a client may have."""
    return {
        path: jnp.zeros((capacities[partition.roles[path].space], *table.shape[1:]), table.dtype)
        for path, table in tables.items()
    }


def initial_local(partition: Partition, received: Received, params: Any) -> dict[str, jax.Array]:
    """The initial values of a client's own leaves: random (as the model draws them), zero, or the learned
    default."""
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
