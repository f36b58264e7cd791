"""Padding rows of a slice, and rows that a batch does not name: neither may change the outputs of a model.

Clients that run side by side have slices of the same size, padded after the client's last key. If a model is
given only the rows of the batch's ids, its output for an example must not depend on any other row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from partwise.model.partition import Partition
from partwise.model.softmax import NOTHING
from partwise.selection.slices import Keys
from partwise.types import UserError


def without_padding(
    partition: Partition,
    keys: Mapping[str, Keys],
    rows: Mapping[str, Any],
    predict: Callable[[Mapping[str, Any]], Any],
    outputs: Any,
) -> Any:
    """The outputs of `predict(rows)`, with `NOTHING` in the entries of padding rows.

    Slices are padded to one size. If the outputs have an entry for every row, a softmax over them would
    include the padding. Spaces with a leaf that has a `fill` are skipped, because the fill has this effect
    already.
    """
    for space, paths in partition.spaces.items():
        own, role = keys[space], partition.roles[paths[0]]
        filled = any(partition.roles[path].fill for path in paths)
        if own.rows is None or filled or not partition.is_whole(space):
            continue
        index = jnp.arange(own.capacity * role.block)
        key = index % own.capacity if role.interleaved else index // role.block
        longer = jax.eval_shape(predict, _one_more(partition, space, rows))
        mask = partial(_masked, space, key < own.count)
        outputs = jax.tree_util.tree_map(mask, outputs, longer)
    return outputs


def _one_more(partition: Partition, space: str, rows: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes of the rows if a space had one more key."""
    more = lambda path: 1 if partition.roles[path].space == space else 0
    return {
        path: jax.ShapeDtypeStruct((x.shape[0] + more(path), *x.shape[1:]), x.dtype)
        for path, x in rows.items()
    }


def _masked(space: str, real: jax.Array, outputs: jax.Array, longer: jax.ShapeDtypeStruct) -> jax.Array:
    """Put `NOTHING` in the entries of rows that are not real, along the axis that grows with the number of
    rows."""
    axes = [i for i, (now, then) in enumerate(zip(outputs.shape, longer.shape, strict=True)) if now != then]
    for axis in axes:
        if outputs.shape[axis] != len(real) or not jnp.issubdtype(outputs.dtype, jnp.floating):
            raise UserError(
                f"axis {axis} of the model's outputs ({outputs.dtype}) grows with the rows of key space '{space}', "
                f"but its {outputs.shape[axis]} entries are not one score for each of the {len(real)} rows, so it "
                f"cannot be told which of them are a client's own. Give a leaf a value for rows that a client has "
                f"not, as in keyed('{space}', whole=True, fill=-1e9) of a bias, or let all clients have all keys "
                f"(select.{space} = all)"
            )
        shape = [-1 if i == axis else 1 for i in range(outputs.ndim)]
        least = jnp.maximum(jnp.finfo(outputs.dtype).min / 2, NOTHING).astype(outputs.dtype)
        outputs = jnp.where(real.reshape(shape), outputs, least)
    return outputs


def check_rows_alone(
    partition: Partition,
    rows: Mapping[str, Any],
    predict: Callable[[Mapping[str, Any]], Any],
    outputs: Any,
) -> None:
    """Raise `UserError` if outputs grow with the rows of a space whose steps see only the batch's rows. Not step by
    step (`jax.disable_jit`), where a model should be called with numbers alone."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return
    shapes = lambda tree: [jnp.shape(x) for x in jax.tree_util.tree_leaves(tree)]
    for space in partition.spaces:
        if partition.is_whole(space):
            continue
        longer = jax.eval_shape(predict, _one_more(partition, space, rows))
        if shapes(outputs) != shapes(longer):
            raise not_whole(space, f"outputs have an entry for every row ({shapes(outputs)[0]})")


def not_whole(space: str, how: str) -> UserError:
    """Return the error for a model that uses more rows than its examples name."""
    return UserError(
        f"the model looks at all rows of key space '{space}', not only at those that its examples name: its {how}. "
        f"Say so with keyed('{space}', whole=True)"
    )
