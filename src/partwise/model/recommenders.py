"""Recommenders of the next item: a vector of what the client did last, and the scores of items against it.

    score of item j = (encoding of the history + the client's own vector) . v_j + b_j

The item vectors v and biases b are keyed by item. The client's own vector is local, or a row of a table keyed by
user. Two encodings of the history are here:

* `two_tower`: the mean of the item vectors of the history, through a dense layer (a tower for the client, a table
  for the items);
* `sequence_transformer`: self-attention over the history, as in SASRec (Kang and McAuley, 2018). An example is one
  history with its next item, so nothing of the future is there and no causal mask is needed; only the last place is
  computed in the last block.

Both are plain functions over dictionaries of arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partwise.model.ranking import (
    Loss,
    bpr_losses,
    draw,
    full_losses,
    ranking_metrics,
    sampled_losses,
)
from partwise.model.softmax import NOTHING
from partwise.model.spec import Batch, Model, lookup
from partwise.randomness import child

Encode = Callable[
    [Any, jax.Array, Batch, jax.Array | None], jax.Array
]  # (params, item rows, batch, rng) -> [B, d]


class Shape(NamedTuple):
    """What all recommenders of the next item have in common.

    num_items: K
    dim:       d, the size of vectors
    length:    L, items of a history at most
    num_users: None: the client has one vector, its own (local). Otherwise a table, indexed by the column `user`
    loss:      how it is trained
    popular:   whether negatives are drawn by popularity, not uniformly
    again:     whether an item of the history may be recommended again
    dropout:   share of the inputs of layers that a training step leaves out
    sampled:   with how many negatives sampled metrics are told too; 0: not at all
    """

    num_items: int
    dim: int = 64
    length: int = 50
    num_users: int | None = None
    loss: Loss = Loss("softmax")
    popular: bool = False
    again: bool = False
    dropout: float = 0.2
    sampled: int = 0


def two_tower(shape: Shape) -> Model:
    """The mean of the history's item vectors through a dense layer, and the client's own vector."""

    def init(rng: jax.Array) -> dict[str, Any]:
        return {"history": {"kernel": jnp.eye(shape.dim), "bias": jnp.zeros(shape.dim)}}

    def encode(params: Any, rows: jax.Array, batch: Batch, rng: jax.Array | None) -> jax.Array:
        there = (batch["history"] >= 0)[..., None]
        mean = jnp.sum(rows, axis=1) / jnp.maximum(there.sum(axis=1), 1)
        mean = _dropped(mean, shape.dropout, rng)
        return mean @ params["history"]["kernel"] + params["history"]["bias"]

    return _recommender(shape, init, encode)


def sequence_transformer(shape: Shape, blocks: int = 2, heads: int = 2) -> Model:
    """Self-attention over the history, and the client's own vector. Places are counted from the last item back."""
    d = shape.dim
    names = [str(i) for i in range(blocks)]

    def init(rng: jax.Array) -> dict[str, Any]:
        start, place, *each = jax.random.split(rng, 2 + blocks)
        small = jax.nn.initializers.normal(0.02)
        return {
            "start": small(start, (d,)),
            "place": small(place, (shape.length + 1, d)),
            "blocks": {name: _block(own, d) for name, own in zip(names, each, strict=True)},
            "norm": _norm_init(d),
        }

    def encode(params: Any, rows: jax.Array, batch: Batch, rng: jax.Array | None) -> jax.Array:
        size = rows.shape[0]
        count = jnp.sum(batch["history"] >= 0, axis=1)  # the history is at the front, padding behind it
        first = jnp.broadcast_to(params["start"], (size, 1, d))
        x = jnp.concatenate([first, rows * d**0.5], axis=1)  # [B, 1 + L, d]
        back = count[:, None] - jnp.arange(shape.length + 1)  # how many items come after this place
        x = _dropped(x + params["place"][jnp.clip(back, 0, shape.length)], shape.dropout, rng, "input")
        there = back >= 0  # the start is always there
        last = count[:, None]
        for number, name in enumerate(names):
            only = last if number == blocks - 1 else None
            x = _attend(params["blocks"][name], x, there, only, heads, shape.dropout, rng, name)
        return _norm(params["norm"], x[:, 0])

    return _recommender(shape, init, encode)


def _recommender(shape: Shape, init_encoder: Callable[[jax.Array], Any], encode: Encode) -> Model:
    """A model from the encoding of a history."""
    users = () if shape.num_users is None else (shape.num_users,)

    def init(rng: jax.Array) -> dict[str, Any]:
        item, rest = jax.random.split(rng)
        return {
            "item": jax.random.normal(item, (shape.num_items, shape.dim)) * shape.dim**-0.5 * 0.1,
            "item_bias": jnp.zeros(shape.num_items),
            "user": jnp.zeros((*users, shape.dim)),
            **init_encoder(rest),
        }

    def vector(params: Any, batch: Batch, rng: jax.Array | None) -> jax.Array:
        rows = lookup(params["item"], batch["history"])
        own = params["user"] if shape.num_users is None else params["user"][batch["user"]]
        return encode(params, rows, batch, rng) + own

    def predict(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        return _masked(shape, _scores(params, vector(params, batch, None)), batch)

    def train_loss(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        dropping, drawing = jax.random.split(rng)
        hidden, target = vector(params, batch, dropping), batch["item"]
        if shape.loss.name == "softmax":
            return full_losses(_masked(shape, _scores(params, hidden), batch), target)
        return _with_negatives(shape, params, hidden, target, drawing)

    return Model(
        init,
        predict,
        lambda scores, batch: full_losses(scores, batch["item"]),
        ranking_metrics(
            lambda batch: batch["item"], shape.num_items, shape.sampled, None if shape.again else _in_history
        ),
        train_loss=train_loss,
    )


def _in_history(batch: Batch) -> jax.Array:
    """[B]: whether the right item is one of the history."""
    return jnp.any(batch["history"] == batch["item"][:, None], axis=1)


def _scores(params: Any, hidden: jax.Array) -> jax.Array:
    """The scores [B, n] of all rows. There is no transpose of the table, which XLA would copy for one example."""
    return jnp.einsum("bd,nd->bn", hidden, params["item"]) + params["item_bias"]


def _with_negatives(
    shape: Shape, params: Any, hidden: jax.Array, target: jax.Array, rng: jax.Array
) -> jax.Array:
    """The loss against items that are drawn for this step."""
    drawn = draw(
        rng, jax.lax.stop_gradient(params["item_bias"]), (len(target), shape.loss.negatives), shape.popular
    )
    own = jnp.maximum(target, 0)
    score = jnp.sum(hidden * params["item"][own], axis=-1) + params["item_bias"][own]
    rows, biases = params["item"][drawn.positions], params["item_bias"][drawn.positions]
    others = jnp.einsum("bd,bnd->bn", hidden, rows) + biases
    losses = sampled_losses if shape.loss.name == "sampled" else bpr_losses
    return losses(score, others, drawn, target)


def _masked(shape: Shape, scores: jax.Array, batch: Batch) -> jax.Array:
    """Scores in which items of the history have none, unless they may come again. The right item always has one."""
    if shape.again:
        return scores
    rows = jnp.arange(scores.shape[0])[:, None]
    history = jnp.where(batch["history"] >= 0, batch["history"], scores.shape[1])
    hidden = scores.at[rows, history].set(NOTHING, mode="drop")
    if "item" not in batch:  # nothing is held out: the next item is asked for
        return hidden
    own = jnp.maximum(batch["item"], 0)
    return hidden.at[jnp.arange(len(own)), own].set(jnp.take_along_axis(scores, own[:, None], 1)[:, 0])


# The transformer's parts


def _block(rng: jax.Array, d: int) -> dict[str, Any]:
    glorot = jax.nn.initializers.glorot_uniform()
    names = ("query", "key", "value", "out", "wide", "back")
    kernels = {name: glorot(own, (d, d)) for name, own in zip(names, jax.random.split(rng, 6), strict=True)}
    biases = {f"{name}_bias": jnp.zeros(d) for name in names}
    return {**kernels, **biases, "norm": _norm_init(d), "wide_norm": _norm_init(d)}


def _attend(
    params: Any,
    x: jax.Array,
    there: jax.Array,
    only: jax.Array | None,
    heads: int,
    dropout: float,
    rng: jax.Array | None,
    name: str,
) -> jax.Array:
    """A block of attention and a dense layer: [B, T, d] -> [B, T, d], or [B, 1, d] for `only` one place."""
    dense = lambda name, x: x @ params[name] + params[f"{name}_bias"]
    split = lambda x: x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)
    normal = _norm(params["norm"], x)
    at = lambda x: x if only is None else jnp.take_along_axis(x, only[..., None], axis=1)
    mixed = jax.nn.dot_product_attention(
        split(dense("query", at(normal))),
        split(dense("key", normal)),
        split(dense("value", normal)),
        mask=there[:, None, None, :],
    )
    mixed = dense("out", mixed.reshape(*mixed.shape[:2], -1))
    x = at(x) + _dropped(mixed, dropout, rng, f"attention {name}")
    wide = jax.nn.relu(dense("wide", _norm(params["wide_norm"], x)))
    return x + _dropped(dense("back", wide), dropout, rng, f"dense {name}")


def _norm_init(d: int) -> dict[str, jax.Array]:
    return {"scale": jnp.ones(d), "bias": jnp.zeros(d)}


def _norm(params: Any, x: jax.Array) -> jax.Array:
    """Layer normalisation."""
    centred = x - x.mean(axis=-1, keepdims=True)
    spread = jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-6)
    return centred / spread * params["scale"] + params["bias"]


def _dropped(x: jax.Array, share: float, rng: jax.Array | None, use: str = "dropout") -> jax.Array:
    """Dropout; nothing is dropped without randomness."""
    if rng is None or share == 0:
        return x
    kept = jax.random.bernoulli(child(rng, use), 1 - share, x.shape)
    return jnp.where(kept, x / (1 - share), 0)
