"""The server's step: the mean update as an antigradient into any optax optimizer (Reddi et al., 2021).

With SGD and Adagrad a row that nobody sent keeps its value and its state, so the step may be taken on the
rows of a cohort alone. Momentum, Adam and Yogi go on moving such a row and need to see the whole table every
round; their lazy namesakes are defined on the rows that the cohort asked for, and leave the others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from partwise import tree
from partwise.model.partition import Partition
from partwise.types import Limits, unknown


class Optimizer(NamedTuple):
    """An optax transformation, and which rows of a keyed table it must see.

    all:   every row, because one with a zero gradient moves too
    exact: any rows that hold those which were sent; the others stay exactly as they are anyway
    asked: the rows that some client of the round asked for, and no other: that is what it is defined on
    """

    transform: optax.GradientTransformation
    rows: Literal["all", "exact", "asked"] = "all"


def sgd(rate: Any, momentum: float | None = None) -> Optimizer:
    """g <- g + rate * mean update (FedRecon, Algorithm 1; patent claim 13)."""
    return Optimizer(optax.sgd(rate, momentum), rows="exact" if momentum is None else "all")


def adagrad(rate: Any, initial_accumulator: float = 0.0, epsilon: float = 1e-3) -> Optimizer:
    """FedAdagrad; as optax has it, epsilon is added to the sum of squares, under the root."""
    return Optimizer(optax.adagrad(rate, initial_accumulator, epsilon), rows="exact")


def adam(rate: Any, b1: float = 0.9, b2: float = 0.99, epsilon: float = 1e-3) -> Optimizer:
    """FedAdam with the constants of Reddi et al."""
    return Optimizer(optax.adam(rate, b1, b2, epsilon))


def yogi(
    rate: Any, b1: float = 0.9, b2: float = 0.99, epsilon: float = 1e-3, initial_accumulator: float = 0.0
) -> Optimizer:
    """FedYogi with the constants of Reddi et al. and of FedRecon's language task."""
    scale = optax.scale_by_yogi(b1, b2, epsilon, initial_accumulator_value=initial_accumulator)
    return Optimizer(optax.chain(scale, optax.scale_by_learning_rate(rate)))


def lazy_adam(rate: Any, **settings: Any) -> Optimizer:
    """Adam on the rows that some client of the round asked for; all other rows keep their values and moments.

    What is shared is stepped as in Adam. Bias is corrected for the number of rounds, for every row alike.
    """
    return adam(rate, **settings)._replace(rows="asked")


def lazy_yogi(rate: Any, **settings: Any) -> Optimizer:
    """Yogi on the rows that some client of the round asked for, as `lazy_adam`."""
    return yogi(rate, **settings)._replace(rows="asked")


OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": sgd,
    "adagrad": adagrad,
    "adam": adam,
    "yogi": yogi,
    "lazy_adam": lazy_adam,
    "lazy_yogi": lazy_yogi,
}


# What the optimizers' own settings may be; a decay of 1 would never forget, and move nothing.
_FIRST, _SMALL = {"initial_accumulator": Limits(0, 1e6)}, {"epsilon": Limits(1e-12, 1e6)}
_DECAYS = {"b1": Limits(0, 0.9999), "b2": Limits(0, 0.999999)}
SETTINGS: Mapping[str, Mapping[str, Limits]] = {
    "sgd": {"momentum": Limits(0, 0.9999)},
    "adagrad": _FIRST | _SMALL,
    "adam": _DECAYS | _SMALL,
    "lazy_adam": _DECAYS | _SMALL,
    "yogi": _DECAYS | _SMALL | _FIRST,
    "lazy_yogi": _DECAYS | _SMALL | _FIRST,
}


def make_optimizer(name: str, rate: Any, **settings: Any) -> Optimizer:
    """An optimizer by name, with its settings."""
    if name not in OPTIMIZERS:
        raise unknown("server optimizer", name, OPTIMIZERS)
    for setting, value in settings.items():
        if setting not in SETTINGS[name]:
            raise unknown(f"setting of the server optimizer '{name}'", setting, SETTINGS[name])
        SETTINGS[name][setting].check(f"server.settings.{setting}", value)
    return OPTIMIZERS[name](rate, **settings)


class ServerState(NamedTuple):
    """All that the server carries from round to round."""

    params: Mapping[str, jax.Array]  # every leaf the server stores, flat, keyed leaves rows first
    optimizer: Any
    aggregator: Mapping[str, Mapping[str, Any]] = {}  # what it carries (see aggregation.mean)


def trainable(partition: Partition, params: Mapping[str, Any]) -> tuple[str, ...]:
    """The server leaves that clients update."""
    frozen = partition.of("frozen")
    return tuple(path for path in params if path not in frozen)


def init_state(
    partition: Partition,
    optimizer: Optimizer,
    params: Mapping[str, jax.Array],
    aggregator: Mapping[str, Mapping[str, Any]] | None = None,
) -> ServerState:
    """The state before the first round."""
    params = {path: jax.lax.convert_element_type(leaf, leaf.dtype) for path, leaf in params.items()}
    moving = {path: params[path] for path in trainable(partition, params)}
    return ServerState(params, optimizer.transform.init(moving), aggregator or {})


def step(state: ServerState, optimizer: Optimizer, mean: Mapping[str, jax.Array], active: Any) -> ServerState:
    """One server round; nothing moves if nobody reported (`active` false)."""
    moving = {path: state.params[path] for path in mean}
    gradients = tree.like({path: -update for path, update in mean.items()}, moving)
    changes, new_state = optimizer.transform.update(gradients, state.optimizer, moving)
    moved = optax.apply_updates(moving, changes)
    kept = tree.where(active, (moved, tree.like(new_state, state.optimizer)), (moving, state.optimizer))
    return ServerState({**state.params, **kept[0]}, kept[1], state.aggregator)


def map_tables(
    partition: Partition, optimizer: Optimizer, function: Callable, state: ServerState, *others: Any
):
    """Apply `function(leaf, space, *leaves of others)` to keyed leaves, to their optimizer state and to what the
    aggregator carries alike."""
    keyed = partition.of("keyed")
    space_of = lambda path: partition.roles[path].space if path in keyed else ""
    spaces = {path: space_of(path) for path in trainable(partition, state.params)}
    on_leaf = lambda leaf, space, *rest: (
        function(leaf, space, *rest) if space else (rest[0] if rest else leaf)
    )
    params = {
        path: on_leaf(leaf, spaces.get(path, ""), *(other.params[path] for other in others))
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
    partition: Partition, optimizer: Optimizer, state: ServerState, rows: Mapping[str, jax.Array]
) -> ServerState:
    """The state with its tables cut to these rows, by key space. A row out of range stands for none: it reads
    the last row, which is quicker than zeros, and `put_rows` drops it."""
    take = lambda leaf, space: leaf.at[rows[space]].get(mode="clip") if space in rows else leaf
    return map_tables(partition, optimizer, take, state)


def put_rows(
    partition: Partition,
    optimizer: Optimizer,
    state: ServerState,
    rows: Mapping[str, jax.Array],
    part: ServerState,
) -> ServerState:
    """The state with those rows, and all that is no table, replaced; the inverse of `take_rows`."""
    put = lambda leaf, space, new: leaf.at[rows[space]].set(new, mode="drop") if space in rows else new
    return map_tables(partition, optimizer, put, state, part)


def step_rows(
    partition: Partition,
    optimizer: Optimizer,
    state: ServerState,
    rows: Mapping[str, jax.Array],
    mean: Mapping[str, jax.Array],
    active: Any,
) -> ServerState:
    """`step` on these rows of the tables and on all that is no table; `mean` is of whole tables."""
    keyed = partition.of("keyed")
    space_of = {path: partition.roles[path].space for path in mean if path in keyed}
    part = take_rows(partition, optimizer, state, rows)
    cut = {path: mean[path][rows[space]] for path, space in space_of.items() if space in rows}
    part = step(part, optimizer, {**mean, **cut}, active)
    return put_rows(partition, optimizer, state, rows, part)


def is_finite(state: ServerState) -> jax.Array:
    """Whether the parameters are all finite numbers."""
    return tree.all_finite({p: v for p, v in state.params.items() if jnp.issubdtype(v.dtype, jnp.floating)})
