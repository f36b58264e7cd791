from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from partwise.model.partition import frozen, keyed, local, partition, shared
from partwise.model.spec import Model
from partwise.selection import slices

START = {
    "words": jnp.arange(12, dtype=jnp.float32).reshape(6, 2),
    "out": 100 + jnp.arange(18, dtype=jnp.float32).reshape(3, 6),
    "twin": jnp.array([1.0, 2.0]),
    "mean": jnp.array([3.0, 4.0]),
    "mine": jnp.array([5.0]),
    "zero": jnp.array([6.0]),
    "learned": jnp.array([7.0]),
    "fixed": jnp.array([8.0]),
}
RULES = {
    "words": keyed("word"),
    "out": keyed("word", axis=1),
    "twin": shared(twin="add"),
    "mean": shared(twin="average"),
    "mine": local(),
    "zero": local(initial="zero"),
    "learned": local(initial="learned"),
    "fixed": frozen(),
}
# The client's keys are 1, 3 and 5; the batch asks for some of them twice.
BATCH = {"title": jnp.array([3, 1]), "tokens": jnp.array([[5, 3], [3, 3]]), "other": jnp.array([1.5, 2.5])}
KEYS = {"word": slices.Keys(jnp.array([0, 1, 3, 5]), jnp.asarray(1), jnp.asarray(3), 3)}
POSITIONS = {"title": jnp.array([1, 0]), "tokens": jnp.array([[2, 1], [1, 1]])}


@pytest.fixture(scope="module")
def parts():
    return partition(Model(lambda rng: START, None, None), RULES, columns={"word": ("title", "tokens")})


@pytest.fixture(scope="module")
def received(parts):
    return slices.receive(parts, parts.split(START)[0])


def test_receive_sorts_leaves_by_role(received):
    assert set(received.shared) == {"twin", "mean", "default/learned"}
    assert set(received.frozen) == {"fixed"}
    assert set(received.tables) == {"words", "out"}
    assert received.tables["out"].shape == (6, 3)


def test_a_batch_of_rows_predicts_what_the_table_does(parts, received):
    """The re-numbered ids point, in the gathered rows, at what the ids pointed at in the tables."""
    need = slices.batch_rows(parts, BATCH, POSITIONS, jnp.ones(2, bool), KEYS)
    rows = slices.gather(parts, received.tables, {}, need, KEYS)
    for name in ("title", "tokens"):
        assert need.batch[name].shape == BATCH[name].shape
        for path, table in received.tables.items():
            np.testing.assert_array_equal(rows[path][need.batch[name]], table[BATCH[name]])
    np.testing.assert_array_equal(need.batch["other"], BATCH["other"])


def test_gather_adds_the_clients_own_change_to_every_copy_of_a_row(parts, received):
    need = slices.batch_rows(parts, BATCH, POSITIONS, jnp.ones(2, bool), KEYS)
    deltas = {"words": jnp.array([[10.0, 0], [20, 0], [30, 0]])}
    rows = slices.gather(parts, received.tables, deltas, need, KEYS)
    np.testing.assert_array_equal(rows["words"][need.batch["tokens"]][:, :, 0], [[10 + 30, 6 + 20], [26, 26]])
    np.testing.assert_array_equal(rows["out"][need.batch["title"]], received.tables["out"][BATCH["title"]])


def test_scatter_adds_up_repeated_ids(parts, received):
    need = slices.batch_rows(parts, BATCH, POSITIONS, jnp.ones(2, bool), KEYS)
    empty = slices.empty_deltas(parts, received.tables, {"word": 4})
    assert {path: delta.shape for path, delta in empty.items()} == {"words": (4, 2), "out": (4, 3)}
    ones = {path: jnp.ones((6, *table.shape[1:])) for path, table in received.tables.items()}
    spread = slices.scatter(parts, empty, ones, need)
    np.testing.assert_array_equal(spread["words"][:, 0], [1, 4, 1, 0])  # key 1 once, 3 four times, 5 once
    np.testing.assert_array_equal(spread["out"][:, 2], [1, 4, 1, 0])


def test_local_leaves_start_random_zero_learned_or_neutral(parts, received):
    learned = received._replace(shared=received.shared | {"default/learned": jnp.array([70.0])})
    start = slices.initial_local(parts, learned, START)
    expected = {"mine": [5], "zero": [0], "learned": [70], "twin": [0, 0], "mean": [3, 4]}
    assert {path: leaf.tolist() for path, leaf in start.items()} == expected
