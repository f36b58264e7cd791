"""A softmax over more classes than a step should score (Federated Select, section 4.1.1).

A client's softmax is over the classes of its slice. If the slice is large, a step may score only a few
classes: the target, and some randomly drawn classes that represent all others.
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
    """The losses log Z - score of the target, with an estimate of Z. Shapes: [..., d], [n, d], [n], [...] ->
    [...]. The loss is 0 for target -1.

    For every target, `num_sampled` other classes are drawn uniformly and without replacement from the classes
    that the client holds (bias above `NOTHING` / 2). Then

        Z = exp(score of the target) + (held - 1) / num_sampled * sum of exp(score) over the sampled.

    The mean of this estimate is right. (The mean of log Z is a little too small; the error is smaller with
    more samples.) The factor is the usual correction of a score by the logarithm of the expected count of its
    class. The target is always included and needs no correction. If all other classes are sampled, this is
    the softmax.

    One draw of num_sampled + 1 classes is used for all targets. Each target leaves out itself or, if it was
    not drawn, the last class. What remains is distributed as if it were drawn for this target alone.
    """
    if num_sampled < 1:
        raise UserError(f"a sampled softmax needs at least one sample, not {num_sampled}")
    held = out_bias > NOTHING / 2
    place = jnp.where(held, jax.random.uniform(rng, held.shape), -1.0)  # per row, so padding changes no draw
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
