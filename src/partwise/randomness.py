"""Every random stream has a name: of a seed, of a round, of a client in that round, and there one for each
use.

A client's stream depends on its id, never on its place in a cohort. No two uses share a stream. In JAX's
threefry, `split(key)[i]` is `fold_in(key, i)`. So a key that is both split and folded would give the same
numbers twice.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

INIT_ROUND = 0xFFFFFFFE  # the "round" whose randomness draws the initial parameters
EVALUATION_ROUND = 0xFFFFFFFF  # the "round" whose randomness evaluation uses
AXIS = "clients"  # the axis of devices that share a cohort
BLOCK = 4096  # normal numbers that are drawn together


class Words(NamedTuple):
    """64-bit numbers as two 32-bit words, because devices compute with 32 bits."""

    high: Any
    low: Any


def round_rng(seed: int, round_number: int) -> jax.Array:
    """The randomness of a round; a client folds its own number into it."""
    return jax.random.fold_in(jax.random.key(seed), round_number)


def client_rng(rng: jax.Array, number: Words) -> jax.Array:
    """A client's randomness in a round."""
    return jax.random.fold_in(jax.random.fold_in(rng, number.high), number.low)


def child(rng: jax.Array, use: str) -> jax.Array:
    """The randomness of one use. Each name has its own."""
    return jax.random.fold_in(rng, zlib.crc32(use.encode()))


def normals(rng: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Standard normal numbers, drawn in blocks that have randomness of their own. Where devices run the same
    program side by side, each draws some of the blocks, and all get all of them: the numbers are the same for any
    number of devices."""
    size = math.prod(shape)
    if size <= BLOCK:
        return jax.random.normal(rng, shape)
    devices, here = _devices()
    each = -(-size // (BLOCK * devices))
    blocks = here * each + jnp.arange(each)
    drawn = jax.vmap(lambda block: jax.random.normal(jax.random.fold_in(rng, block), (BLOCK,)))(blocks)
    if devices > 1:
        drawn = jax.lax.all_gather(drawn, AXIS)
    return drawn.reshape(-1)[:size].reshape(shape)


def _devices() -> tuple[int, Any]:
    """How many devices run this program side by side, and which of them this is."""
    try:
        return jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
    except NameError:  # no such axis: one device
        return 1, 0


def hash64(text: str) -> int:
    """64 bits of BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def client_numbers(client_ids: np.ndarray) -> np.ndarray:
    """A number for every client id, uint64. It is the same wherever the client runs, because its randomness
    depends on it.

    It is a hash of the id as text. So it does not matter whether an id was read as a number or as text.
    """
    return np.array([hash64(str(name)) for name in np.asarray(client_ids).tolist()], np.uint64)


def words(numbers: np.ndarray) -> Words:
    """uint64 numbers as pairs of words."""
    return Words((numbers >> np.uint64(32)).astype(np.uint32), numbers.astype(np.uint32))
