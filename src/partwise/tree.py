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
    """Bytes of one array of that shape."""
    size = 1
    for length in shape:
        size *= length
    return size * jnp.dtype(dtype).itemsize


def all_finite(tree: Params) -> jax.Array:
    """Whether no leaf holds a NaN or an infinity: then its sum is finite too (and sums are quick)."""
    sums = [jnp.sum(leaf) for leaf in jax.tree_util.tree_leaves(tree)]
    return jnp.all(jnp.isfinite(jnp.stack(sums))) if sums else jnp.asarray(True)


def where(condition: jax.Array, yes: Params, no: Params) -> Params:
    """Leaf by leaf, `yes` where the (scalar) condition holds, else `no`."""
    return jax.tree_util.tree_map(lambda a, b: jnp.where(condition, a, b), yes, no)
