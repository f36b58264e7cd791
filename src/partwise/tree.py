"""Pytrees as flat dicts of paths: `{"item": {"table": x}}` is `{"item/table": x}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from partwise.types import Params


def flatten(tree: Params) -> dict[str, Any]:
    """Every leaf under its path, joined with `/`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def unflatten(treedef: Any, paths: tuple[str, ...], flat: Mapping[str, Any]) -> Params:
    """The exact inverse of `flatten` for a tree of that structure."""
    return jax.tree_util.tree_unflatten(treedef, [flat[path] for path in paths])


def num_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of one array with this shape."""
    size = 1
    for length in shape:
        size *= length
    return size * jnp.dtype(dtype).itemsize


def wide(leaf: Any) -> Any:
    """The type for sums of values like this leaf's: at least 32 bits."""
    return jnp.promote_types(leaf.dtype, jnp.float32)


def like(tree: Params, other: Params) -> Params:
    """The tree with every leaf in the type of the other tree's leaf. A loop needs this for what it carries."""
    return jax.tree_util.tree_map(lambda a, b: jnp.asarray(a, jnp.asarray(b).dtype), tree, other)


def all_finite(tree: Params) -> jax.Array:
    """Whether no leaf has a NaN or an infinity. If so, its sum is finite too, and sums are fast to compute.
    16-bit numbers are summed in 32 bits, because the sum could be too large for 16 bits."""
    sums = [jnp.sum(leaf, dtype=wide(leaf)) for leaf in map(jnp.asarray, jax.tree_util.tree_leaves(tree))]
    return jnp.all(jnp.isfinite(jnp.stack(sums))) if sums else jnp.asarray(True)


def norm(tree: Params) -> jax.Array:
    """The Euclidean norm of all leaves together, in 32 bits: infinite from about 1.8e19 on, and not a number or
    infinite if some value is."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree_util.tree_leaves(tree)]
    squares = [jnp.sum(jnp.square(jnp.abs(leaf).astype(wide(leaf)))) for leaf in leaves]
    return jnp.sqrt(sum(squares, jnp.zeros(())))


def where(condition: jax.Array, yes: Params, no: Params) -> Params:
    """For every leaf, `yes` if the (scalar) condition is true, otherwise `no`."""
    return jax.tree_util.tree_map(lambda a, b: jnp.where(condition, a, b), yes, no)
