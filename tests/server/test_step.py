from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise import optimizers
from partwise.model.partition import frozen, keyed, partition
from partwise.model.spec import Model
from partwise.parts.declare import find, names
from partwise.schedules import Linear
from partwise.server.step import (
    ServerState,
    init_state,
    is_finite,
    map_tables,
    put_rows,
    step,
    take_rows,
    trainable,
)

RATE = 0.3
START = {
    "table": np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]),
    "bias": np.array([0.5]),
    "fixed": np.array([9.0]),
}
MEANS = [  # the mean update of two rounds; row 1 is sent in none of them, row 3 in the second only
    {"table": np.array([[0.5, -0.2], [0, 0], [0.1, 0.3], [0, 0]]), "bias": np.array([-0.4])},
    {"table": np.array([[-0.1, 0.6], [0, 0], [0.2, 0.1], [0.7, -0.9]]), "bias": np.array([0.2])},
]


@pytest.fixture(scope="module")
def parts():
    model = Model(lambda rng: {k: jnp.asarray(v, jnp.float32) for k, v in START.items()}, None, None)
    return partition(model, {"table": keyed("item"), "fixed": frozen()})


def start(parts, optimizer):
    params = {path: jnp.asarray(value, jnp.float32) for path, value in START.items()}
    return init_state(parts, optimizer, params)


def run(parts, optimizer, means=MEANS):
    state = start(parts, optimizer)
    for mean in means:
        mean = {path: jnp.asarray(update, jnp.float32) for path, update in mean.items()}
        state = step(state, optimizer, mean, jnp.asarray(True))
    return state


def sgd(x, gradients):
    for g in gradients:
        x = x - RATE * g
    return x


def momentum(x, gradients):
    velocity = 0
    for g in gradients:
        velocity = 0.9 * velocity + g
        x = x - RATE * velocity
    return x


def adagrad(x, gradients):
    squares = 0.0
    for g in gradients:
        squares = squares + g**2
        x = x - RATE * g / np.sqrt(squares + 1e-3)
    return x


def adam(x, gradients):
    first = second = 0
    for t, g in enumerate(gradients, 1):
        first, second = 0.9 * first + 0.1 * g, 0.99 * second + 0.01 * g**2
        x = x - RATE * (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.99**t)) + 1e-3)
    return x


def yogi(x, gradients):
    first = second = 0
    for t, g in enumerate(gradients, 1):
        first = 0.9 * first + 0.1 * g
        second = second - 0.01 * np.sign(second - g**2) * g**2
        x = x - RATE * (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.99**t)) + 1e-3)
    return x


@pytest.mark.parametrize(
    ("optimizer", "by_hand"),
    [
        (optimizers.Sgd(RATE).on_server(), sgd),
        (optimizers.Sgd(RATE, momentum=0.9).on_server(), momentum),
        (optimizers.Adagrad(RATE).on_server(), adagrad),
        (optimizers.Adam(RATE).on_server(), adam),
        (optimizers.Yogi(RATE).on_server(), yogi),
    ],
    ids=["sgd", "momentum", "adagrad", "adam", "yogi"],
)
def test_steps_equal_the_published_formulas(parts, optimizer, by_hand):
    """The mean update is the antigradient; constants are the documented ones."""
    state = run(parts, optimizer)
    for path in ("table", "bias"):
        expected = by_hand(START[path], [-mean[path] for mean in MEANS])
        np.testing.assert_allclose(state.params[path], expected, rtol=2e-5)
    np.testing.assert_array_equal(state.params["fixed"], START["fixed"])


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_rows_that_nobody_sent_keep_value_and_state(parts, name):
    optimizer = find(optimizers.Optimizer, name)(RATE).on_server()
    assert optimizer.rows == "exact"
    before, after = start(parts, optimizer), run(parts, optimizer)
    np.testing.assert_array_equal(after.params["table"][1], before.params["table"][1])
    tables = lambda state: [x for x in jax.tree_util.tree_leaves(state.optimizer) if x.shape == (4, 2)]
    for old, new in zip(tables(before), tables(after), strict=True):
        np.testing.assert_array_equal(new[1], old[1])


@pytest.mark.parametrize(
    "optimizer",
    [
        optimizers.Sgd(RATE, momentum=0.9).on_server(),
        optimizers.Adam(RATE).on_server(),
        optimizers.Yogi(RATE).on_server(),
    ],
    ids=["momentum", "adam", "yogi"],
)
def test_optimizers_that_move_unsent_rows_do_not_claim_otherwise(parts, optimizer):
    """A row sent in the first round moves on in the second, though nobody sends it."""
    assert optimizer.rows == "all"
    silent = {path: np.zeros_like(update) for path, update in MEANS[0].items()}
    once, twice = run(parts, optimizer, MEANS[:1]), run(parts, optimizer, [MEANS[0], silent])
    assert not np.array_equal(once.params["table"][0], twice.params["table"][0])


@pytest.mark.parametrize("name", names(optimizers.Optimizer))
def test_nothing_moves_when_nobody_reported(parts, name):
    optimizer = find(optimizers.Optimizer, name)(RATE).on_server()
    before = run(parts, optimizer, MEANS[:1])
    mean = {path: jnp.full(before.params[path].shape, jnp.nan) for path in ("table", "bias")}
    after = step(before, optimizer, mean, jnp.asarray(False))
    for old, new in zip(*map(jax.tree_util.tree_leaves, (before, after)), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_step_on_the_rows_of_a_cohort_equals_the_step_on_the_table(parts, name):
    """map_tables takes rows out and puts them back, of the table and of its optimizer state alike."""
    optimizer = find(optimizers.Optimizer, name)(RATE).on_server()
    rows = np.array([0, 2, 3, 4])  # 4 does not exist: padding
    state = start(parts, optimizer)
    for mean in MEANS:
        part = map_tables(
            parts, optimizer, lambda leaf, space: leaf.at[rows].get(mode="fill", fill_value=0), state
        )
        sliced = {"table": np.pad(mean["table"], ((0, 1), (0, 0)))[rows], "bias": mean["bias"]}
        sliced = {path: jnp.asarray(update, jnp.float32) for path, update in sliced.items()}
        part = step(part, optimizer, sliced, jnp.asarray(True))
        put = lambda leaf, space, new: leaf.at[rows].set(new, mode="drop")
        state = map_tables(parts, optimizer, put, state, part)
    for expected, found in zip(*map(jax.tree_util.tree_leaves, (run(parts, optimizer), state)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


LAZY = [("lazy_adam", adam), ("lazy_yogi", yogi)]


def step_rows(parts, optimizer, state, rows, mean, active):
    """A step on these rows of the tables, and on all that is no table."""
    cut = {path: leaf[rows["item"]] if path == "table" else leaf for path, leaf in mean.items()}
    part = step(take_rows(parts, optimizer, state, rows), optimizer, cut, active)
    return put_rows(parts, optimizer, state, rows, part)


def as_floats(arrays):
    return {path: jnp.asarray(each, jnp.float32) for path, each in arrays.items()}


@pytest.mark.parametrize(("name", "by_hand"), LAZY)
def test_lazy_steps_by_hand(parts, name, by_hand):
    """Asked in every round: the published formula. In none: nothing. In the second only: its moments begin then,
    but the bias is corrected for two rounds. What is shared is stepped as ever."""
    optimizer = find(optimizers.Optimizer, name)(RATE).on_server()
    assert optimizer.rows == "asked"
    state = start(parts, optimizer)
    for mean, rows in zip(MEANS, ([0, 2], [0, 2, 3]), strict=True):
        asked = {"item": jnp.array(rows)}
        state = step_rows(parts, optimizer, state, asked, as_floats(mean), jnp.asarray(True))
    gradients = lambda path, row: [-mean[path][row] for mean in MEANS]
    for row in (0, 2, 3):  # before row 3 is asked for, its moments are those of zero gradients: zero
        expected = by_hand(START["table"][row], gradients("table", row))
        np.testing.assert_allclose(state.params["table"][row], expected, rtol=2e-5)
    np.testing.assert_allclose(
        state.params["bias"], by_hand(START["bias"], gradients("bias", slice(None))), rtol=2e-5
    )
    before = start(parts, optimizer)
    for old, new in zip(*map(jax.tree_util.tree_leaves, (before, state)), strict=True):
        if old.shape == (4, 2):
            np.testing.assert_array_equal(new[1], old[1])


@pytest.mark.parametrize(("name", "by_hand"), LAZY)
def test_a_row_that_is_not_asked_for_again_rests_with_its_moments(parts, name, by_hand):
    """The dense namesake moves it on; the lazy one keeps every bit, until it is asked for again."""
    optimizer, active = find(optimizers.Optimizer, name)(RATE).on_server(), jnp.asarray(True)
    both, rest = {"item": jnp.array([0, 2])}, {"item": jnp.array([2])}
    once = step_rows(parts, optimizer, start(parts, optimizer), both, as_floats(MEANS[0]), active)
    twice = step_rows(parts, optimizer, once, rest, as_floats(MEANS[1]), active)
    tables = lambda state: [x for x in jax.tree_util.tree_leaves(state) if x.shape == (4, 2)]
    assert len(tables(once)) == 3  # values and two moments
    for old, new in zip(tables(once), tables(twice), strict=True):
        np.testing.assert_array_equal(new[0], old[0])
        assert not np.array_equal(new[2], old[2])


@pytest.mark.parametrize("name", ["adam", "yogi"])
def test_lazy_equals_dense_where_all_rows_are_asked_for(parts, name):
    lazy, everything = find(optimizers.Optimizer, f"lazy_{name}")(RATE).on_server(), {"item": jnp.arange(4)}
    state = start(parts, lazy)
    for mean in MEANS:
        state = step_rows(parts, lazy, state, everything, as_floats(mean), jnp.asarray(True))
    dense = run(parts, find(optimizers.Optimizer, name)(RATE).on_server())
    for expected, found in zip(*map(jax.tree_util.tree_leaves, (dense, state)), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_rate_schedule_counts_on_when_rows_are_put_back(parts):
    """A decaying server rate is plain SGD to a row, but its counter must not be lost with the rows."""
    optimizer = optimizers.Sgd(1.0, schedule=Linear(rounds=10)).on_server()
    state = start(parts, optimizer)
    part = map_tables(parts, optimizer, lambda leaf, space: leaf, state)
    part = step(part, optimizer, {k: jnp.asarray(v, jnp.float32) for k, v in MEANS[0].items()}, True)
    back = map_tables(parts, optimizer, lambda leaf, space, new: new, state, part)
    counts = [int(x) for x in jax.tree_util.tree_leaves(back.optimizer) if x.shape == ()]
    assert counts == [1]


def test_is_finite_looks_at_floats_only():
    state = ServerState({"ids": jnp.arange(3), "w": jnp.ones(2)}, ())
    assert is_finite(state)
    assert not is_finite(state._replace(params={"w": jnp.array([1, jnp.inf])}))


def test_trainable_leaves_out_frozen_ones(parts):
    assert trainable(parts, START) == ("table", "bias")
