"""Convolutions and pooling: equal to XLA's own, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise.model.convolution import convolve, convolve_patches, convolve_tiles, pool


def plain_convolve(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def plain_pool(x):
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def relative(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


def gradients(function, *given):
    weights = drawn(*jax.eval_shape(function, *given).shape, seed=9)
    return jax.grad(lambda given: jnp.sum(function(*given) * weights))(given)


@pytest.mark.parametrize("way", [convolve, convolve_patches, convolve_tiles])
@pytest.mark.parametrize("shape", [(3, 14, 14, 32), (2, 4, 6, 8), (2, 28, 28, 1)])
def test_a_convolution_equals_that_of_xla(way, shape):
    given = drawn(*shape), drawn(5, 5, shape[-1], 6, seed=1) / 5
    assert relative(way(*given), plain_convolve(*given)) < 5e-6
    for found, expected in zip(gradients(way, *given), gradients(plain_convolve, *given), strict=True):
        assert relative(found, expected) < 5e-6


def test_images_with_an_odd_edge_are_convolved():
    given = drawn(2, 7, 9, 8), drawn(5, 5, 8, 3, seed=1)
    assert relative(convolve(*given), plain_convolve(*given)) < 5e-6


@pytest.mark.parametrize("channels", [1, 8])
def test_convolutions_of_several_clients_are_those_of_each(channels):
    given = drawn(3, 2, 8, 8, channels), drawn(3, 5, 5, channels, 4, seed=1)
    for found, expected in zip(jax.vmap(convolve)(*given), map(convolve, *given), strict=True):
        assert relative(found, expected) < 5e-6


def test_a_pool_has_the_largest_value_and_equal_ones_share_its_gradient():
    x = np.round(drawn(4, 6, 8, 3))  # many are equal
    assert np.array_equal(pool(x), plain_pool(x))
    (found,), (expected,) = gradients(pool, x), gradients(plain_pool, x)
    assert np.allclose(found, expected, rtol=1e-6)


def test_pools_of_several_clients_have_the_gradients_of_each():
    x = drawn(3, 2, 4, 4, 2)
    summed = jax.grad(lambda x: jnp.sum(pool(x) ** 2))
    assert np.array_equal(jax.vmap(summed)(x), np.stack([summed(each) for each in x]))


@pytest.mark.parametrize("channels", [1, 3, 8])
def test_patches_of_an_accelerator_are_those_of_a_cpu(monkeypatch, channels):
    given = drawn(2, 6, 8, channels), drawn(5, 5, channels, 4, seed=1)
    here = convolve_patches(*given), *gradients(convolve_patches, *given)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    there = convolve_patches(*given), *gradients(convolve_patches, *given)
    for found, expected in zip(there, here, strict=True):
        assert relative(found, expected) < 5e-6
