"""Tables whose rows are spread over the devices, each of which has as many (the last ones of them padding).

A row that is read comes from the device that has it, by one sum over all devices; a row that is written stays where
it is. The sum is of whole numbers, of which all but one are 0, so that not a bit of a row changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from partwise.model.partition import Partition
from partwise.optimizers import ServerOptimizer
from partwise.randomness import AXIS
from partwise.server.step import ServerState, map_tables, put_rows, take_rows
from partwise.simulation.exchange import added_up, put_everywhere, to_host
from partwise.tree import num_bytes

CHUNK_BYTES = 1 << 24  # of a table that are brought to the host at a time


class Rowwise(NamedTuple):
    """How a compiled round takes the rows of its clients from the state, and puts them back.

    take: (partition, optimizer, state, rows) -> the state with its tables cut to these rows
    put:  (partition, optimizer, state, rows, part) -> the state with these rows, and all but tables, from `part`
    spec: where the state's leaves are
    """

    take: Callable[..., ServerState] = take_rows
    put: Callable[..., ServerState] = put_rows
    spec: Any = P()


WHOLE = Rowwise()


class SpreadTable:
    """A table that is spread over the devices, for those who save or evaluate it: `numpy.asarray` brings it to the
    host, and `chunks` does so in parts. With several processes, both must be called by all of them."""

    def __init__(self, array: jax.Array, num_rows: int, mesh: Mesh):
        self.array, self._mesh = array, mesh  # the array has padding
        self.shape, self.dtype = (num_rows, *array.shape[1:]), array.dtype
        self.ndim, self.nbytes = array.ndim, num_bytes(self.shape, self.dtype)

    def chunks(self) -> Iterator[np.ndarray]:
        """The rows in their order, some at a time."""
        most = max(1, CHUNK_BYTES // max(num_bytes(self.shape[1:], self.dtype), 1))
        size = min(most, self.shape[0])
        for first in range(0, self.shape[0], size):
            begin = min(first, self.shape[0] - size)
            yield to_host(self.rows(np.arange(begin, begin + size, dtype=np.int32)))[first - begin :]

    def rows(self, rows: np.ndarray) -> jax.Array:
        """These rows, on every device."""
        return _taking(self._mesh, self.shape[0])(self.array, put_everywhere(rows, self._mesh))

    def copy(self) -> SpreadTable:
        """The same rows in memory of their own."""
        return SpreadTable(jnp.copy(self.array), self.shape[0], self._mesh)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate(list(self.chunks())).astype(dtype or self.dtype, copy=False)


def is_spread(tree: Any) -> bool:
    """Whether some leaf of a tree is a spread table."""
    return any(isinstance(leaf, SpreadTable) for leaf in jax.tree_util.tree_leaves(tree))


@lru_cache
def _taking(mesh: Mesh, num_rows: int) -> Any:
    def take(table: jax.Array, rows: jax.Array) -> jax.Array:
        return _of_bits(added_up([_taken(table, rows, num_rows)])[0], table.dtype)

    mapped = jax.shard_map(take, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(), check_vma=False)
    return jax.jit(mapped)


def take_spread(
    partition: Partition, optimizer: ServerOptimizer, state: ServerState, rows: Mapping[str, jax.Array]
) -> ServerState:
    """`take_rows` of a state whose tables are spread, inside `shard_map`. A row that does not exist is 0."""
    tables: list[jax.Array] = []

    def own(leaf: jax.Array, space: str) -> jax.Array:
        if space in rows:
            tables.append(_taken(leaf, rows[space], partition.num_keys(space)))
        return leaf

    map_tables(partition, optimizer, own, state)
    found = iter(added_up(tables))
    take = lambda leaf, space: _of_bits(next(found), leaf.dtype) if space in rows else leaf
    return map_tables(partition, optimizer, take, state)


def put_spread(
    partition: Partition,
    optimizer: ServerOptimizer,
    state: ServerState,
    rows: Mapping[str, jax.Array],
    part: ServerState,
) -> ServerState:
    """`put_rows` of a state whose tables are spread, inside `shard_map`: each device writes its own rows."""

    def put(leaf: jax.Array, space: str, new: jax.Array) -> jax.Array:
        if space not in rows:
            return new
        at, is_here = _places(leaf, rows[space], partition.num_keys(space))
        return leaf.at[jnp.where(is_here, at, len(leaf))].set(new, mode="drop")

    return map_tables(partition, optimizer, put, state, part)


def _places(leaf: jax.Array, rows: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Where rows of a table are on this device, and whether they are there at all."""
    at = rows - jax.lax.axis_index(AXIS) * len(leaf)
    return at, (at >= 0) & (at < len(leaf)) & (rows < num_rows)


def _taken(leaf: jax.Array, rows: jax.Array, num_rows: int) -> jax.Array:
    """The bits of those rows that this device has, and 0 for the others."""
    at, is_here = _places(leaf, rows, num_rows)
    found = _bits(leaf.at[jnp.where(is_here, at, 0)].get(mode="clip"))
    return jnp.where(is_here.reshape(-1, *[1] * (leaf.ndim - 1)), found, 0)


def _bits(values: jax.Array) -> jax.Array:
    """Numbers as whole numbers of at least 32 bits, which all devices and networks can add."""
    plain = jax.lax.bitcast_convert_type(values, f"uint{8 * values.dtype.itemsize}")
    return plain.astype(jnp.uint32) if values.dtype.itemsize < 4 else plain


def _of_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits.astype(f"uint{8 * dtype.itemsize}"), dtype)
