"""Tables on every device, spread over the devices, and on the host: the same run, to the last bit."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithm import init_params
from partwise.algorithms.fed_recon import fed_recon
from partwise.algorithms.fed_select import fed_select
from partwise.algorithms.scaffold import scaffold
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.model.partition import keyed, local, partition
from partwise.parts.declare import find
from partwise.selection.choose import parse_choice
from partwise.server.cohort import Recruiting
from partwise.simulation import evaluator, lanes, table_places
from partwise.simulation.evaluator import Evaluator
from partwise.simulation.loop import Simulation
from partwise.simulation.mesh import make_mesh
from partwise.simulation.spread import SpreadTable
from partwise.simulation.table_places import choose_place, sketched
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.types import UserError

USED = 2001  # items: their number is odd, so that no two devices have as many
RATES = {"update": 0.3, "server": 0.1}
PLACES = ("copies", "shards", "host")


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings([6] * 9, USED, seed=3, distinct=4)


def reconstructing(optimizer="adagrad", num_items=USED, dim=3):
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


def selecting(optimizer="adagrad", **choose):
    """Both sides' rows are keyed, and clients choose other items in every round."""
    model = matrix_factorization(USED, 3, num_users=9, scale=0.5)
    parts = partition(model, {"user": keyed("user"), "item": keyed("item")})
    return lambda rates: fed_select(
        model,
        parts,
        choose={space: parse_choice(text) for space, text in choose.items()},
        update=update.by_steps(Batches(3), rates["update"]),
        optimizer=find(optimizers.Optimizer, optimizer)(rates["server"]).on_server(),
    )


def simulate(build, store, tables, **settings):
    settings = {"seed": 5, "lanes": 2, "rounds_per_call": 2} | settings
    return Simulation(build, RATES, store, Recruiting(4), tables=tables, **settings)


def on_host(state):
    return jax.tree_util.tree_map(np.array, state)


def assert_equal(found, expected):
    for a, b in zip(*map(jax.tree_util.tree_leaves, (found, expected)), strict=True):
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def scaffolding(store, optimizer="sgd"):
    """Both sides' rows are keyed, and clients keep control variates."""
    model = matrix_factorization(USED, 3, num_users=9, scale=0.5)
    parts = partition(model, {"user": keyed("user"), "item": keyed("item")})
    return lambda rates: scaffold(
        model,
        parts,
        schedule=Batches(3),
        rate=rates["update"],
        num_clients=store.num_clients,
        optimizer=find(optimizers.Optimizer, optimizer)(rates["server"]).on_server(),
    )


BUILDS = {
    "sgd": reconstructing("sgd"),
    "adagrad": reconstructing("adagrad"),
    "lazy_adam": reconstructing("lazy_adam"),
    "lazy_yogi": reconstructing("lazy_yogi"),
    "chosen": selecting(item="with_random:5", user="own"),
    "some": selecting(item="top:3", user="all"),
}


# Without its optimizations, XLA rounds Adam's step otherwise if it is compiled beside something else.
EXACT = [pytest.param(n, marks=pytest.mark.slow if n.startswith("lazy") else ()) for n in BUILDS]


@pytest.mark.parametrize("name", EXACT)
def test_a_run_is_the_same_wherever_its_tables_are(store, name):
    runs = {place: simulate(BUILDS[name], store, place) for place in PLACES}
    first = on_host(runs["copies"].state)
    for place, run in runs.items():
        assert_equal(on_host(run.state), first)
        records = [record._replace(seconds=0) for call in run.run(5) for record in call]
        assert [r.round for r in records] == [1, 2, 3, 4, 5], place
    expected = on_host(runs["copies"].state)
    assert any(
        (a != b).any() for a, b in zip(*map(jax.tree_util.tree_leaves, (first, expected)), strict=True)
    )
    for run in runs.values():
        assert_equal(on_host(run.state), expected)


def test_so_is_one_whose_clients_keep_something(store):
    runs = {place: simulate(scaffolding(store), store, place, lanes=1) for place in PLACES}
    for run in runs.values():
        list(run.run(5))
    for run in runs.values():
        assert_equal(on_host(run.snapshot()), on_host(runs["copies"].snapshot()))


def test_each_device_has_half_of_the_rows(store):
    run = simulate(BUILDS["adagrad"], store, "shards")
    list(run.run(2))
    table = run.state.params["item"]
    assert isinstance(table, SpreadTable)
    assert table.shape == (USED, 3)
    for leaf in (table, jax.tree_util.tree_leaves(run.state.optimizer)[0]):
        assert [len(shard.data) for shard in leaf.array.addressable_shards] == [1001, 1001]


def test_on_the_host_no_device_has_more_than_the_rows_of_a_call(store):
    run = simulate(BUILDS["adagrad"], store, "host")
    sizes = []
    program = run._rounds
    run._rounds = lambda rates, state, *call: (
        sizes.append(len(state.params["item"])) or program(rates, state, *call)
    )
    list(run.run(4))
    assert isinstance(run.state.params["item"], np.ndarray)
    assert sizes
    assert max(sizes) <= 1.25 * 2 * 4 * 4 + 18


@pytest.mark.parametrize("place", PLACES)
def test_a_rehearsal_changes_nothing(store, place):
    run, other = (simulate(BUILDS["adagrad"], store, place) for _ in range(2))
    before = on_host(run.state)
    run.rehearse()
    assert_equal(on_host(run.state), before)
    for each in (run, other):
        list(each.run(3))
    assert_equal(on_host(run.state), on_host(other.state))


@pytest.mark.parametrize("place", PLACES)
def test_lanes_are_measured_with_one_simulation_and_change_nothing(store, place, monkeypatch):
    """As tables may be large, there is no second simulation, and no second table in a rehearsal."""
    made, copied = [], []

    def make(number):
        made.append(simulate(BUILDS["adagrad"], store, place, lanes=number))
        return made[-1]

    for name, value in {"WORTH_SECONDS": 0, "CPU_LANES": (1, 2), "_remembered": lambda name: None}.items():
        monkeypatch.setattr(lanes, name, value)
    monkeypatch.setattr(lanes, "_remember", lambda *told: None)
    whole = table_places._copied
    monkeypatch.setattr(table_places, "_copied", lambda state: copied.append(state) or whole(state))
    run = lanes.choose_lanes(make, 10, "some")
    assert len(made) == 1
    assert all(len(state.params["item"]) < USED / 10 for state in copied)
    other = simulate(BUILDS["adagrad"], store, place, lanes=run.lanes)
    for each in (run, other):
        list(each.run(3))
    assert_equal(on_host(run.state), on_host(other.state))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("later", PLACES)
def test_a_run_goes_on_wherever_its_tables_were(store, place, later):
    whole = simulate(BUILDS["adagrad"], store, "copies")
    list(whole.run(4))
    begun, resumed = simulate(BUILDS["adagrad"], store, place), simulate(BUILDS["adagrad"], store, later)
    list(begun.run(2))
    resumed.resume(on_host(begun.snapshot()), 2)
    list(resumed.run(2))
    assert_equal(on_host(resumed.state), on_host(whole.state))


def test_what_clients_keep_can_be_written_after_it_was_read_from_a_mapped_file(store):
    run = simulate(scaffolding(store), store, "shards")
    saved = on_host(run.snapshot())
    for array in saved[1].values():
        array.flags.writeable = False
    run.resume(saved, 0)
    list(run.run(1))
    assert all(array.any() for array in run.snapshot()[1].values())


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("name", ["adagrad", "some"])
def test_an_evaluation_is_the_same_wherever_tables_are(monkeypatch, store, place, name):
    monkeypatch.setattr(evaluator, "FAR_BYTES", 1000)
    runs = [simulate(BUILDS[name], store, each) for each in ("copies", place)]
    for run in runs:
        list(run.run(2))
    evaluate = Evaluator(BUILDS[name], RATES, store)
    expected, found = (evaluate.sums(run.state.params) for run in runs)
    for metric, sums in expected.items():
        assert_equal(list(found[metric]), list(sums))
    assert evaluate._rooms["item"] < USED // 4  # only rows of these clients came to the devices


@pytest.mark.parametrize(("optimizer", "why"), [("adam", "all rows"), ("yogi", "all rows")])
@pytest.mark.parametrize("place", PLACES[1:])
def test_an_optimizer_that_moves_all_rows_needs_whole_tables(store, optimizer, why, place):
    with pytest.raises(UserError, match=f"simulation.tables = {place} .* {why}"):
        simulate(reconstructing(optimizer), store, place)
    simulate(reconstructing(optimizer), store, "auto")


def test_an_unknown_place_is_named(store):
    with pytest.raises(UserError, match=r"simulation.tables.*disk.*auto, copies, host, shards"):
        simulate(BUILDS["sgd"], store, "disk")


def test_the_place_is_chosen_by_size():
    two, one = make_mesh(2), make_mesh(1)
    small, large = (reconstructing("adagrad", number, 64)(RATES) for number in (10**6, 10**7))
    gigabyte = 10**9
    assert choose_place("auto", small, two, gigabyte) == "copies"
    assert choose_place("auto", large, two, 16 * gigabyte) == "shards"
    assert choose_place("auto", large, one, 16 * gigabyte) == "copies"
    assert choose_place("auto", large, one, 8 * gigabyte) == "host"
    assert choose_place("auto", large, two, 4 * gigabyte) == "host"


def test_a_sketch_has_the_leaves_of_a_model_and_the_first_row_of_large_tables(monkeypatch):
    algorithm = BUILDS["adagrad"](RATES)
    whole = init_params(algorithm, jax.random.key(1))
    assert_equal(sketched(algorithm, jax.random.key(1)), whole)
    monkeypatch.setattr(table_places, "LARGE_BYTES", 1000)
    sketch = sketched(algorithm, jax.random.key(1))
    assert sketch.keys() == whole.keys()
    assert sketch["item"].strides[0] == 0  # no memory
    np.testing.assert_array_equal(sketch["item"], np.tile(whole["item"][:1], (USED, 1)))
