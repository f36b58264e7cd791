"""Convolutions of 5 x 5 and pooling of 2 x 2 as products and sums, which are fast in a compiled loop.

XLA's own convolution is ten times slower in a compiled loop on CPU. A convolution is a matrix product of patches.
On CPU this product takes most of a step, so there it has fewer factors, as in Lavin and Gray (2016): 2 x 2 outputs
of a channel come from 6 x 6 inputs with 36 products, not 100. Its rounding errors are 2 to 5 times those of the
product of patches (root mean squares of values and gradients, one random layer of 32 to 64 channels).
"""

from __future__ import annotations

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np

SIZE = 5  # of a kernel
BLOCK = 2  # outputs along an edge, and pixels of a pool
TILE = BLOCK + SIZE - 1
# Where polynomials are evaluated, besides infinity: the most precise of eight sets that were tried on one layer.
POINTS = (0, 2 / 3, -2 / 3, 3 / 2, -3 / 2)
MANY_CHANNELS = 8


def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """[B, H, W, C] and [5, 5, C, F] -> [B, H, W, F], with zeros beyond the edge ("same" padding)."""
    even = not any(edge % BLOCK for edge in x.shape[1:3])
    tiles = even and x.shape[-1] >= MANY_CHANNELS and jax.default_backend() == "cpu"
    return convolve_tiles(x, kernel) if tiles else convolve_patches(x, kernel)


def convolve_patches(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`convolve` as one product."""
    filters = kernel.shape[-1]
    return _product(_patches(x), kernel.reshape(-1, filters)).reshape(*x.shape[:-1], filters)


def _patches(x: jax.Array) -> jax.Array:
    """[B, H, W, C] -> [B * H * W, 5 * 5 * C]: for every pixel those around it."""
    (height, width, channels), padded = x.shape[1:], _with_edge(x)
    if channels < MANY_CHANNELS and jax.default_backend() == "cpu":
        # A few numbers at a time are slow to put side by side.
        parts = [padded[:, i : i + height, j : j + width] for i in range(SIZE) for j in range(SIZE)]
        stacked = jnp.stack(parts).reshape(SIZE**2, -1, channels)
        return stacked.swapaxes(0, 1).reshape(-1, SIZE**2 * channels)
    # Along one axis and then along the other: a GPU is slow to choose among 25 arrays.
    beside = jnp.concatenate([padded[:, :, j : j + width] for j in range(SIZE)], axis=-1)
    beside = jax.lax.optimization_barrier(beside)
    rows = [beside[:, i : i + height] for i in range(SIZE)]
    return jnp.concatenate(rows, axis=-1).reshape(-1, SIZE**2 * channels)


@jax.custom_vjp
def _product(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """`rows @ columns`. JAX's own gradient transposes the gradient of the result, this one the rows, which stacked
    patches are already."""
    return rows @ columns


_product.defvjp(
    lambda rows, columns: (_product(rows, columns), (rows, columns)),
    lambda kept, gradient: (gradient @ kept[1].T, kept[0].T @ gradient),
)


def _with_edge(x: jax.Array) -> jax.Array:
    edge = SIZE // 2
    return jnp.pad(x, [(0, 0), (edge, edge), (edge, edge), (0, 0)])


def convolve_tiles(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`convolve` of images with even edges, tile by tile: a product of polynomials from their values at a few
    points. All three changes of basis are products too."""
    batch, height, width, channels = x.shape
    inputs, kernels, outputs = map(jnp.asarray, _bases())
    shape = (batch, height // BLOCK, width // BLOCK)
    at_points = (inputs @ _tiles(x).reshape(TILE**2, -1)).reshape(TILE**2, -1, channels)
    kernel_at_points = (kernels @ kernel.reshape(SIZE**2, -1)).reshape(TILE**2, channels, -1)
    products = jnp.einsum("prc,pcf->prf", at_points, kernel_at_points)
    blocks = (outputs @ products.reshape(TILE**2, -1)).reshape(BLOCK, BLOCK, *shape, -1)
    return blocks.transpose(2, 3, 0, 4, 1, 5).reshape(batch, height, width, -1)


def _tiles(x: jax.Array) -> jax.Array:
    """[B, H, W, C] -> [6 * 6, B, H / 2, W / 2, C]: the inputs of every 2 x 2 outputs."""
    padded = _with_edge(x)
    batch, height, width, channels = padded.shape
    halves = padded.reshape(batch, height // BLOCK, BLOCK, width // BLOCK, BLOCK, channels)
    rows, columns = x.shape[1] // BLOCK, x.shape[2] // BLOCK
    part = lambda i, j: halves[:, i // 2 : i // 2 + rows, i % 2, j // 2 : j // 2 + columns, j % 2]
    return jnp.stack([part(i, j) for i in range(TILE) for j in range(TILE)])


def _bases() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The matrices of F(2 x 2, 5 x 5): B^T of inputs, G of kernels and A^T of outputs, each for both axes."""
    others = [[b for b in POINTS if b != a] for a in POINTS]
    inputs = np.zeros((TILE, TILE))
    for row, roots in zip(inputs, [*others, POINTS], strict=True):
        row[: len(roots) + 1] = np.poly(roots)[::-1]
    scale = [np.prod([a - b for b in rest]) for a, rest in zip(POINTS, others, strict=True)]
    powers = np.vander([*POINTS, 0], SIZE, increasing=True)
    kernels, outputs = powers / np.array([[*scale, 1]]).T, powers[:, :BLOCK].T.copy()
    kernels[-1], outputs[:, -1] = np.eye(SIZE)[-1], np.eye(BLOCK)[-1]
    return tuple(np.kron(each, each).astype(np.float32) for each in (inputs, kernels, outputs))  # pyright: ignore


@jax.custom_vjp
def pool(x: jax.Array) -> jax.Array:
    """The largest value of every 2 x 2 block, [B, H, W, C] -> [B, H / 2, W / 2, C]. Equal ones share a gradient."""
    return reduce(jnp.maximum, _corners(x))


def _corners(x: jax.Array) -> list[jax.Array]:
    """The four pixels of all 2 x 2 blocks."""
    blocks = _blocks(x)
    return [blocks[:, :, i, :, j] for i in range(BLOCK) for j in range(BLOCK)]


def _blocks(x: jax.Array) -> jax.Array:
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // BLOCK, BLOCK, width // BLOCK, BLOCK, channels)


def _pool_forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    largest = pool(x)
    return largest, (x, largest)


def _pool_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array]:
    x, largest = kept
    share = gradient / sum((corner == largest).astype(gradient.dtype) for corner in _corners(x))
    spread = lambda pooled: pooled[:, :, None, :, None]
    shared = jnp.where(_blocks(x) == spread(largest), spread(share), 0).reshape(x.shape)
    return (
        jax.lax.optimization_barrier(shared),
    )  # XLA would compute it with its use, in an order that is slow


pool.defvjp(_pool_forward, _pool_backward)
