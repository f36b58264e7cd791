"""Training steps whose products are in bfloat16. Parameters, losses, gradients of parameters and sums stay float32,
and so does evaluation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from partwise.model.spec import Batch, Model
from partwise.types import Params, unknown

PRECISIONS = ("float32", "bfloat16")


def with_precision(model: Model, precision: str) -> Model:
    """The model with predictions from parameters and inputs that are rounded to this precision. Its loss is
    computed from these predictions in float32."""
    if precision not in PRECISIONS:
        raise unknown("precision (update.precision)", precision, PRECISIONS)
    rounded = lambda tree: _cast(tree, jnp.float32, jnp.dtype(precision))

    def predict(params: Params, batch: Batch, rng: jax.Array) -> Any:
        outputs = model.predict(rounded(params), rounded(batch), rng)
        return _cast(outputs, jnp.dtype(precision), jnp.float32)

    def train_loss(params: Params, batch: Batch, rng: jax.Array) -> jax.Array:
        assert model.train_loss
        return model.train_loss(rounded(params), rounded(batch), rng).astype(jnp.float32)

    return model._replace(predict=predict, train_loss=train_loss if model.train_loss else None)


def _cast(tree: Any, of: Any, to: Any) -> Any:
    return jax.tree_util.tree_map(lambda leaf: leaf.astype(to) if leaf.dtype == of else leaf, tree)
