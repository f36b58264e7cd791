"""One algorithm, several ways to run a cohort: lanes, devices, stages, order, and the plain loop as oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.fed_recon import fed_recon
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.model.partition import keyed, local, partition, shared
from partwise.server.cohort import Recruiting
from partwise.server.mean import mean
from partwise.simulation import loop
from partwise.simulation.loop import Simulation
from partwise.simulation.plain import PlainSimulation
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.testing import check_algorithm

NUM_ITEMS, DIM, ROUNDS = 40, 3, 3
COUNTS = [12, 0, 13, 1, 11, 16, 12, 14, 11]  # sizes that share programs of the plain loop
RATES = {"recon": 0.1, "update": 0.2, "server": 0.8}
RECRUITING = Recruiting(4)


def recon_by_steps(biased_model):
    """Every role at once: a learned default, keyed rows, a twin."""
    model = biased_model(NUM_ITEMS, DIM)
    rules = {"user": local(initial="learned"), "item/*": keyed("item"), "base": shared(twin="add")}
    parts = partition(model, rules)
    return lambda rates: fed_recon(
        model,
        parts,
        split=split.alternate(2),
        reconstruct=reconstruct.by_steps(Batches(2, 2, 7), rates["recon"]),
        update=update.by_steps(Batches(3), rates["update"]),
        optimizer=optimizers.Sgd(rates["server"]).on_server(),
    )


def recon_by_solving(biased_model):
    model = matrix_factorization(NUM_ITEMS, DIM, scale=0.5)
    parts = partition(model, {"user": local(), "item": keyed("item")})
    return lambda rates: fed_recon(
        model,
        parts,
        split=split.halves(),
        reconstruct=reconstruct.by_solving(rates["recon"], batch_size=4),
        update=update.by_steps(Batches(3), rates["update"]),
        optimizer=optimizers.Adagrad(rates["server"]).on_server(),
    )


def averaging(biased_model):
    model = matrix_factorization(NUM_ITEMS, DIM, num_users=len(COUNTS), scale=0.5)
    parts = partition(model, {"user": keyed("user"), "item": keyed("item")})
    return lambda rates: fed_avg(
        model,
        parts,
        update=update.by_steps(Batches(4, 2), rates["update"]),
        optimizer=optimizers.Adam(rates["server"]).on_server(),
    )


BUILDS = {"steps": recon_by_steps, "solving": recon_by_solving, "average": averaging}


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings(COUNTS, NUM_ITEMS, seed=8, distinct=8)


@pytest.fixture(scope="module")
def builds(biased_model):
    return {name: make(biased_model) for name, make in BUILDS.items()}


def on_host(state):
    return jax.tree_util.tree_map(np.array, state)


def finish(simulation, rounds=ROUNDS):
    records = [record for call in simulation.run(rounds) for record in call]
    return on_host(simulation.state), records


@pytest.fixture(scope="module")
def plain(builds, store):
    """The oracle, once per algorithm: (state before, state after, records)."""

    def run(name):
        simulation = PlainSimulation(builds[name], RATES, store, RECRUITING, seed=5)
        return on_host(simulation.state), *finish(simulation)

    return {name: run(name) for name in builds}


def simulate(build, store, **settings):
    settings = {"seed": 5, "lanes": 3, "num_devices": 1, "rounds_per_call": ROUNDS} | settings
    return Simulation(build, RATES, store, RECRUITING, **settings)


@pytest.fixture(scope="module")
def one_device(builds, store):
    """Three lanes on one device: what other ways are compared with."""
    return {name: finish(simulate(build, store))[0] for name, build in builds.items()}


def assert_same(found, expected, tolerance=1e-5):
    """Parameters and optimizer state alike."""
    pairs = zip(*map(jax.tree_util.tree_leaves, (found, expected)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "lanes"), [*((name, lanes) for name in BUILDS for lanes in (1, 3)), ("steps", 4)]
)
def test_any_number_of_lanes_equals_the_plain_loop(builds, store, plain, one_device, name, lanes):
    before, after, told = plain[name]
    if lanes == 3:
        assert_same(one_device[name], after)
        return
    state, records = finish(simulate(builds[name], store, lanes=lanes))
    assert_same(state, after)
    assert all(np.abs(leaf - before.params[path]).max() > 1e-3 for path, leaf in state.params.items())
    for mine, theirs in zip(records, told, strict=True):
        same = ("round", "clients", "examples", "empty", "dropped", "too_small", "broken")
        assert [getattr(mine, field) for field in same] == [getattr(theirs, field) for field in same]
        np.testing.assert_allclose(mine.loss, theirs.loss, rtol=1e-4)


def test_the_oracle_has_empty_clients_to_count(plain):
    """Clients with 0 or 1 examples have no query set under alternate(2)."""
    assert sum(record.empty for record in plain["steps"][2]) > 0
    assert all(record.clients + record.empty == RECRUITING.size for record in plain["steps"][2])


@pytest.mark.parametrize("name", ["steps"])
def test_two_devices_equal_one(builds, store, one_device, name):
    if len(jax.devices()) < 2:
        pytest.skip("there is one device only")
    state, _ = finish(simulate(builds[name], store, num_devices=2, lanes=2))
    assert_same(state, one_device[name])


def test_the_order_of_a_cohort_does_not_matter(builds, store, one_device, monkeypatch):
    """A client's randomness hangs on its id, not on its place."""
    recruit = loop.recruit

    def turned(*given):
        cohort = recruit(*given)
        return cohort._replace(clients=cohort.clients[::-1])

    monkeypatch.setattr(loop, "recruit", turned)
    assert_same(finish(simulate(builds["solving"], store))[0], one_device["solving"])


def test_the_place_of_a_client_in_the_store_does_not_matter(builds, store):
    """The same clients at other positions: the sum is the same, whoever comes first."""
    states = []
    for order in (np.arange(len(COUNTS)), np.random.default_rng(0).permutation(len(COUNTS))):
        everyone = Recruiting(len(COUNTS))
        simulation = Simulation(builds["solving"], RATES, store.take(order), everyone, num_devices=1)
        states.append(finish(simulation, 1)[0])
    assert_same(*states)


@pytest.mark.parametrize(
    ("name", "tables", "resident"),
    [
        ("average", "whole", False),
        ("solving", "whole", False),
        ("steps", "of the cohort", True),
        ("solving", "of the cohort", False),
    ],
)
def test_staged_calls_equal_resident_data(builds, store, one_device, monkeypatch, name, tables, resident):
    """With sgd, adagrad and adam on the server; tables are cut to the cohort's rows where unsent ones stay."""
    if not resident:
        monkeypatch.setattr(loop, "RESIDENT_BYTES", 0)
    if tables == "of the cohort":
        monkeypatch.setattr(Simulation, "_whole_tables", lambda self: False)
    simulation = simulate(builds[name], store, rounds_per_call=2)
    assert simulation.resident == resident
    assert simulation.rounds_per_call == 2
    state, records = finish(simulation)
    assert_same(state, one_device[name])
    assert [record.round for record in records] == [1, 2, 3]


def compiled(simulation):
    return simulation._rounds._cache_size()


def test_later_calls_do_not_compile_again(builds, store):
    simulation = simulate(builds["steps"], store)
    finish(simulation, 2)
    assert compiled(simulation) == 1
    finish(simulation, 4)
    finish(simulation, 1)
    assert compiled(simulation) == 1
    assert simulation.round == 7


def test_other_rates_do_not_compile_again(builds, store):
    simulation = simulate(builds["solving"], store)
    finish(simulation, 1)
    simulation.rates = {name: rate / 2 for name, rate in simulation.rates.items()}
    finish(simulation, 1)
    assert compiled(simulation) == 1


@pytest.mark.parametrize("whole", [True, False], ids=["whole tables", "rows of the cohort"])
def test_staged_calls_of_one_size_do_not_compile_again(builds, make_ratings, monkeypatch, whole):
    monkeypatch.setattr(loop, "RESIDENT_BYTES", 0)
    monkeypatch.setattr(Simulation, "_whole_tables", lambda self: whole)
    store = make_ratings([6] * 9, NUM_ITEMS, seed=2)
    simulation = simulate(builds["solving"], store, rounds_per_call=1)
    finish(simulation, 1)
    finish(simulation, 4)
    assert compiled(simulation) == 1


def test_how_rounds_are_cut_into_calls_changes_no_bit(builds, store, one_device):
    in_pieces = simulate(builds["steps"], store)
    for rounds in (1, 2):
        state, _ = finish(in_pieces, rounds)
    assert_same(state, one_device["steps"], tolerance=0)


def test_a_rehearsal_leaves_no_trace(builds, store, one_device):
    simulation = simulate(builds["steps"], store)
    simulation.rehearse()
    assert simulation.round == 0
    assert_same(finish(simulation)[0], one_device["steps"], tolerance=0)
    assert compiled(simulation) == 1


def test_an_aggregator_that_ignores_padding_counts_no_empty_lane(biased_model, make_ratings):
    """Five clients in lanes of four: three lanes are empty."""
    model, store = biased_model(8, 3), make_ratings([4, 6, 2, 5, 3], 8)
    parts = partition(model, {"user": local(), "item/*": keyed("item")})

    def build(rates):
        return fed_recon(
            model,
            parts,
            split=split.none(),
            reconstruct=reconstruct.skip(),
            update=update.by_steps(Batches(4), rates["update"]),
            optimizer=optimizers.Sgd(rates["server"]).on_server(),
            aggregator=mean(lambda report: jnp.ones(())),
        )

    check_algorithm(build, {"update": 0.1, "server": 1.0}, store, lanes=(4,))
    [[record]] = Simulation(build, {"update": 0.1, "server": 1.0}, store, Recruiting(5), lanes=4).run(1)
    assert record.clients == 5


@pytest.mark.parametrize("backend", [Simulation, PlainSimulation])
def test_a_restart_is_a_new_run(backend, builds, store):
    """With another seed and other rates, as if it had been made with them."""
    again = backend(builds["solving"], RATES, store, RECRUITING, seed=1)
    finish(again, 1)
    again.restart(2, {"update": 0.05})
    fresh = backend(builds["solving"], RATES | {"update": 0.05}, store, RECRUITING, seed=2)
    assert_same(finish(again, 1)[0], finish(fresh, 1)[0], 1e-6)
