"""The sampled softmax: right in the mean, exact with all samples, blind to padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from partwise.model.softmax import NOTHING, sampled_softmax
from partwise.types import UserError

CLASSES, DIM = 9, 4


@pytest.fixture(scope="module")
def layer():
    """Hidden states [2, 3, d], a table, a bias, and targets of which one is nothing."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape) for shape in ((2, 3, DIM), (CLASSES, DIM), (CLASSES,))]
    return *(jnp.asarray(a, jnp.float32) for a in arrays), jnp.array([[0, 8, 3], [-1, 3, 5]])


def softmax_losses(hidden, table, bias, targets):
    each = optax.softmax_cross_entropy_with_integer_labels(hidden @ table.T + bias, jnp.maximum(targets, 0))
    return jnp.where(targets >= 0, each, 0)


def padded(hidden, table, bias, targets, rows=7):
    """A slice with room for more classes; what stands there must not matter."""
    table = jnp.pad(table, ((0, rows), (0, 0)), constant_values=50.0)
    return hidden, table, jnp.pad(bias, (0, rows), constant_values=NOTHING), targets


@pytest.mark.parametrize("num_sampled", [CLASSES - 1, CLASSES, 100])
@pytest.mark.parametrize("change", [lambda *given: given, padded], ids=["all held", "padded"])
def test_all_samples_are_the_softmax(layer, num_sampled, change):
    """Values and gradients."""
    given, rng = change(*layer), jax.random.key(1)
    found = jax.value_and_grad(lambda *a: sampled_softmax(*a, given[3], num_sampled, rng).sum(), (0, 1, 2))
    expected = jax.value_and_grad(lambda *a: softmax_losses(*a, given[3]).sum(), (0, 1, 2))
    pairs = zip(*map(jax.tree_util.tree_leaves, (found(*given[:3]), expected(*given[:3]))), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        sampled_softmax(*given, num_sampled, rng), softmax_losses(*given), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("num_sampled", [1, 3, 7])
@pytest.mark.parametrize("change", [lambda *given: given, padded], ids=["all held", "padded"])
def test_the_partition_function_is_right_in_the_mean(layer, num_sampled, change):
    """exp(loss) is Z over what the target has of it, so its mean is that of the softmax; the mean loss is less."""
    given = change(*layer)
    draws = jax.jit(jax.vmap(lambda rng: sampled_softmax(*given, num_sampled, rng)))
    losses = np.asarray(draws(jax.random.split(jax.random.key(2), 20_000)), float)
    real, expected = np.asarray(given[3]) >= 0, np.asarray(softmax_losses(*given), float)
    ratios = np.exp(losses)[:, real]
    error = ratios.std(axis=0) / np.sqrt(len(ratios))
    assert np.all(np.abs(ratios.mean(axis=0) - np.exp(expected[real])) < 4 * error + 1e-4)
    assert np.all(losses.mean(axis=0)[real] < expected[real])
    assert np.all(losses[:, ~real] == 0)


def test_padding_changes_nothing(layer):
    """Not even the draw: lanes and the plain loop pad differently."""
    rng = jax.random.key(3)
    expected = sampled_softmax(*layer, 3, rng)
    for rows in (1, 20):
        np.testing.assert_allclose(sampled_softmax(*padded(*layer, rows), 3, rng), expected, rtol=1e-6)


def test_rows_that_were_not_drawn_have_no_gradient(layer):
    hidden, table, bias, targets = layer
    loss = lambda table: sampled_softmax(
        hidden[:1, :1], table, bias, targets[:1, :1], 2, jax.random.key(4)
    ).sum()
    moved = np.abs(jax.grad(loss)(table)).max(axis=1) > 0
    assert moved.sum() == 3  # the target, and two samples
    assert moved[0]


def test_a_single_class_and_no_samples(layer):
    hidden, table, bias, _ = layer
    alone = sampled_softmax(hidden, table[:1], bias[:1], jnp.zeros((2, 3), int), 4, jax.random.key(0))
    np.testing.assert_allclose(alone, 0, atol=1e-6)
    with pytest.raises(UserError, match="at least one sample, not 0"):
        sampled_softmax(*layer, 0, jax.random.key(0))
