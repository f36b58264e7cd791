"""Federated Select as a function of values: eq. 4 and 5 of the paper, for any server value and any select
function.

This is the slow and simple counterpart of what rounds do with keyed leaves. `psi(x, k)` returns the part of x
for key k; it may also transform it. Keys are in the client's order and may repeat. Clients may have different
numbers of keys. Broadcasts and selects can be combined into one select (section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from partwise.model.partition import Partition
from partwise.model.psi import Psi
from partwise.types import UserError

SelectFunction = Callable[[Any, Any], Any]  # psi: (x, key) -> slice


def select(x: Any, keys: Any, psi: SelectFunction, num_keys: int | None = None) -> Any:
    """[psi(x, z_1), ..., psi(x, z_m)], stacked along a new first axis of every leaf (eq. 4)."""
    keys = check_keys(keys, num_keys)
    return jax.vmap(lambda k: psi(x, k))(keys)


def deselect(slices: Any, keys: Any, num_keys: int) -> Any:
    """phi: put slices back in their places, with zeros elsewhere. Slices of repeated keys are added (eq. 5)."""
    keys = check_keys(keys, num_keys)
    place = lambda part: jnp.zeros((num_keys, *part.shape[1:]), part.dtype).at[keys].add(part)
    return jax.tree_util.tree_map(place, slices)


def check_keys(keys: Any, num_keys: int | None) -> jax.Array:
    """Return the keys as an int32 array. Raises `UserError` if they are not valid keys."""
    keys = jnp.asarray(keys)
    if keys.ndim != 1 or not (keys.size == 0 or jnp.issubdtype(keys.dtype, jnp.integer)):
        raise UserError(f"keys are a list of whole numbers, not {keys.dtype} of shape {keys.shape}")
    if num_keys is None or not keys.size or isinstance(keys, Tracer):
        return keys.astype(jnp.int32)
    if int(keys.min()) < 0 or int(keys.max()) >= num_keys:
        raise UserError(
            f"keys {int(keys.min())}..{int(keys.max())} are out of range: there are 0..{num_keys - 1}"
        )
    return keys.astype(jnp.int32)


def take(axis: int = 0) -> SelectFunction:
    """psi(x, k): entry k of every leaf along an axis."""
    return lambda x, k: jax.tree_util.tree_map(lambda leaf: jnp.take(leaf, k, axis=axis), x)


def whole() -> SelectFunction:
    """psi(x, k) = x: a broadcast is a select with any one key."""
    return lambda x, k: x


def encoded(psi: SelectFunction, how: Psi) -> SelectFunction:
    """psi followed by an encoding (float16, int8). The encoded slice is smaller to send; the client gets it
    decoded."""

    def arrives(leaf: jax.Array) -> jax.Array:
        return how.received(leaf[None])[0]

    return lambda x, k: jax.tree_util.tree_map(arrives, psi(x, k))


def bucketed(psi: SelectFunction, size: int) -> SelectFunction:
    """One key for `size` neighbouring keys of psi (section 6: buckets of words)."""
    return lambda x, k: jax.vmap(lambda j: psi(x, k * size + j))(jnp.arange(size))


def both(first: SelectFunction, second: SelectFunction) -> SelectFunction:
    """Two selects as one, on pairs of values and pairs of keys."""
    return lambda x, k: (first(x[0], k[0]), second(x[1], k[1]))


def with_broadcast(psi: SelectFunction) -> SelectFunction:
    """A select and a broadcast as one: psi'((x, y), k) = (psi(x, k), y)."""
    return lambda x, k: (psi(x[0], k), x[1])


def keyed_leaves(partition: Partition, space: str) -> SelectFunction:
    """The psi of a key space: the row of every leaf of the space, as a client receives it."""

    def psi(server: Mapping[str, jax.Array], k: Any) -> dict[str, jax.Array]:
        row = lambda path: partition.roles[path].psi.received(server[path][k][None])[0]
        return {path: row(path) for path in partition.spaces[space]}

    return psi
