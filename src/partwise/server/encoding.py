"""What an aggregator may do to a client's numbers before they leave the client: clip them, and turn them into
integers.

Each function takes an aggregator and returns an aggregator, so they can be combined: clip, then weigh, then
round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from partwise.server.total import Aggregator, Contribution, Report, Total
from partwise.types import UserError

LARGEST = 2.0**31 - 128  # the largest float32 that fits into an int32


def clipped(aggregator: Aggregator, norm: float) -> Aggregator:
    """Return the aggregator with updates scaled down to an L2 norm of at most `norm`.

    The norm is taken over all leaves together. Updates are clipped before they are weighted.
    """
    if not norm > 0:
        raise UserError(f"updates are clipped to a norm above 0, not {norm}")

    def encode(report: Report, rng: jax.Array) -> Contribution:
        return aggregator.encode(report._replace(update=cut_to(report.update, norm)[0]), rng)

    return aggregator._replace(encode=encode)


def cut_to(update: Mapping[str, jax.Array], norm: Any) -> tuple[dict[str, jax.Array], jax.Array]:
    """The update scaled down to an L2 norm of at most `norm`, and the norm that it had."""
    before = optax.tree.norm(update)
    factor = norm / jnp.maximum(before, norm)
    return {path: change * factor for path, change in update.items()}, before


def fixed_point(aggregator: Aggregator, bits: int) -> Aggregator:
    """Return the aggregator with contributions as multiples of 2^-bits in 32-bit integers.

    Sums of such integers are exact modulo 2^32, in any order. A number is rounded up or down at random, so
    that it is right on average. A sum is right if it lies within +-2^(31 - bits). A single number outside
    this range is cut to it.
    """
    if not 0 <= bits <= 30:
        raise UserError(f"a fixed point has 0 to 30 bits after it, not {bits}")
    scale = 2.0**bits

    def rounded(value: jax.Array, rng: jax.Array, valid: jax.Array) -> jax.Array:
        exact = jnp.where(valid, jnp.asarray(value, jnp.float32) * scale, 0)
        below = jnp.floor(exact)
        # Not floor(exact + uniform): that sum is rounded itself, and moves numbers that are whole already.
        whole = below + (jax.random.uniform(rng, exact.shape) < exact - below)
        whole = jnp.clip(whole, -LARGEST, LARGEST).astype(jnp.int32)
        return jax.lax.bitcast_convert_type(whole, jnp.uint32)

    def encode(report: Report, rng: jax.Array) -> Contribution:
        first, second = jax.random.split(rng)
        sent = aggregator.encode(report, first)
        leaves, structure = jax.tree_util.tree_flatten(sent._replace(valid=None))  # pyright: ignore[reportArgumentType]
        keys = jax.random.split(second, len(leaves))
        words = [rounded(leaf, key, sent.valid) for leaf, key in zip(leaves, keys, strict=True)]
        return jax.tree_util.tree_unflatten(structure, words)._replace(valid=sent.valid)

    def read(words: Any) -> jax.Array:
        return jax.lax.bitcast_convert_type(words, jnp.int32).astype(jnp.float32) / scale

    return aggregator._replace(
        encode=encode,
        zero=lambda leaf: jnp.zeros(leaf.shape, jnp.uint32),
        reveal=lambda total, carried, rng: aggregator.reveal(
            Total(*jax.tree_util.tree_map(read, total)), carried, rng
        ),
    )
