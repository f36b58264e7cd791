"""A softmax over more classes than a step should score (Federated Select, section 4.1.1).

A client's softmax is over the classes of its slice. Where that slice is large, a step may score a few of them
instead: the target, and some others drawn at random that stand for all others.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from partwise.types import UserError

NOTHING = -1e9  # the score or bias of a class that a client does not hold: padding of its slice


def sampled_softmax(
    hidden: jax.Array,
    out_table: jax.Array,
    out_bias: jax.Array,
    targets: jax.Array,
    num_sampled: int,
    rng: jax.Array,
) -> jax.Array:
    """Losses log Z - score of the target, Z estimated: [..., d], [n, d], [n], [...] -> [...]; 0 for target -1.

    For every target, `num_sampled` others are drawn uniformly and without replacement among the classes that
    are held (bias above `NOTHING` / 2), and

        Z = exp(score of the target) + (held - 1) / num_sampled * sum of exp(score) over the sampled,

    which is right in the mean (log Z is then a little too small in the mean; the more samples, the less). The
    factor is the usual correction of a score by the logarithm of how often its class is expected; the target
    is always there and needs none. With as many samples as there are others this is the softmax.

    One draw of num_sampled + 1 classes serves all targets: each leaves itself out or, if it is not among them, the
    last one, so what remains is as good as drawn for it alone.
    """
    if num_sampled < 1:
        raise UserError(f"a sampled softmax needs at least one sample, not {num_sampled}")
    held = out_bias > NOTHING / 2
    place = jnp.where(held, jax.random.uniform(rng, held.shape), -1.0)  # by row: padding changes no draw
    size = min(num_sampled + 1, len(out_bias))
    drawn = jax.lax.top_k(place, size)[1]
    num_drawn = jnp.minimum(held.sum(), size)
    number = jnp.arange(size)
    itself = (drawn == targets[..., None]) & (number < num_drawn)  # [..., size]
    out = itself | (~itself.any(axis=-1, keepdims=True) & (number == num_drawn - 1))
    factor = (held.sum() - 1) / jnp.maximum(num_drawn - 1, 1)
    others = hidden @ out_table[drawn].T + out_bias[drawn] + jnp.log(jnp.maximum(factor, 1.0))
    others = jnp.where(out | (number >= num_drawn), NOTHING, others)
    own = jnp.maximum(targets, 0)
    score = jnp.sum(hidden * out_table[own], axis=-1) + out_bias[own]
    losses = jnp.logaddexp(score, jax.nn.logsumexp(others, axis=-1)) - score
    return jnp.where(targets >= 0, losses, 0)
