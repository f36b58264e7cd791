"""Federated Submodel Averaging: the mean over the cohort times N / n_m, by hand and by its properties."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.fed_sub_avg import fed_sub_avg
from partwise.client.batches import Batches
from partwise.client.update import by_steps
from partwise.data.heat import Heat
from partwise.data.heat_estimate import Seen
from partwise.metrics import zero_sums
from partwise.model.partition import partition
from partwise.selection.key_heat import count_heats
from partwise.server.cohort import Recruiting
from partwise.server.heat_mean import estimated_sub_mean, sub_mean
from partwise.server.mean import by_examples, mean, uniform
from partwise.server.total import Report, add, zero_total
from partwise.simulation.loop import Simulation
from partwise.testing import check_algorithm
from partwise.types import UserError

RATES = {"update": 0.1, "server": 1.0}
HOLDERS = [5, 2, 1, 1, 1]  # of the five items, among five clients


def make(model, parts, aggregator=None, optimizer=optimizers.Sgd):
    return lambda rates: fed_avg(
        model,
        parts,
        update=by_steps(Batches(2), rates["update"]),
        optimizer=optimizer(rates["server"]).on_server(),
        aggregator=aggregator,
    )


def after(build, store, size, rounds=1, **options):
    simulation = Simulation(build, RATES, store, Recruiting(size), seed=1, **options)
    records = [record for call in simulation.run(rounds) for record in call]
    return {path: np.array(leaf) for path, leaf in simulation.state.params.items()}, records, simulation


@pytest.fixture(scope="module")
def heats(sparse_store, sparse_parts):
    return count_heats(sparse_store, sparse_parts)


def test_a_round_of_three_clients_by_hand(make_store, sparse_model, sparse_parts):
    """One step each: client 0 has item 0, client 1 items 0 and 1, client 2 item 0; N = 3, n = (3, 1)."""
    store = make_store([1, 2, 1], item=[0, 0, 1, 0], y=np.array([1, 2, 0, -1], np.float32))
    heats = {"item": Heat("item", np.array([3, 1, 0, 0, 0]), 3)}
    build = lambda rates: fed_sub_avg(
        sparse_model,
        sparse_parts,
        update=by_steps(Batches(2), rates["update"]),
        optimizer=optimizers.Sgd(rates["server"]).on_server(),
        heats=heats,
    )
    found, _, _ = after(build, store, 3)
    table = np.linspace(-1, 1, 10).reshape(5, 2)
    score = 0.5 + table.sum(1)
    # gradients of the mean squared error: 2 (score - y) for one example, half of that each for two
    pull = {0: [score[0] - 1, score[0] + 1, (score[0] - 2) / 2], 1: [(score[1] - 0) / 2]}
    step = {row: [-0.1 * 2 * g for g in each] for row, each in pull.items()}
    expected = table.copy()
    expected[0] += sum(step[0]) / 3 * (3 / 3)
    expected[1] += sum(step[1]) / 3 * (3 / 1)
    np.testing.assert_allclose(found["table"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["bias"], 0.5 + (sum(step[0]) + sum(step[1])) / 3, rtol=1e-5)


def test_heat_that_all_hold_changes_nothing(make_store, sparse_model, sparse_parts):
    store = make_store([5, 5], item=[*range(5)] * 2, y=np.arange(10.0, dtype=np.float32))
    corrected = sub_mean(count_heats(store, sparse_parts))
    plain, fixed = (
        after(make(sparse_model, sparse_parts, a), store, 2)[0] for a in (mean(uniform), corrected)
    )
    for path, leaf in plain.items():
        np.testing.assert_array_equal(fixed[path], leaf)


def test_the_expected_update_of_a_row_is_the_mean_over_its_holders(sparse_model, sparse_parts, heats):
    """Over all cohorts of K of the five clients; whatever the clients' updates are (section 3.2)."""
    rng, aggregator = np.random.default_rng(0), sub_mean(heats)
    rows = [[0, 1], [0, 2], [0, 1, 3], [0], [0, 4]]
    updates = [rng.normal(size=(len(each), 2)).astype(np.float32) for each in rows]
    params = {"bias": jnp.zeros(()), "table": jnp.zeros((5, 2))}
    carried = aggregator.init(sparse_parts)
    for size in (1, 2, 4):
        means = []
        for cohort in itertools.combinations(range(5), size):
            total = zero_total(aggregator, sparse_parts, params)
            for i in cohort:
                report = Report({"bias": jnp.ones(()), "table": updates[i]}, jnp.asarray(3.0), zero_sums())
                sent = aggregator.encode(report, jax.random.key(i))
                total = add(sparse_parts, total, sent, {"item": jnp.array(rows[i])})
            means.append(aggregator.decode(sparse_parts, total, carried, jax.random.key(0))[0]["table"])
        for row in range(5):
            holders = [updates[i][each.index(row)] for i, each in enumerate(rows) if row in each]
            assert len(holders) == HOLDERS[row]
            np.testing.assert_allclose(np.mean(means, axis=0)[row], np.mean(holders, axis=0), rtol=1e-4)


@pytest.mark.parametrize("weigh", [uniform, by_examples])
@pytest.mark.parametrize("kind", ["counted", "seen"])
def test_lanes_equal_the_plain_loop(sparse_model, sparse_parts, sparse_store, weigh, kind):
    by = "clients" if weigh is uniform else "samples"
    counted = lambda: sub_mean(count_heats(sparse_store, sparse_parts, by), weigh, cap=4.0)
    aggregator = counted() if kind == "counted" else estimated_sub_mean(("item",), weigh)
    check_algorithm(make(sparse_model, sparse_parts, aggregator), RATES, sparse_store, cohort=3, lanes=(2,))


@pytest.mark.parametrize("kind", ["counted", "seen"])
def test_cut_tables_carry_the_rows_of_heat_along(
    sparse_model, sparse_parts, sparse_store, heats, kind, monkeypatch
):
    aggregator = sub_mean(heats) if kind == "counted" else estimated_sub_mean(("item",))
    build = make(sparse_model, sparse_parts, aggregator, optimizers.Adagrad)
    whole, _, first = after(build, sparse_store, 2, rounds=3)
    monkeypatch.setattr("partwise.simulation.loop.RESIDENT_BYTES", 0)
    monkeypatch.setattr(Simulation, "_whole_tables", lambda self: False)
    cut, _, second = after(build, sparse_store, 2, rounds=3, rounds_per_call=2)
    for path, leaf in whole.items():
        np.testing.assert_allclose(cut[path], leaf, rtol=1e-5, atol=1e-6)
    for name, words in first.state.aggregator.items():
        for word, leaf in words.items():
            np.testing.assert_allclose(second.state.aggregator[name][word], leaf, rtol=1e-6)


def test_what_cohorts_show_is_counted(sparse_model, sparse_parts, sparse_store):
    build = make(sparse_model, sparse_parts, estimated_sub_mean(("item",)))
    _, records, simulation = after(build, sparse_store, 5, rounds=4)
    carried = simulation.state.aggregator
    assert float(carried["seen"]["weight"]) == sum(record.clients for record in records) == 20
    np.testing.assert_array_equal(carried["holders"]["item"], 4 * np.array(HOLDERS))


def test_an_estimate_from_all_clients_is_near_the_count(sparse_model, sparse_parts, sparse_store, heats):
    """The first round of everyone: each share is (n + 1/2) / (N + 1) instead of n / N."""
    counted = make(sparse_model, sparse_parts, sub_mean(heats))
    seen = make(sparse_model, sparse_parts, estimated_sub_mean(("item",)))
    start = np.linspace(-1, 1, 10).reshape(5, 2)
    exact, near = (after(build, sparse_store, 5)[0]["table"] - start for build in (counted, seen))
    share = Seen(np.array(HOLDERS), 5).share()[:, None]
    np.testing.assert_allclose(near, exact * np.array(HOLDERS)[:, None] / 5 / share, rtol=1e-4)


@pytest.mark.parametrize(
    ("heats", "message"),
    [
        ({"itme": Heat("itme", np.ones(5, int), 5)}, "unknown key space of heat 'itme'.*nearest: item"),
        ({"item": Heat("item", np.ones(4, int), 5)}, "4.*5"),
    ],
)
def test_heat_that_does_not_fit_is_refused(sparse_parts, heats, message):
    with pytest.raises(UserError, match=message):
        sub_mean(heats).init(sparse_parts)


def test_a_model_without_keys_has_no_heat(sparse_model):
    bare = partition(sparse_model, {})
    with pytest.raises(UserError, match="has none"):
        fed_sub_avg(
            sparse_model,
            bare,
            update=by_steps(Batches(2), 0.1),
            optimizer=optimizers.Sgd(1.0).on_server(),
            heats=None,
        )
