"""Sums with the noise of all their clients and of the server, as simulations have it: one Skellam number a word.

Over a network every client adds its share of the noise before its words are masked, and the server the shares of
those who did not come (`server.masked_form`). Skellam numbers add up to Skellam numbers, so a simulation draws the
noise of the sum at once.

The noise here is JAX's, in 32 bits, and can be computed anew from the seed. jax.random.poisson loses its chances in
the rounding of float32 if rates are large. From a variance of 1,000 on, noise is a normal number with the fourth
moment of a Skellam one (Cornish and Fisher 1938), rounded. What is left of the difference is of the order of the
variance to the power of -2, less than float32 can show.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from partwise.privacy.skellam import NoiseShare
from partwise.randomness import child, normals
from partwise.server.total import Aggregator, Carried, Total

LARGE = 1000.0  # variance


def skellam_sum(aggregator: Aggregator, share: NoiseShare) -> Aggregator:
    """The aggregator of whole numbers (`server.encoding.fixed_point`), with all shares of the noise in its sums."""

    def noisy(words: jax.Array, variance: float, rng: jax.Array) -> jax.Array:
        noise = skellam(rng, words.shape, share.most * variance)
        return words + jax.lax.bitcast_convert_type(noise, jnp.uint32)

    def reveal(total: Total, carried: Carried, rng: jax.Array | None) -> tuple[Total, Carried]:
        if rng is not None:
            update = {
                path: noisy(leaf, share.update, child(rng, path)) for path, leaf in total.update.items()
            }
            clients = noisy(total.clients, share.numbers, child(rng, "#clients"))
            loss = noisy(total.loss.value, share.numbers, child(rng, "#loss"))
            total = total._replace(update=update, clients=clients, loss=total.loss._replace(value=loss))
        return aggregator.reveal(total, carried, None)

    return aggregator._replace(reveal=reveal)


def skellam(rng: jax.Array, shape: tuple[int, ...], variance: float) -> jax.Array:
    """Whole numbers (int32) of this variance around zero."""
    if variance < LARGE:
        first, second = (jax.random.poisson(child(rng, name), variance / 2, shape) for name in ("+", "-"))
        return (first - second).astype(jnp.int32)
    normal = normals(rng, shape)
    bent = normal + (normal**3 - 3 * normal) / (24 * variance)
    return jnp.rint(math.sqrt(variance - 1 / 12) * bent).astype(jnp.int32)  # rounding adds 1 / 12
