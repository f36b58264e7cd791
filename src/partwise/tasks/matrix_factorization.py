"""Matrix factorisation R ~ P Q^T (FedRecon, section 5.1.1): a vector for every user, a row for every item."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from partwise.model.spec import Batch, Metric, Model, squared_error


def matrix_factorization(
    num_items: int,
    dim: int = 50,
    num_users: int | None = None,
    biases: bool = False,
    scale: float = 0.05,
    target: str = "rating",
    center: float = 0.0,
    spread: float = 1.0,
    pull: float = 0.0,
) -> Model:
    """Ratings as dot products; by default without biases or a mean, as in the authors' code.

    If `num_users` is None, there is one user vector, the client's own (which should be local). Otherwise
    there is a table of them, indexed by the column `user` (which should be keyed by user). `biases` adds a
    mean, and a number for every user and item. Vectors start uniform in (-scale, scale), biases at zero. The
    model learns ratings in units of `spread` around `center`, and its loss is in these units. Outputs and
    metrics are in the units of the given ratings. `pull` times the squares of the user's and the item's numbers
    is added to the loss that a rating trains.
    """
    users = () if num_users is None else (num_users,)

    def init(rng: jax.Array) -> dict:
        user, item = jax.random.split(rng)
        params = {
            "user": jax.random.uniform(user, (*users, dim), jnp.float32, -scale, scale),
            "item": jax.random.uniform(item, (num_items, dim), jnp.float32, -scale, scale),
        }
        if biases:
            params |= {
                "mean": jnp.zeros(()),
                "user_bias": jnp.zeros(users),
                "item_bias": jnp.zeros(num_items),
            }
        return params

    def found(params: dict, batch: Batch) -> jax.Array:
        """The prediction in units of the spread."""
        own = (lambda leaf: leaf) if num_users is None else (lambda leaf: leaf[batch["user"]])
        product = jnp.sum(params["item"][batch["item"]] * own(params["user"]), axis=-1)
        if not biases:
            return product
        return product + params["mean"] + own(params["user_bias"]) + params["item_bias"][batch["item"]]

    def squares(params: dict, batch: Batch) -> jax.Array:
        """What the pull is times: the squares of the user and of the item."""
        own = {name: params[name] for name in ("user", "user_bias") if name in params}
        rows = {name: params[name][batch["item"]] for name in ("item", "item_bias") if name in params}
        rows |= own if num_users is None else {name: leaf[batch["user"]] for name, leaf in own.items()}
        size = lambda name, leaf: jnp.square(leaf) if "bias" in name else jnp.sum(jnp.square(leaf), axis=-1)
        return sum((size(name, leaf) for name, leaf in rows.items()), jnp.zeros(()))

    error = lambda outputs, batch: squared_error(outputs, batch, target)
    short = lambda params, batch: found(params, batch) - (batch[target] - center) / spread
    pulled = lambda params, batch: pull * squares(params, batch) if pull else 0.0
    return Model(
        init,
        lambda params, batch, rng: center + spread * found(params, batch),
        lambda outputs, batch: error(outputs, batch) / spread**2,
        metrics={
            "rmse": Metric(error, math.sqrt),
            "accuracy": Metric(lambda o, b: jnp.abs(o - b[target]) <= 0.5, higher_is_better=True),
        },
        # the same loss in the learned units, in which ratings far from zero lose no precision
        train_loss=lambda params, batch, rng: jnp.square(short(params, batch)) + pulled(params, batch),
    )
