"""Matrix factorisation R ~ P Q^T (FedRecon, section 5.1.1): a vector for every user, a row for every item."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from partwise.model.spec import Batch, Metric, Model, squared_error


def matrix_factorization(
    num_items: int, dim: int = 50, num_users: int | None = None, scale: float = 0.05, target: str = "rating"
) -> Model:
    """Ratings as dot products, without biases or a mean, as in the authors' code.

    `num_users` None: one user vector, the client's own (to be local). Else a table of them, indexed by the
    column `user` (to be keyed by user). Values start uniform in (-scale, scale).
    """
    users = (dim,) if num_users is None else (num_users, dim)

    def init(rng: jax.Array) -> dict:
        user, item = jax.random.split(rng)
        return {
            "user": jax.random.uniform(user, users, jnp.float32, -scale, scale),
            "item": jax.random.uniform(item, (num_items, dim), jnp.float32, -scale, scale),
        }

    def predict(params: dict, batch: Batch, rng: jax.Array) -> jax.Array:
        user = params["user"] if num_users is None else params["user"][batch["user"]]
        return jnp.sum(params["item"][batch["item"]] * user, axis=-1)

    return Model(
        init,
        predict,
        lambda outputs, batch: squared_error(outputs, batch, target),
        metrics={
            "rmse": Metric(lambda outputs, batch: squared_error(outputs, batch, target), math.sqrt),
            "accuracy": Metric(lambda o, b: jnp.abs(o - b[target]) <= 0.5, higher_is_better=True),
        },
    )
