"""A Flax NNX module as a partwise model: its `Param`s are the parameters, by their paths in the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from partwise.model.spec import Batch, Metric, Model, Pooled, one_per_example
from partwise.types import UserError

try:
    from flax import nnx
except ImportError:  # pragma: no cover - without the extra
    raise UserError("Flax is not installed: pip install 'partwise[flax]'") from None


def nnx_model(
    build: Callable[[nnx.Rngs], Any],
    loss: Callable[[jax.Array, Batch], jax.Array],
    metrics: Mapping[str, Metric | Pooled] | None = None,
    *,
    call: Callable[[Any, Batch], jax.Array] = lambda module, batch: module(batch),
    weight: Callable[[Batch], jax.Array] = one_per_example,
    train_loss: Callable[[Any, Batch, jax.Array], jax.Array] | None = None,
) -> Model:
    """A model from a function that builds the module.

    `call(module, batch)` gives the outputs, `train_loss(module, batch, rng)` losses to train on in place of
    theirs. The module is rebuilt around whatever arrays it is given, so it may be handed slices of its
    parameters: its code must take sizes from the arrays, not from its fields.
    """
    graph, params, rest = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))), nnx.Param, ...)
    if jax.tree_util.tree_leaves(rest):
        raise UserError(
            "this module has state beside its parameters (dropout, batch statistics), which is not supported yet: "
            "build it without"
        )

    def init(rng: jax.Array) -> dict[str, Any]:
        return nnx.to_pure_dict(nnx.state(build(nnx.Rngs(rng)), nnx.Param))

    def module(values: Any) -> Any:
        state = jax.tree_util.tree_map(lambda leaf: leaf, params)
        nnx.replace_by_pure_dict(state, values)
        return nnx.merge(graph, state, rest)

    return Model(
        init,
        lambda values, batch, rng: call(module(values), batch),
        loss,
        dict(metrics or {}),
        weight,
        train_loss and (lambda values, batch, rng: train_loss(module(values), batch, rng)),
    )
