"""The LSTM against a plain loop in numpy, and its gradient against automatic differentiation of the same loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise.model.lstm import init_lstm, lstm

TIMES, BATCH, SIZE, UNITS = 4, 3, 2, 5


@pytest.fixture(scope="module")
def case():
    params = init_lstm(jax.random.key(0), SIZE, UNITS)
    inputs = jax.random.normal(jax.random.key(1), (TIMES, BATCH, SIZE))
    real = np.array([[1, 0, 1], [1, 1, 0], [1, 0, 1], [1, 1, 0]], bool)
    return params, inputs, jnp.asarray(real)


def plain(params, inputs, real):
    """One example and one time after the other."""
    after = []
    for b in range(inputs.shape[1]):
        state = cell = jnp.zeros(UNITS)
        said = []
        for t in range(inputs.shape[0]):
            if real[t, b]:
                drive = inputs[t, b] @ params["input"] + state @ params["recurrent"] + params["bias"]
                i, f, o, g = jnp.split(drive, 4)
                cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
                state = jax.nn.sigmoid(o) * jnp.tanh(cell)
            said.append(state)
        after.append(jnp.stack(said))
    return jnp.stack(after, axis=1)


def test_states_are_those_of_a_plain_loop(case):
    params, inputs, real = case
    np.testing.assert_allclose(lstm(params, inputs, real), plain(*case), atol=1e-6)
    np.testing.assert_array_equal(params["bias"], np.repeat([0, 1, 0, 0], UNITS))


def test_gradients_are_those_of_automatic_differentiation(case):
    params, inputs, real = case
    weights = jax.random.normal(jax.random.key(2), (TIMES, BATCH, UNITS))
    gradient = lambda f: jax.grad(lambda p, x: jnp.sum(weights * f(p, x, real)), (0, 1))(params, inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient(lstm), gradient(plain))


def test_padding_may_lie_anywhere(case):
    params, inputs, _ = case
    behind = jnp.arange(TIMES)[:, None] < jnp.array([[2, 2, 2]])
    before = jnp.roll(behind, 2, axis=0)
    first = lstm(params, inputs, behind)[-1]
    np.testing.assert_allclose(first, lstm(params, jnp.roll(inputs, 2, axis=0), before)[-1], atol=1e-6)
    other = inputs.at[2:].set(9.0)
    np.testing.assert_array_equal(first, lstm(params, other, behind)[-1])
