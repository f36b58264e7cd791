"""The LSTM against a plain loop in numpy, and its gradient against automatic differentiation of the same loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise.model.lstm import dense, init_lstm, lstm

TIMES, BATCH, SIZE, UNITS = 4, 3, 2, 5


@pytest.fixture(params=["cpu", "gpu"], autouse=True)
def backend(request, monkeypatch):
    """Weights that are not trained have another form on a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: request.param)


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


@pytest.mark.parametrize("units", [1, 7, 8, 9])
def test_units_that_are_padding_change_nothing(units):
    """A product is padded to whole rows of memory. All units are there, and each gets its gradient."""
    params = init_lstm(jax.random.key(0), SIZE, units)
    inputs = jax.random.normal(jax.random.key(1), (TIMES, BATCH, SIZE))
    real = jnp.ones((TIMES, BATCH), bool)

    def simple(params, inputs):
        def step(carry, x):
            drive = x @ params["input"] + carry[0] @ params["recurrent"] + params["bias"]
            i, f, o, g = jnp.split(drive, 4, axis=-1)
            cell = jax.nn.sigmoid(f) * carry[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
            state = jax.nn.sigmoid(o) * jnp.tanh(cell)
            return (state, cell), state

        return jax.lax.scan(step, (jnp.zeros((BATCH, units)),) * 2, inputs)[1]

    along = jax.random.normal(jax.random.key(2), (TIMES, BATCH, units))
    assert_same(lambda params, inputs: lstm(params, inputs, real), simple, (params, inputs), along)


def test_states_are_those_of_a_plain_loop(case):
    params, inputs, real = case
    np.testing.assert_allclose(lstm(params, inputs, real), plain(*case), atol=1e-6)
    np.testing.assert_array_equal(params["bias"], np.repeat([0, 1, 0, 0], UNITS))


def test_gradients_are_those_of_automatic_differentiation(case):
    params, inputs, real = case
    weights = jax.random.normal(jax.random.key(2), (TIMES, BATCH, UNITS))
    gradient = lambda f: jax.grad(lambda p, x: jnp.sum(weights * f(p, x, real)), (0, 1))(params, inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient(lstm), gradient(plain))


@pytest.mark.parametrize("trained", [(), ("bias",), ("input", "recurrent")])
def test_weights_may_be_frozen_and_inputs_trained(case, trained):
    """As while clients rebuild embeddings: alone, and side by side with one set of weights for all."""
    params, inputs, real = case
    along = jax.random.normal(jax.random.key(2), (TIMES, BATCH, UNITS))

    def gradient(f):
        total = lambda some, x: jnp.sum(along * f(params | some, x, real))
        return jax.grad(total, (0, 1))({name: params[name] for name in trained}, inputs)

    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5)
    jax.tree.map(close, gradient(lstm), gradient(plain))

    many = jnp.stack([inputs, 2 * inputs])
    of_one = jax.grad(lambda x: jnp.sum(along * lstm(params, x, real)))
    jax.tree.map(close, jax.jit(jax.vmap(of_one))(many), jnp.stack([of_one(x) for x in many]))


def test_both_forms_of_frozen_weights_are_close_in_half_precision(case, monkeypatch):
    params, inputs, real = case
    along = jax.random.normal(jax.random.key(2), (TIMES, BATCH, UNITS))

    def on(backend):
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        total = lambda x: jnp.sum(along * lstm(params, x, real, jnp.bfloat16))
        return jax.value_and_grad(total)(inputs)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max()), on("gpu"), on("cpu")
    )
    assert on("gpu")[1].dtype == jnp.float32


def test_a_gradient_that_nobody_asks_for_is_zero(case):
    params, inputs, real = case
    nothing = lambda x: jnp.sum(jax.lax.stop_gradient(lstm(params, x, real))) + 0 * jnp.sum(x)
    np.testing.assert_array_equal(jax.grad(nothing)(inputs), jnp.zeros_like(inputs))


def test_many_times_are_not_unrolled(case):
    params, inputs, _ = case
    long = jnp.tile(inputs, (9, 1, 1))
    program = str(jax.make_jaxpr(lambda x: lstm(params, x, jnp.ones(x.shape[:2], bool)))(long))
    assert "scan" in program


def test_padding_may_lie_anywhere(case):
    params, inputs, _ = case
    behind = jnp.arange(TIMES)[:, None] < jnp.array([[2, 2, 2]])
    before = jnp.roll(behind, 2, axis=0)
    first = lstm(params, inputs, behind)[-1]
    np.testing.assert_allclose(first, lstm(params, jnp.roll(inputs, 2, axis=0), before)[-1], atol=1e-6)
    other = inputs.at[2:].set(9.0)
    np.testing.assert_array_equal(first, lstm(params, other, behind)[-1])


def test_half_precision_is_close_and_its_gradients_are_of_the_parameters_type(case):
    params, inputs, real = case
    states = lstm(params, inputs, real, jnp.bfloat16)
    np.testing.assert_allclose(states.astype(jnp.float32), lstm(params, inputs, real), atol=0.02)
    weights = jax.random.normal(jax.random.key(2), (TIMES, BATCH, UNITS))

    def gradient(dtype):
        total = lambda p, x: jnp.sum(weights * lstm(p, x, real, dtype))
        return jax.grad(total, (0, 1))(params, inputs)

    half, full = gradient(jnp.bfloat16), gradient(None)
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype("float32")}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max()), half, full)
    assert np.abs(half[0]["input"] - full[0]["input"]).max() > 0


@pytest.mark.parametrize("shape", [(), (BATCH,), (TIMES, BATCH)])
def test_a_dense_layer_is_a_product_and_a_sum(shape):
    x = jax.random.normal(jax.random.key(0), (*shape, SIZE))
    weights, bias = jax.random.normal(jax.random.key(1), (SIZE, UNITS)), jnp.arange(UNITS) / UNITS
    along = jax.random.normal(jax.random.key(2), (*shape, UNITS))
    simple = lambda x, weights, bias: x @ weights + bias
    assert_same(dense, simple, (x, weights, bias), along)


def test_a_dense_layer_of_clients_side_by_side():
    """A batch, weights and biases for each of three clients; and weights that are one for all."""
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    x, weights, bias = draw(0, 3, BATCH, SIZE), draw(1, 3, SIZE, UNITS), draw(2, 3, UNITS)
    along = draw(3, 3, BATCH, UNITS)
    simple = lambda x, weights, bias: x @ weights + bias
    assert_same(jax.vmap(dense), jax.vmap(simple), (x, weights, bias), along)
    one = (x, weights[0], bias[0])
    assert_same(jax.vmap(dense, (0, None, None)), jax.vmap(simple, (0, None, None)), one, along)


def assert_same(first, second, given, along):
    """Values, and gradients with respect to all that is given."""
    np.testing.assert_allclose(first(*given), second(*given), atol=1e-6)
    gradient = lambda f: jax.jit(jax.grad(lambda given: jnp.sum(along * f(*given))))(given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), gradient(first), gradient(second))


def test_a_dense_layer_in_half_precision_answers_in_full():
    x, weights, bias = jnp.ones((BATCH, SIZE)), jnp.full((SIZE, UNITS), 1 / 3), jnp.zeros(UNITS)
    total = lambda *given: jnp.sum(jnp.square(dense(*given, jnp.bfloat16)))
    result = dense(x, weights, bias, jnp.bfloat16)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, SIZE / 3, rtol=0.01)
    for found, expected in zip(jax.grad(total, (0, 1, 2))(x, weights, bias), (x, weights, bias), strict=True):
        assert (found.dtype, found.shape) == (jnp.float32, expected.shape)
