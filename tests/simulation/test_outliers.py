"""Updates that are out of all proportion to the others: found, named and told, whatever runs the rounds."""

from __future__ import annotations

import math

import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise import optimizers
from partwise.algorithms.fed_avg import fed_avg
from partwise.client import update
from partwise.client.batches import Batches
from partwise.model.partition import keyed, partition
from partwise.server.cohort import Recruiting
from partwise.server.mean import mean, uniform
from partwise.server.private_sum import Door, private
from partwise.server.update_sizes import outlying, spread_of, usual
from partwise.simulation.loop import Simulation
from partwise.simulation.many_runs import Sweep
from partwise.simulation.plain import PlainSimulation
from partwise.types import DivergedError

NUM_ITEMS, COUNTS = 12, [6, 7, 8, 5, 8]
IDS = ["ann", "bob", "cat", "dan", "eve"]
RATES = {"update": 1e-6, "server": 0.5}


@pytest.fixture(scope="module")
def parts(biased_model):
    model = biased_model(NUM_ITEMS, 2)
    return model, partition(model, {"item/*": keyed("item")})


def builder(parts, optimizer=optimizers.Sgd, aggregator=None):
    return lambda rates: fed_avg(
        *parts,
        update=update.by_steps(Batches(4), rates["update"]),
        optimizer=optimizer(rates["server"]).on_server(),
        aggregator=aggregator or mean(),
    )


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings(COUNTS, NUM_ITEMS, seed=6, ids=IDS, distinct=4)


def enlarged(store, position, times):
    """The same store with this client's ratings so many times as large; so is its update, nearly."""
    rating = store.columns["rating"].copy()
    start = store.starts[position]
    rating[start : start + store.counts[position]] *= times
    return type(store)({**store.columns, "rating": rating}, store.starts, store.counts, store.client_ids)


def compiled(build, store, **settings):
    settings = {"seed": 1, "lanes": 3, "num_devices": 1, "rounds_per_call": 2} | settings
    return Simulation(build, RATES, store, Recruiting(store.num_clients), **settings)


def plain(build, store, rates=RATES):
    return PlainSimulation(build, rates, store, Recruiting(store.num_clients), seed=1)


class OneOfSweep:
    """The first of two runs side by side."""

    def __init__(self, build, store):
        self._runs = Sweep(build, [RATES, RATES], [1, 2], store, Recruiting(store.num_clients), lanes=2)

    def run(self, rounds):
        return (by_run[0] for by_run in self._runs.run(rounds))


def recorded(simulation, rounds=2):
    return [record for call in simulation.run(rounds) for record in call]


WAYS = {
    "lanes": compiled,
    "one lane": lambda build, store: compiled(build, store, lanes=1),
    "two devices": lambda build, store: compiled(build, store, num_devices=2),
    "sweep": OneOfSweep,
}


@pytest.mark.parametrize("times", [1, 1e6])
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_to_run_rounds_find_the_same_norms_and_outliers(parts, store, way, times):
    build, data = builder(parts), enlarged(store, 3, times)
    found, expected = recorded(WAYS[way](build, data)), recorded(plain(build, data))
    for record, wanted in zip(found, expected, strict=True):
        assert record.norms == pytest.approx(wanted.norms, rel=1e-4)
        assert record.outliers == wanted.outliers == (("dan",) if times > 1 else ())


def test_norms_are_those_of_each_clients_own_update(parts, store):
    """With a cohort of one, the server's step is the client's update, times the rate."""
    rates = RATES | {"update": 0.01}  # large enough to be seen in parameters
    (record,) = recorded(plain(builder(parts), store, rates), 1)
    alone = []
    for position in range(len(IDS)):
        simulation = plain(builder(parts), store.take(np.array([position])), rates)
        before = {path: np.array(leaf) for path, leaf in simulation.state.params.items()}
        recorded(simulation, 1)
        moved = [np.array(leaf) - before[path] for path, leaf in simulation.state.params.items()]
        alone.append(math.sqrt(sum(float(np.sum(each**2)) for each in moved)) / RATES["server"])
    wanted = spread_of(np.array(alone))
    assert wanted is not None
    assert record.norms == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("make", [compiled, plain])
def test_an_update_whose_squares_are_too_large_counts_as_not_finite(parts, store, make):
    (first, _) = recorded(make(builder(parts), enlarged(store, 3, 1e30)))
    assert (first.broken, first.clients, first.outliers) == (("dan",), 4, ())


@pytest.mark.parametrize("make", [compiled, plain])
def test_with_privacy_no_norm_is_recorded(parts, store, make):
    build = builder(parts, aggregator=private(mean(uniform), Door(1e30, 0.0, 1.0)))
    for record in recorded(make(build, enlarged(store, 3, 1e6))):
        assert (record.norms, record.outliers) == (None, ())


@pytest.mark.parametrize("make", [compiled, plain])
def test_an_optimizer_state_that_is_not_finite_ends_the_run(parts, store, make):
    """Adagrad would divide by infinity from then on: finite parameters that never move again."""

    class Full(optimizers.Adagrad):
        def transform(self, learning_rate):
            return optax.adagrad(learning_rate, 3.4e38, 1e-3)

    data = enlarged(store, 3, 3e22)  # an update of about 1e17, whose squares fill what is left
    with pytest.raises(DivergedError, match=r"optimizer state is no longer finite after round 1.*'?dan"):
        recorded(make(builder(parts, Full), data))


norms = st.lists(st.just(0.0) | st.floats(1e-9, 1e9), min_size=1, max_size=30).map(np.array)


@given(norms, st.floats(1e-3, 1e3), st.randoms(use_true_random=False))
def test_outliers_depend_on_neither_unit_nor_order(sizes, unit, random):
    order = np.array(random.sample(range(len(sizes)), len(sizes)))
    at_the_edge = np.isclose(sizes, 100 * usual(sizes))
    np.testing.assert_array_equal(outlying(sizes)[order], outlying(sizes[order]))
    same = outlying(sizes) == outlying(sizes * unit)
    assert (same | at_the_edge).all()


@given(norms)
def test_no_more_than_half_are_outliers(sizes):
    """Of those that are not zero; and none if all are alike."""
    assert 2 * outlying(sizes).sum() <= (sizes > 0).sum()
    assert not outlying(np.full(5, sizes[0])).any()


def test_one_of_two_can_be_an_outlier_but_not_what_was_usual_before():
    assert outlying(np.array([1.0, 1e6])).tolist() == [False, True]
    assert not outlying(np.array([1.0, 1e6]), earlier=2e4).any()
    assert not outlying(np.array([1e6])).any()
    assert not outlying(np.zeros(3)).any()
