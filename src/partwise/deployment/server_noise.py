"""The noise that a server adds to a sum that it has added up itself: plain, or of reports that were masked.

It is secret (`privacy.secret_noise`), and in every coordinate (`server.private_sum.noisy`). It is computed in 64
bits and added before anything is rounded, so that it covers all bits of a sum. Masked sums are words: they are read
as multiples of 2^-bits, and the sum with its noise is rounded to such a multiple again.

Correlated noise takes back some of the noise before, which must therefore be kept: in what the aggregator carries,
beside the parameters. So a version has one noise and one set of buffers, which are written and published together,
whoever closes its round and however often. Buffers are as secret as the noise: who has them can take it away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partwise.privacy.secret_noise import secret_normals
from partwise.server.private_sum import Door, noisy
from partwise.server.total import Carried, Total

AddNoise = Callable[[Total, Carried], tuple[Total, Carried]]


def own_noise(door: Door, bits: int | None = None) -> AddNoise:
    """What adds noise to a sum: to numbers, or to words with so many bits after the point."""
    read, write = (_number, _like) if bits is None else _words(bits)

    def add(total: Total, carried: Carried) -> tuple[Total, Carried]:
        if not door.noise:
            return total, carried
        plain = jax.tree_util.tree_map(read, total), jax.tree_util.tree_map(_number, carried)
        told, after = noisy(door, *plain, _secret)
        return (
            jax.tree_util.tree_map(write, told, total),
            jax.tree_util.tree_map(_like, after, carried),
        )

    return add


def _secret(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return secret_normals(int(np.prod(shape, dtype=int))).reshape(shape)


def _number(leaf: Any) -> np.ndarray:
    return np.asarray(leaf, np.float64)


def _like(value: Any, leaf: Any) -> jax.Array:
    return jnp.asarray(value, leaf.dtype)


def _words(bits: int) -> tuple[Callable[[Any], np.ndarray], Callable[[Any, Any], jax.Array]]:
    """How words are read as numbers, and numbers written as words, modulo 2^32."""
    scale = 2.0**bits
    read = lambda leaf: np.asarray(leaf).view(np.int32) / scale
    write = lambda value, leaf: jnp.asarray(np.rint(value * scale).astype(np.int64).astype(np.uint32))
    return read, write
