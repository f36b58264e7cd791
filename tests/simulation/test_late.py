"""Clients that begin with older versions, compiled, against a loop that keeps every version and runs one client at
a time, as a server does with FedBuff."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithm import init_server
from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.fed_recon import fed_recon
from partwise.algorithms.fed_select import fed_select
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.device import Device
from partwise.model.partition import keyed, local, partition, shared
from partwise.parts.declare import find
from partwise.randomness import INIT_ROUND, round_rng
from partwise.selection.choose import parse_choice
from partwise.server.cohort import Recruiting, recruit
from partwise.server.mean import mean
from partwise.server.messages import send
from partwise.server.round import Server
from partwise.server.total import PUBLIC
from partwise.simulation import late_loop, loop
from partwise.simulation.clock import compile_seconds
from partwise.simulation.fleet.counting import Buffer
from partwise.simulation.late_loop import ScheduledSimulation
from partwise.simulation.loop import Simulation
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.types import UserError

NUM_ITEMS, SEED, STALENESS = 30, 5, 0.7
COUNTS = [12, 0, 13, 1, 11, 16, 12, 14, 11]
RATES = {"recon": 0.1, "update": 0.2, "server": 0.8}
# a client twice in a buffer, also of two versions; an empty one; buffers of different sizes
BUFFERS = [
    Buffer(np.array(clients), np.array(versions))
    for clients, versions in (
        ([3, 5, 0, 2], [0, 0, 0, 0]),
        ([4, 6, 1, 8], [0, 1, 0, 1]),
        ([7, 2, 2], [0, 1, 2]),
        ([5, 0, 8, 3], [1, 1, 3, 2]),
        ([2, 2, 7, 6], [4, 4, 4, 4]),
        ([0, 4, 3, 5], [2, 5, 3, 5]),
    )
]


def recon(biased_model):
    """Every role at once, and steps with rates of their round."""
    model = biased_model(NUM_ITEMS, 3)
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


def average(biased_model):
    """Two key spaces, moments for all rows, and means over the holders of a row."""
    model = matrix_factorization(NUM_ITEMS, 3, num_users=len(COUNTS), scale=0.5)
    parts = partition(model, {"user": keyed("user"), "item": keyed("item")})
    return lambda rates: fed_avg(
        model,
        parts,
        update=update.by_steps(Batches(4, 2), rates["update"]),
        optimizer=optimizers.Adam(rates["server"] / 8).on_server(),
        aggregator=mean(over_holders=("user",)),
    )


def select(biased_model):
    """Keys that are drawn again for every version, in tables that are cut to the rows of a buffer."""
    model = matrix_factorization(NUM_ITEMS, 3, num_users=len(COUNTS), scale=0.5)
    parts = partition(model, {"user": keyed("user"), "item": keyed("item")})
    return lambda rates: fed_select(
        model,
        parts,
        choose={"item": parse_choice("sample:4"), "user": parse_choice("all")},
        update=update.by_steps(Batches(3), rates["update"]),
        optimizer=find(optimizers.Optimizer, "lazy_adam")(rates["server"] / 8).on_server(),
    )


BUILDS = {"recon": recon, "average": average, "select": select}


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings(COUNTS, NUM_ITEMS, seed=8, distinct=8)


@pytest.fixture(scope="module")
def builds(biased_model):
    return {name: make(biased_model) for name, make in BUILDS.items()}


def one_by_one(build, store, buffers):
    """The states of all versions, each kept whole; clients one at a time, with bytes in and bytes out."""
    algorithm = build(RATES)
    server, device = Server(algorithm), Device(algorithm)
    states = [init_server(algorithm, round_rng(SEED, INIT_ROUND))]
    for number, buffer in enumerate(buffers):
        now = server.begin(states[-1], number, round_rng(SEED, number), SEED)
        for place, (client, version) in enumerate(zip(*map(np.ndarray.tolist, buffer), strict=True)):
            examples, then = store.gather([client]), states[version]
            asked, here = device.ask(examples, SEED, version), server.about(version, f"{place} {client}")
            public, rng = then.aggregator.get(PUBLIC), round_rng(SEED, version)
            message = send(algorithm.partition, then.params, asked.keys, rng, here, public)
            report = device.report(message, examples, asked)
            found = server.read(here, asked.keys, report)
            factor = (1.0 + number - version) ** -STALENESS
            now.include(place, here, found, len(report), factor)
        states.append(now.close().state)
    return states


def scheduled(build, store, buffers=BUFFERS, **settings):
    settings = {"seed": SEED, "lanes": 3, "num_devices": 1, "rounds_per_call": 4} | settings
    return ScheduledSimulation(build, RATES, store, buffers, STALENESS, **settings)


def finish(simulation, rounds=6):
    records = [record for call in simulation.run(rounds) for record in call]
    return jax.tree_util.tree_map(np.array, simulation.state), records


def assert_same(found, expected, tolerance=1e-5):
    for a, b in zip(*map(jax.tree_util.tree_leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def late(builds, store):
    """The schedule in three lanes on one device: (simulation, its state, its records) by name."""

    @cache
    def run(name):
        simulation = scheduled(builds[name], store)
        return simulation, *finish(simulation)

    return run


@pytest.mark.parametrize(
    "name", ["select", *(pytest.param(name, marks=pytest.mark.slow) for name in ("average", "recon"))]
)
def test_late_clients_equal_a_loop_that_keeps_every_version(builds, store, late, name):
    simulation, state, records = late(name)
    assert simulation._cut_tables == (name == "select")
    assert_same(state, one_by_one(builds[name], store, BUFFERS)[-1])
    assert [record.clients + record.empty for record in records] == [len(each.clients) for each in BUFFERS]


def fresh(buffers):
    """The same clients, as if all had begun with the current version."""
    return [Buffer(each.clients, np.full(len(each.clients), t)) for t, each in enumerate(buffers)]


@pytest.fixture(scope="module")
def rounds(builds, store):
    """A synchronous run, and its cohorts as buffers."""
    recruiting = Recruiting(4)
    settings = {"seed": SEED, "lanes": 3, "num_devices": 1, "rounds_per_call": 4}
    simulation = Simulation(builds["select"], RATES, store, recruiting, **settings)
    cohorts = [recruit(recruiting, store.counts, SEED, t).clients for t in range(5)]
    return finish(simulation, 5)[0], fresh([Buffer(each, each) for each in cohorts])


def test_a_schedule_in_which_nobody_is_late_is_the_synchronous_run_bit_for_bit(builds, store, rounds):
    state, buffers = rounds
    simulation = scheduled(builds["select"], store, buffers)
    assert_same(finish(simulation, 5)[0], state, tolerance=0)


def test_a_ring_changes_nothing_while_nobody_is_late(late, rounds):
    """And it changes something as soon as somebody is."""
    (state, buffers), (simulation, after, _) = rounds, late("select")
    simulation.restart(SEED)
    simulation._buffers = buffers
    assert_same(finish(simulation, 5)[0], state, tolerance=1e-6)
    simulation.restart(SEED)
    simulation._buffers = fresh(BUFFERS)
    assert np.abs(finish(simulation)[0].params["item"] - after.params["item"]).max() > 1e-3
    simulation._buffers = BUFFERS


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"num_devices": 2, "lanes": 2}, {"rounds_per_call": 1}], ids=str)
def test_devices_lanes_and_calls_do_not_matter(builds, store, late, settings, monkeypatch):
    if len(jax.devices()) < settings.get("num_devices", 1):
        pytest.skip("there is one device only")
    monkeypatch.setattr(loop, "RESIDENT_BYTES", 0)  # and the data is staged
    state, _ = finish(scheduled(builds["select"], store, **settings))
    assert_same(state, late("select")[1])


def test_a_run_goes_on_from_a_snapshot_and_compiles_nothing_again(late):
    simulation, state, _ = late("select")
    simulation.restart(SEED)
    simulation.rehearse()
    finish(simulation, 3)
    saved = jax.tree_util.tree_map(np.array, simulation.snapshot())
    finish(simulation, 3)
    assert_same(simulation.state, state, tolerance=0)
    compiled = compile_seconds()
    simulation.resume(saved, 3)
    list(simulation.run(3))
    assert compile_seconds() == compiled
    assert_same(simulation.state, state, tolerance=0)


def test_what_a_fleet_cannot_train_is_refused(builds, store, monkeypatch):
    monkeypatch.setattr(late_loop, "RING_BYTES", 1000)
    with pytest.raises(UserError, match=r"the 4 versions .* lower deploy.stalest"):
        scheduled(builds["select"], store)
    keeping = lambda rates: builds["average"](rates)._replace(keeps=("item",))
    with pytest.raises(UserError, match="devices keep nothing"):
        scheduled(keeping, store, fresh(BUFFERS))
    private = builds["select"](RATES).aggregator._replace(private=True)
    with pytest.raises(UserError, match="without promises of privacy"):
        scheduled(lambda rates: builds["select"](rates)._replace(aggregator=private), store, fresh(BUFFERS))
