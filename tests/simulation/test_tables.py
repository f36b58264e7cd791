"""Tables larger than a round: cut to the rows that a cohort asks for, by need or because an optimizer is lazy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithms.fed_recon import fed_recon
from partwise.algorithms.fed_select import fed_select
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.model.partition import keyed, local, partition
from partwise.parts.declare import find
from partwise.selection.choose import parse_choice
from partwise.server.cohort import Recruiting
from partwise.simulation.loop import Simulation
from partwise.simulation.many_runs import Sweep
from partwise.simulation.plain import PlainSimulation
from partwise.simulation.stage import _distinct
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.types import UserError

USED, KEYS = 40, 4  # items that anybody has rated, and that one client has
RATES = {"update": 0.3, "server": 0.1}
RECRUITING = Recruiting(4)


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings([6] * 9, USED, seed=3, distinct=KEYS)


def reconstructing(num_items, dim, optimizer):
    """Users' vectors are local, items' rows keyed."""
    model = matrix_factorization(num_items, dim, scale=0.5)
    parts = partition(model, {"user": local(), "item": keyed("item")})
    return lambda rates: fed_recon(
        model,
        parts,
        split=split.none(),
        reconstruct=reconstruct.skip(),
        update=update.by_steps(Batches(6), rates["update"]),
        optimizer=find(optimizers.Optimizer, optimizer)(rates["server"]).on_server(),
    )


def selecting(optimizer, **choose):
    """Both sides' rows are keyed."""
    model = matrix_factorization(USED, 3, num_users=9, scale=0.5)
    parts = partition(model, {"user": keyed("user"), "item": keyed("item")})
    return lambda rates: fed_select(
        model,
        parts,
        choose={space: parse_choice(text) for space, text in choose.items()},
        update=update.by_steps(Batches(3), rates["update"]),
        optimizer=find(optimizers.Optimizer, optimizer)(rates["server"]).on_server(),
    )


def simulate(build, store, **settings):
    settings = {"seed": 5, "lanes": 4, "num_devices": 1, "rounds_per_call": 2} | settings
    return Simulation(build, RATES, store, RECRUITING, **settings)


def on_host(state):
    return jax.tree_util.tree_map(np.array, state)


def finish(simulation, rounds=2):
    list(simulation.run(rounds))
    return on_host(simulation.state)


def assert_same(found, expected, tolerance=1e-5):
    for a, b in zip(*map(jax.tree_util.tree_leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("optimizer", ["adagrad", "lazy_adam"])
def test_a_large_table_is_cut_to_the_cohort_by_itself(store, optimizer):
    """Rows that nobody asks for are as they were, and so is what the optimizer has of them."""
    build = reconstructing(5000, 3, optimizer)
    simulation = simulate(build, store)
    assert simulation._stage(0, 1).staged.plan.tables
    before = on_host(simulation.state)
    state = finish(simulation)
    for old, new in zip(*map(jax.tree_util.tree_leaves, (before, state)), strict=True):
        np.testing.assert_array_equal(np.atleast_1d(new)[USED:], np.atleast_1d(old)[USED:])
    assert_same(state, finish(PlainSimulation(build, RATES, store, RECRUITING, seed=5)))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "lazy_yogi"])
def test_a_table_of_a_million_rows_is_cut_to_the_keys_of_the_cohort(store, optimizer):
    simulation = simulate(reconstructing(1_000_000, 8, optimizer), store)
    for call in (simulation._stage(0, 2), simulation._stage(2, 4)):
        assert call.staged.plan.tables["item"].shape[1] <= 1.25 * KEYS * RECRUITING.size + 16
        assert call.staged.shelf.keys["item"].max() < KEYS * RECRUITING.size  # rows of the cut table


@pytest.mark.slow
def test_a_round_needs_no_room_for_a_table_of_a_million_rows(store):
    """It works on the cohort's rows: what the program needs beside the state does not grow with the table."""
    temporary, optimizer = {}, "adagrad"
    for num_items in (10_000, 1_000_000):
        simulation = simulate(reconstructing(num_items, 8, optimizer), store, rounds_per_call=1)
        call = simulation._stage(0, 1)
        given = (simulation.rates, simulation.state, call.staged.shelf, call.staged.plan, jax.random.key(0))
        program = simulation._rounds.lower(*given, np.uint32(0), np.int32(1)).compile()
        temporary[num_items] = program.memory_analysis().temp_size_in_bytes
    assert temporary[1_000_000] <= temporary[10_000] + 1000
    before = np.array(simulation.state.params["item"])
    moved = np.flatnonzero((finish(simulation, 1).params["item"] != before).any(axis=1))
    rows = call.staged.plan.tables["item"]
    np.testing.assert_array_equal(moved, rows[rows < USED])


@pytest.mark.parametrize(
    ("choose", "cut"),
    [({"user": "all"}, {"item"}), ({"item": "top:3", "user": "random:5"}, {"item", "user"})],
    ids=["items", "both"],
)
def test_lazy_rounds_equal_the_plain_loop(store, choose, cut):
    """Whatever is asked for; beside a space of which everybody asks for all, which is not cut, too."""
    build = selecting("lazy_adam", **choose)
    simulation = simulate(build, store)
    assert set(simulation._stage(0, 1).staged.plan.tables) == cut
    state = finish(simulation)
    assert_same(state, finish(PlainSimulation(build, RATES, store, RECRUITING, seed=5)))


def test_lazy_is_dense_where_everyone_asks_for_everything(store):
    """Bit for bit, over several rounds."""
    everything = {"user": "all", "item": "all"}
    dense = finish(simulate(selecting("yogi", **everything), store))
    assert_same(finish(simulate(selecting("lazy_yogi", **everything), store)), dense, tolerance=0)


def test_a_sweep_refuses_a_lazy_optimizer(store):
    with pytest.raises(UserError, match="lazy server optimizer"):
        Sweep(selecting("lazy_adam"), [RATES], [0], store, RECRUITING)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("num_keys", [1, 50, 10**6])
def test_distinct_keys_are_those_of_unique(num_keys, dtype):
    """Few of many are sorted, others marked."""
    keys = np.random.default_rng(0).integers(0, num_keys, 300).astype(dtype)
    for given in (keys, keys[:0]):
        for found, expected in zip(_distinct(given), np.unique(given, return_inverse=True), strict=True):
            np.testing.assert_array_equal(found, expected)
        assert _distinct(given)[0].dtype == dtype
