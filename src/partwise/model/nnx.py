"""A Flax NNX module as a partwise model: `Param`s and batch statistics are leaves, by their paths in the
module.

Dropout and everything else that draws from the module's `Rngs` gets the randomness of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from partwise import tree
from partwise.model.adapt import (
    Inputs,
    Statistics,
    arguments,
    begin_at,
    calling,
    check_functions,
    check_statistics,
    check_values,
    following,
    full_precision,
    losses_of,
    real_rows,
    shown,
    takes,
)
from partwise.model.spec import Batch, Metric, Model, Pooled, one_for_each, one_per_example
from partwise.types import UserError

try:
    from flax import nnx
except ImportError:  # pragma: no cover - without the extra
    raise UserError("Flax is not installed: pip install 'partwise[flax]'") from None


def nnx_model(
    module: nnx.Module | Callable[[nnx.Rngs], Any],
    loss: Callable[[jax.Array, Batch], jax.Array],
    metrics: Mapping[str, Metric | Pooled] | None = None,
    *,
    inputs: Inputs = None,
    weight: Callable[[Batch], jax.Array] = one_per_example,
    train_loss: Callable[[Any, Batch, jax.Array], jax.Array] | None = None,
    statistics: Statistics = "batch",
) -> Model:
    """A model from a Flax NNX module.

    Args:
        module: A function `rngs -> module`, or a module. The values of a module are the initial values of
            training.
        loss: (outputs, batch) -> one value for every example.
        metrics: {name: metric}.
        inputs: What the module is called with: a column, several columns, or a function of the batch
            (default: the batch).
        weight: batch -> the weight of each example.
        train_loss: (module, batch, rng) -> [B], losses for training, in place of the loss of the outputs.
        statistics: In training, use the statistics of the batch ("batch"), or the module's own, which then
            never change ("fixed").

    Returns:
        A model. The module is rebuilt with the arrays that it is given, and these may be slices of its
            parameters. So its code must take sizes from the arrays, not from its fields.
    """
    fixed, metrics = check_statistics(statistics), check_functions(loss, metrics, weight, inputs, train_loss)
    ready = isinstance(module, nnx.Module)
    start: Any = nnx.clone(module) if ready else None
    template: Any = nnx.clone(module) if ready else _made(module)
    for _, part in nnx.iter_modules(template):
        if isinstance(part, nnx.BatchNorm):
            part.momentum = 0.0  # after a call, the statistics are those of the batch
            if type(part) is nnx.BatchNorm:
                part.__class__ = _BatchNorm
    graph, learned, keys, counts, rest = nnx.split(template, LEARNED, nnx.RngKey, nnx.RngCount, ...)
    _refuse(rest)
    check_values(tree.flatten(nnx.to_pure_dict(learned)), "module")

    def init(rng: jax.Array) -> dict[str, Any]:
        if ready:
            return begin_at(nnx.to_pure_dict(learned))
        return nnx.to_pure_dict(nnx.state(module(nnx.Rngs(rng)), LEARNED))

    def around(values: Any, rng: jax.Array) -> Any:
        """The module with these values and with new random streams."""
        state = jax.tree_util.tree_map(lambda leaf: leaf, learned)
        nnx.replace_by_pure_dict(state, values)
        zeros = jax.tree_util.tree_map(lambda count: jnp.zeros(count.shape, count.dtype), counts)
        return nnx.merge(graph, state, _streams(keys, rng), zeros, rest)

    def predict(values: Any, batch: Batch, rng: jax.Array) -> Any:
        part = around(values, rng)
        part.eval()
        return full_precision(part(*arguments(inputs, batch)))

    def training(values: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        part = around(_held(values, learned) if fixed else values, rng)
        part.train()
        if fixed:
            part.set_attributes(nnx.BatchNorm, use_running_average=True, raise_if_not_found=False)
        with calling(batch):
            if train_loss is None:
                losses = losses_of(loss, full_precision(part(*arguments(inputs, batch))), batch)
            else:
                losses = one_for_each(train_loss(part, batch, rng), batch)
        moved = {} if fixed else tree.flatten(nnx.to_pure_dict(nnx.state(part, nnx.BatchStat)))
        return losses + weight(batch) * following(tree.flatten(values), moved) if moved else losses

    differs = train_loss or jax.tree_util.tree_leaves((keys, nnx.state(template, nnx.BatchStat)))
    make = lambda values: _with(nnx.clone(start) if ready else module(nnx.Rngs(0)), values)
    return Model(init, predict, loss, metrics, weight, training if differs else None, make)


class _BatchNorm(nnx.BatchNorm):
    """Batch normalisation with the statistics of a batch's examples."""

    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
        return super().__call__(x, use_running_average, mask=real_rows(x) if mask is None else mask)


def _with(module: Any, values: Any) -> Any:
    """The module with these values, for use."""
    state = nnx.state(module, LEARNED)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(module, state)
    module.eval()
    return module


LEARNED = nnx.Any(nnx.Param, nnx.BatchStat)


def _made(make: Callable[[nnx.Rngs], Any]) -> Any:
    """The module that a function of the random streams makes, with shapes in place of arrays."""
    if not callable(make) or type(make).__module__.startswith("flax.linen"):
        raise UserError(
            f"this is {shown(make)}: give an nnx.Module, or a function `rngs -> module` (modules of flax.linen are "
            f"another kind: write them with flax.nnx)"
        )
    if isinstance(make, type):
        _check_class(make)
    takes("module", make, "rngs")
    made: list[Any] = []
    shapes = nnx.eval_shape(lambda: made.append(make(nnx.Rngs(0))) or made[0])
    if not isinstance(made[0], nnx.Module):
        raise UserError(f"the function gave {shown(made[0])}, and not an nnx.Module: does it return one?")
    return shapes


def _check_class(make: type) -> None:
    try:
        takes(make.__name__, functools.partial(make.__init__, None), "rngs")
    except UserError as error:
        raise UserError(f"{error}. Write a function: lambda rngs: {make.__name__}(..., rngs=rngs)") from None


def _refuse(rest: Any) -> None:
    """Raise `UserError` for other kinds of state, because they would be lost between calls."""
    for path, leaf in nnx.to_flat_state(rest):
        kind = getattr(leaf, "type", type(leaf)).__name__
        raise UserError(
            f"this module has state of another kind than parameters, batch statistics and random streams: "
            f"'{'/'.join(map(str, path))}' is a {kind}. Build it without, or make it an nnx.Param with the role "
            f"frozen()"
        )


def _streams(keys: Any, rng: jax.Array) -> Any:
    """A separate key for every random stream of the module, made from the step's key."""
    leaves, structure = jax.tree_util.tree_flatten(keys)
    own = [jax.random.fold_in(rng, i) for i in range(len(leaves))]
    split = [
        jax.random.split(key, leaf.shape) if leaf.shape else key
        for key, leaf in zip(own, leaves, strict=True)
    ]
    return jax.tree_util.tree_unflatten(structure, split)


def _held(values: Any, learned: Any) -> Any:
    """The same values, without a gradient for the statistics."""
    paths = set(tree.flatten(nnx.to_pure_dict(nnx.filter_state(learned, nnx.BatchStat))))
    flat = tree.flatten(values)
    stopped = {path: jax.lax.stop_gradient(leaf) if path in paths else leaf for path, leaf in flat.items()}
    return tree.unflatten(jax.tree_util.tree_structure(values), tuple(flat), stopped)
