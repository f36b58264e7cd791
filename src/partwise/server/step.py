"""The server's state and its step: the optimizer applies the mean update, to whole tables or to some of their
rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from partwise import tree
from partwise.model.partition import Partition
from partwise.optimizers import ServerOptimizer


class ServerState(NamedTuple):
    """Everything that the server carries from round to round."""

    params: Mapping[str, jax.Array]  # every leaf the server stores, flat, keyed leaves rows first
    optimizer: Any
    aggregator: Mapping[str, Mapping[str, Any]] = {}  # what the aggregator carries (see server.total)


def trainable(partition: Partition, params: Mapping[str, Any]) -> tuple[str, ...]:
    """The server leaves that clients update."""
    trained = set(partition.trained_paths)
    return tuple(path for path in params if path in trained)


def init_state(
    partition: Partition,
    optimizer: ServerOptimizer,
    params: Mapping[str, jax.Array],
    aggregator: Mapping[str, Mapping[str, Any]] | None = None,
) -> ServerState:
    """The state before the first round."""
    params = {path: jax.lax.convert_element_type(leaf, leaf.dtype) for path, leaf in params.items()}
    moving = {path: params[path] for path in trainable(partition, params)}
    return ServerState(params, optimizer.transform.init(moving), aggregator or {})


def step(
    state: ServerState, optimizer: ServerOptimizer, mean: Mapping[str, jax.Array], active: Any
) -> ServerState:
    """One step of the server's optimizer. If `active` is False (no client reported), nothing changes."""
    moving = {path: state.params[path] for path in mean}
    gradients = tree.like({path: -update for path, update in mean.items()}, moving)
    changes, new_state = optimizer.transform.update(gradients, state.optimizer, moving)
    moved = optax.apply_updates(moving, changes)
    kept = tree.where(active, (moved, tree.like(new_state, state.optimizer)), (moving, state.optimizer))
    return ServerState({**state.params, **kept[0]}, kept[1], state.aggregator)


def map_tables(
    partition: Partition, optimizer: ServerOptimizer, function: Callable, state: ServerState, *others: Any
):
    """Apply `function(leaf, space, *leaves of others)` to all keyed leaves, to their optimizer state, and to
    the aggregator's carried values for them."""
    keyed = partition.of("keyed")
    space_of = lambda path: partition.roles[path].space if path in keyed else ""
    spaces = {path: space_of(path) for path in trainable(partition, state.params)}
    on_leaf = lambda leaf, space, *rest: (
        function(leaf, space, *rest) if space else (rest[0] if rest else leaf)
    )
    params = {
        path: on_leaf(leaf, space_of(path), *(other.params[path] for other in others))
        for path, leaf in state.params.items()
    }
    labels = optax.tree_map_params(
        optimizer.transform,
        lambda leaf, space: space,
        state.optimizer,
        spaces,
        transform_non_params=lambda leaf: "",
    )
    slots = jax.tree_util.tree_map(on_leaf, state.optimizer, labels, *(other.optimizer for other in others))
    carried = {
        name: {
            word: on_leaf(
                leaf,
                word if word in partition.spaces else space_of(word),
                *(other.aggregator[name][word] for other in others),
            )
            for word, leaf in by_word.items()
        }
        for name, by_word in state.aggregator.items()
    }
    return ServerState(params, slots, carried)


def take_rows(
    partition: Partition, optimizer: ServerOptimizer, state: ServerState, rows: Mapping[str, jax.Array]
) -> ServerState:
    """The state with its tables cut to these rows, by key space.

    A row number out of range is padding. It reads the last row (faster than reading zeros), and `put_rows`
    ignores it.
    """
    take = lambda leaf, space: leaf.at[rows[space]].get(mode="clip") if space in rows else leaf
    return map_tables(partition, optimizer, take, state)


def put_rows(
    partition: Partition,
    optimizer: ServerOptimizer,
    state: ServerState,
    rows: Mapping[str, jax.Array],
    part: ServerState,
) -> ServerState:
    """The state with these rows and everything that is not a table replaced by `part`. The inverse of
    `take_rows`."""
    put = lambda leaf, space, new: leaf.at[rows[space]].set(new, mode="drop") if space in rows else new
    return map_tables(partition, optimizer, put, state, part)


def is_finite(state: ServerState) -> jax.Array:
    """Whether the parameters are all finite numbers, and what the optimizer keeps."""
    leaves = jax.tree_util.tree_leaves((state.params, state.optimizer))
    return tree.all_finite([leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)])
