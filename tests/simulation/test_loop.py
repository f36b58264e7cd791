"""What can go wrong in a round, and what a record says of it."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from partwise import optimizers
from partwise.algorithms.fed_recon import fed_recon
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.model.partition import frozen, keyed, local, partition
from partwise.server.cohort import Recruiting, poisson, recruit
from partwise.simulation import loop
from partwise.simulation.loop import Simulation
from partwise.simulation.mesh import make_mesh
from partwise.simulation.plain import PlainSimulation
from partwise.types import UserError

NUM_ITEMS, DIM = 30, 2
COUNTS = [6, 7, 8, 5, 8]
IDS = ["ann", "bob", "cat", "dan", "eve"]
RATES = {"recon": 0.1, "update": 0.2, "server": 0.8}


@pytest.fixture(scope="module")
def model(biased_model):
    return biased_model(NUM_ITEMS, DIM)


@pytest.fixture(scope="module")
def build(model):
    parts = partition(model, {"user": local(), "item/*": keyed("item"), "base": frozen()})
    return lambda rates: fed_recon(
        model,
        parts,
        split=split.halves(),
        reconstruct=reconstruct.by_steps(Batches(4), rates["recon"]),
        update=update.by_steps(Batches(4), rates["update"]),
        optimizer=optimizers.ServerOptimizer(optax.sgd(rates["server"]), "exact"),
    )


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings(COUNTS, NUM_ITEMS, seed=6, ids=IDS, distinct=4)


@pytest.fixture(scope="module")
def without(build, store):
    """position -> (parameters, record) of a round of the plain loop without that client."""
    run = lambda position: finish(_plain(build, store.take(np.delete(np.arange(5), position))))
    done = {}

    def get(position):
        if position not in done:
            done[position] = run(position)
        params, (record,) = done[position]
        return params, record

    return get


def poisoned(store, position):
    """The same store, but one rating of this client is not a number."""
    rating = store.columns["rating"].copy()
    rating[store.starts[position] + store.counts[position] - 1] = np.nan
    rating[store.starts[position]] = np.nan
    return type(store)({**store.columns, "rating": rating}, store.starts, store.counts, store.client_ids)


def simulate(build, store, recruiting=None, rates=RATES, **settings):
    settings = {"seed": 1, "lanes": 3, "num_devices": 1, "rounds_per_call": 1} | settings
    return Simulation(build, rates, store, recruiting or Recruiting(store.num_clients), **settings)


def finish(simulation, rounds=1):
    records = [record for call in simulation.run(rounds) for record in call]
    return {path: np.array(leaf) for path, leaf in simulation.state.params.items()}, records


@pytest.mark.parametrize(
    ("kind", "position"), [("compiled", 0), ("compiled", 2), ("staged", 0), ("staged", 4), ("plain", 2)]
)
def test_a_broken_client_is_dropped_counted_and_named(build, store, without, monkeypatch, kind, position):
    """The rest of the round equals the round without it; six lanes for five clients leave one empty."""
    if kind == "staged":
        monkeypatch.setattr(loop, "RESIDENT_BYTES", 0)
    make = simulate if kind != "plain" else _plain
    found, (record,) = finish(make(build, poisoned(store, position)))
    expected, told = without(position)
    assert record.broken == (IDS[position],)
    assert record.clients == told.clients == 4
    assert record.empty == 0
    np.testing.assert_allclose(record.loss, told.loss, rtol=1e-5)
    for path in expected:
        np.testing.assert_allclose(found[path], expected[path], rtol=1e-5, atol=1e-6)


def _plain(build, store, recruiting=None, rates=RATES):
    return PlainSimulation(build, rates, store, recruiting or Recruiting(store.num_clients), seed=1)


@pytest.mark.parametrize("make", [simulate, _plain], ids=["compiled", "plain"])
def test_a_diverging_run_ends_with_the_round_and_its_clients(build, store, make):
    huge = type(store)(
        {**store.columns, "rating": store.columns["rating"] * 100},
        store.starts,
        store.counts,
        store.client_ids,
    )
    simulation = make(build, huge, rates=RATES | {"server": 3e38})
    with pytest.raises(UserError, match=r"no longer finite after round 1\b.*\(.*ann.*lower server\.rate"):
        finish(simulation)


def test_a_client_that_fails_is_named_by_the_plain_loop(build, store):
    outside = type(store)(
        {**store.columns, "item": np.where(np.arange(34) == 15, NUM_ITEMS, store.columns["item"])},
        store.starts,
        store.counts,
        store.client_ids,
    )
    with pytest.raises(UserError, match=r"client 'cat' failed: column 'item' holds keys"):
        finish(_plain(build, outside))


def test_a_record_counts_bytes_and_examples(build, store):
    """Down: own rows of table and offset, and the frozen base. Up: keys, and the update of what is not frozen."""
    _, (record,) = finish(simulate(build, store))
    own = sum(len(np.unique(store.examples(k)["item"])) for k in range(5))
    assert record.bytes_down == 4 * own * (DIM + 1) + 5 * 4
    assert record.bytes_up == 4 * own * (DIM + 1) + 4 * own
    assert record.examples == sum(COUNTS)
    assert record.round == 1
    assert record.seconds >= 0


@pytest.mark.parametrize("where", ["resident", "staged", "cut tables"])
def test_serving_costs_the_same_in_the_plain_loop(build, store, monkeypatch, where):
    if where == "staged":
        monkeypatch.setattr(loop, "RESIDENT_BYTES", 0)
    if where == "cut tables":
        monkeypatch.setattr(Simulation, "_whole_tables", lambda self: False)
    _, told = finish(simulate(build, store, Recruiting(3), rounds_per_call=2), 3)
    _, expected = finish(_plain(build, store, Recruiting(3)), 3)
    for record, other in zip(told, expected, strict=True):
        assert record.serving == other.serving
        assert (record.bytes_down, record.bytes_up) == (other.bytes_down, other.bytes_up)
        assert record.serving["on_demand"]["clients"] == 3


def test_where_nothing_is_keyed_nothing_is_told_of_serving(model, store):
    parts = partition(model, {"user": local()})
    shared_only = lambda rates: fed_recon(
        model,
        parts,
        split=split.halves(),
        reconstruct=reconstruct.skip(),
        update=update.by_steps(Batches(4), rates["update"]),
        optimizer=optimizers.Sgd(rates["server"]).on_server(),
    )
    for make in (simulate, _plain):
        _, (record,) = finish(make(shared_only, store))
        assert record.serving == {}
        assert record.bytes_down == record.bytes_up == 5 * 4 * (NUM_ITEMS * (DIM + 1) + 1)


def test_recruiting_shows_in_the_records(build, make_ratings):
    """Over-selection, dropout and small clients, as `recruit` says, in the compiled and the plain loop."""
    store = make_ratings([1, 8, 2, 8, 7, 1, 6, 5, 6, 8], NUM_ITEMS, seed=3, distinct=4)
    recruiting = Recruiting(4, over_selection=2, dropout=0.3, min_examples=4)
    compiled, told = finish(simulate(build, store, recruiting, rounds_per_call=3), 3)
    plain, expected = finish(_plain(build, store, recruiting), 3)
    for path in plain:
        np.testing.assert_allclose(compiled[path], plain[path], rtol=1e-5, atol=1e-6)
    for number, (record, other) in enumerate(zip(told, expected, strict=True)):
        cohort = recruit(recruiting, store.counts, 1, number)
        assert (record.dropped, record.too_small) == (cohort.dropped, cohort.too_small)
        assert record.clients == other.clients == len(cohort.clients)
        assert record.examples == store.counts[cohort.clients].sum()
    assert sum(record.dropped for record in told) > 0
    assert sum(record.too_small for record in told) > 0


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "staged"])
def test_a_round_without_anybody_changes_nothing(build, store, monkeypatch, resident):
    if not resident:
        monkeypatch.setattr(loop, "RESIDENT_BYTES", 0)
    simulation = simulate(build, store, Recruiting(3, min_examples=1000))
    before = {path: np.array(leaf) for path, leaf in simulation.state.params.items()}
    after, (record,) = finish(simulation)
    assert (record.clients, record.examples, record.too_small) == (0, 0, 3)
    assert np.isnan(record.loss)
    for path in before:
        np.testing.assert_array_equal(after[path], before[path])


@pytest.fixture(scope="module")
def varying(build, store):
    """Parameters and records of six rounds of the plain loop, and how their cohorts are drawn: the first has
    nobody in it, the last four."""
    recruiting = Recruiting(2, sampling=poisson())
    sizes = [len(recruit(recruiting, store.counts, 34, t).clients) for t in range(6)]
    assert sizes == [0, 3, 1, 1, 1, 4]
    return *finish(PlainSimulation(build, RATES, store, recruiting, seed=34), 6), recruiting


@pytest.mark.parametrize("where", ["resident", "staged"])
def test_poisson_cohorts_are_those_of_the_plain_loop(build, store, varying, monkeypatch, where):
    """To the last bit the same whether there is room for the largest from the start, or once it comes."""
    room = {"resident": 3, "staged": 5}[where]
    monkeypatch.setattr(Recruiting, "room", lambda *_: room)
    monkeypatch.setattr(loop, "RESIDENT_BYTES", {"resident": loop.RESIDENT_BYTES, "staged": 0}[where])
    plain, expected, recruiting = varying
    simulation = simulate(build, store, recruiting, seed=34, rounds_per_call=2, lanes=2)
    compiled, told = finish(simulation, 6)
    simulation.restart(34)
    again, _ = finish(simulation, 6)
    what = lambda record: (record.clients, record.examples, record.bytes_up, record.serving)
    assert list(map(what, told)) == list(map(what, expected))
    assert (told[0].clients, told[0].examples) == (0, 0)
    np.testing.assert_allclose([r.loss for r in told], [r.loss for r in expected], rtol=1e-5)
    for path, leaf in plain.items():
        np.testing.assert_allclose(compiled[path], leaf, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(again[path], compiled[path])


def test_a_cohort_larger_than_the_population_is_refused(build, store):
    with pytest.raises(
        UserError, match=r"6 clients are to be asked every round, but the population has only 5"
    ):
        simulate(build, store, Recruiting(6))
    with pytest.raises(UserError, match="Use --cohort 3 or fewer"):
        simulate(build, store, Recruiting(4, over_selection=1.5))


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_keys_may_be_whole_numbers_of_any_width(make_ratings, biased_model, kind):
    """A narrow column must not limit the table it points into."""
    model = biased_model(300, DIM)
    parts = partition(model, {"user": local(), "item/*": keyed("item"), "base": frozen()})
    wide = lambda rates: fed_recon(
        model,
        parts,
        split=split.none(),
        reconstruct=reconstruct.skip(),
        update=update.by_steps(Batches(8), rates["update"]),
        optimizer=optimizers.Adam(rates["server"]).on_server(),
    )
    store = make_ratings([5, 5], 120, seed=1, distinct=4)
    narrow = type(store)(
        {**store.columns, "item": store.columns["item"].astype(kind)},
        store.starts,
        store.counts,
        store.client_ids,
    )
    found, _ = finish(simulate(wide, narrow, lanes=1))
    expected, _ = finish(_plain(wide, store))
    np.testing.assert_allclose(found["item/table"], expected["item/table"], rtol=1e-4, atol=1e-5)


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(UserError, match="devices"):
        make_mesh(len(jax.devices()) + 1)


def test_no_rounds_is_no_work(build, store):
    simulation = simulate(build, store)
    assert list(simulation.run(0)) == []
    assert simulation.round == 0


def test_a_run_that_is_interrupted_while_it_waits_goes_on_without_a_round_twice(build, store, monkeypatch):
    """The state of the call is there when the wait begins, so its round must be too."""
    make = lambda: Simulation(build, RATES, store, Recruiting(3), seed=1, lanes=2, rounds_per_call=2)
    whole, broken = make(), make()
    list(whole.run(6))

    def interrupt(*given):
        raise KeyboardInterrupt

    calls = broken.run(6)
    assert next(calls)[-1].round == 2
    with monkeypatch.context() as patch:
        patch.setattr(loop, "to_host", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(calls)
    assert broken.round == 4
    list(broken.run(2))
    for path, leaf in whole.state.params.items():
        np.testing.assert_array_equal(broken.state.params[path], leaf)


@pytest.mark.parametrize(
    ("device", "memory", "resident"), [("cpu", 1 << 40, False), ("gpu", 1 << 40, True), ("gpu", 8, False)]
)
def test_more_data_stays_on_an_accelerator(store, monkeypatch, device, memory, resident):
    monkeypatch.setattr(loop, "RESIDENT_BYTES", 0)
    monkeypatch.setattr(loop.jax, "default_backend", lambda: device)
    monkeypatch.setattr(loop, "device_memory", lambda: memory)
    assert loop.fits(store) == resident
    monkeypatch.setattr(loop, "num_processes", lambda: 2)
    assert not loop.fits(store)  # each should read its own clients
