"""What tasks of next-word prediction share: a loss with a gradient of its own, and accuracies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from partwise.tasks.language import accuracy, cross_entropy

TARGETS = jnp.array([[0, 3, -1, -1], [4, -1, 2, 2], [-1, -1, -1, -1]])


def by_optax(scores, targets):
    each = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.maximum(targets, 0))
    return jnp.where(targets >= 0, each, 0).sum(axis=-1)


@pytest.fixture(scope="module")
def scores():
    return 3 * jax.random.normal(jax.random.key(0), (*TARGETS.shape, 5))


def test_cross_entropy_is_optaxs_where_there_is_a_target(scores):
    np.testing.assert_allclose(cross_entropy(scores, TARGETS), by_optax(scores, TARGETS), rtol=1e-6)
    assert cross_entropy(scores, TARGETS)[2] == 0


def test_so_is_its_gradient_alone_and_side_by_side(scores):
    weights = jnp.array([1.0, -2.0, 3.0])
    gradient = lambda f, s, t: jax.jit(jax.grad(lambda s: jnp.sum(weights * f(s, t))))(s)
    np.testing.assert_allclose(
        gradient(cross_entropy, scores, TARGETS), gradient(by_optax, scores, TARGETS), atol=1e-6
    )
    assert not np.any(gradient(cross_entropy, scores, TARGETS)[2])
    both = jnp.stack([scores, -scores]), jnp.stack([TARGETS, TARGETS[::-1]])
    found, expected = (
        jax.vmap(lambda s, t, f=f: gradient(f, s, t))(*both) for f in (cross_entropy, by_optax)
    )
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_large_scores_and_classes_that_are_not_there():
    """Finite, and exactly nothing for a class of no probability."""
    scores = jnp.array([[[500.0, 0.0, -1e9]]])
    for target, expected in ((0, 0.0), (1, 500.0)):
        assert cross_entropy(scores, jnp.array([[target]]))[0] == expected
        gradient = jax.grad(lambda s, t=target: cross_entropy(s, jnp.array([[t]]))[0])(scores)
        assert np.isfinite(gradient).all()
        assert gradient[0, 0, 2] == 0


def test_accuracy_counts_what_is_counted_among_what_is_allowed():
    scores = jnp.array([[[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]])
    batch = {"next": jnp.array([[1, 0]])}
    counted = lambda batch: batch["next"] >= 0
    plain = accuracy(lambda batch: batch["next"], counted)
    assert (plain.values(scores, batch).tolist(), plain.weight(batch).tolist()) == ([1], [2])
    among = accuracy(lambda batch: batch["next"], counted, lambda scores: scores[..., :2])
    assert among.values(scores, batch).tolist() == [2]
    ones = accuracy(lambda batch: batch["next"], lambda batch: batch["next"] > 0)
    assert (ones.values(scores, batch).tolist(), ones.weight(batch).tolist()) == ([0], [1])
