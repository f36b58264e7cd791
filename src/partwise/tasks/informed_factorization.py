"""Matrix factorisation that uses what else is known: which items a client rated, and what items and users are.

Beside the leaves of `matrix_factorization` with biases there are

* signals: that an item was rated pulls the client's vector along the item's `item_signal` (keyed), whatever
  the rating (the idea of SVD++: Koren, 2008).
* attention: how much a rating of an item counts in the client's vector, exp of `item_attention` (keyed). Like
  signals it is only in the loss of the reconstruction, which stays least squares in the client's part. An
  update through the reconstruction learns both (`client.through`).
* what items are: `item_features` (keyed, not trained) names features of an item, such as genres. `item_tower`
  (shared) has a vector for each, which is added to the item's own. A pull keeps what is an item's own small, so
  that an item with few ratings is what its features say.
* what users are: columns of the client's own data name features, such as an age group; `user_tower` (shared)
  has a vector for each, which is added to the client's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partwise.model.spec import Batch, Metric, Model, lookup, squared_error

SCALE = 0.05  # the scale of the initial vectors
OWN = ("item", "item_bias", "item_signal", "item_attention")  # what is an item's own


def informed_factorization(
    num_items: int,
    dim: int = 10,
    *,
    center: float = 0.0,
    spread: float = 1.0,
    signals: bool = False,
    attention: bool = False,
    item_pull: float = 0.0,
    item_features: np.ndarray | None = None,
    num_item_features: int = 0,
    user_features: Mapping[str, int] | None = None,
    cuts: tuple[float, ...] = (),
) -> Model:
    """Ratings as dot products with biases.

    Args:
        num_items: The number of items.
        dim: The size of the vectors.
        center: The mean of the ratings. The model learns them in units of `spread` around it.
        spread: Their standard deviation.
        signals: Whether there are signals.
        attention: Whether there is attention.
        item_pull: This times the sum of squares of an item's own numbers is added to the training loss of each of
            its ratings.
        item_features: The features of every item, [items, K], padded with -1; None for none.
        num_item_features: How many features there are; 0 for none.
        user_features: {column: how many values it has}.
        cuts: Where accuracy cuts predictions into levels of whole ratings from 1: a prediction between the first
            and the second is a 2. Without cuts, a prediction is right within 0.5.
    """
    columns = user_features or {}

    def init(rng: jax.Array) -> dict:
        user, item = jax.random.split(rng)
        vectors = lambda rng, shape: jax.random.uniform(rng, shape, jnp.float32, -SCALE, SCALE)
        params: dict[str, Any] = {"user": vectors(user, (dim,)), "item": vectors(item, (num_items, dim))}
        params |= {"mean": jnp.zeros(()), "user_bias": jnp.zeros(()), "item_bias": jnp.zeros(num_items)}
        if signals:
            params["item_signal"] = jnp.zeros((num_items, dim))
        if attention:
            params["item_attention"] = jnp.zeros(num_items)
        if item_features is not None:
            params["item_features"] = jnp.asarray(item_features, jnp.float32)
            params["item_tower"] = jnp.zeros((num_item_features, dim + 1))
        if columns:
            params["user_tower"] = {name: jnp.zeros((size, dim + 1)) for name, size in columns.items()}
        return params

    def found(params: dict, batch: Batch) -> jax.Array:
        """The prediction in units of the spread."""
        item, bias = params["item"][batch["item"]], params["item_bias"][batch["item"]]
        if item_features is not None:
            named = params["item_features"][batch["item"]].astype(jnp.int32)
            about = lookup(params["item_tower"], named).sum(axis=-2)
            item, bias = item + about[..., :dim], bias + about[..., dim]
        user, own_bias = params["user"], params["user_bias"]
        for name in columns:
            about = params["user_tower"][name][batch[name]]
            user, own_bias = user + about[..., :dim], own_bias + about[..., dim]
        return jnp.sum(item * user, axis=-1) + params["mean"] + own_bias + bias

    def errors(params: dict, batch: Batch) -> jax.Array:
        return jnp.square(found(params, batch) - (batch["rating"] - center) / spread)

    def train_loss(params: dict, batch: Batch, rng: jax.Array) -> jax.Array:
        loss = errors(params, batch)
        for name in (name for name in OWN if item_pull and name in params):
            squares = jnp.square(params[name][batch["item"]])
            loss += item_pull * (squares if params[name].ndim == 1 else squares.sum(axis=-1))
        return loss

    def rebuild_loss(params: dict, batch: Batch, rng: jax.Array) -> jax.Array:
        loss = errors(params, batch)
        if attention:
            loss *= jnp.exp(params["item_attention"][batch["item"]])
        if signals:
            loss -= 2 * jnp.sum(params["item_signal"][batch["item"]] * params["user"], axis=-1)
        return loss

    def right(outputs: jax.Array, batch: Batch) -> jax.Array:
        if not cuts:
            return jnp.abs(outputs - batch["rating"]) <= 0.5
        return 1 + jnp.searchsorted(jnp.array(cuts), outputs) == batch["rating"]

    error = lambda outputs, batch: squared_error(outputs, batch, "rating")
    more: dict[str, Any] = {"rebuild_loss": rebuild_loss} if signals or attention else {}
    return Model(
        init,
        lambda params, batch, rng: center + spread * found(params, batch),
        lambda outputs, batch: error(outputs, batch) / spread**2,
        metrics={"rmse": Metric(error, math.sqrt), "accuracy": Metric(right, higher_is_better=True)},
        train_loss=train_loss,
        **more,
    )
