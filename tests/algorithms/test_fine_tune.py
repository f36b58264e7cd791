"""Steps before a client is judged: by hand, one client after the other, and with none of them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithm import init_params
from partwise.algorithms.fed_recon import fed_recon
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.device import Device
from partwise.model.partition import keyed, local, partition
from partwise.randomness import EVALUATION_ROUND, child, client_numbers, client_rng, round_rng, words
from partwise.server.messages import send
from partwise.simulation.evaluator import Evaluator
from partwise.tasks.matrix_factorization import matrix_factorization

NUM_ITEMS, DIM, SEED = 9, 3, 4
COUNTS = [11, 1, 6]  # support sets of 6, 1 and 3 examples
RATES = {"reconstruct": 0.2, "fine_tune": 0.3}


@pytest.fixture(scope="module")
def model():
    return matrix_factorization(NUM_ITEMS, DIM, scale=0.5)


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings(COUNTS, NUM_ITEMS, seed=3, ids=[41, 7, 260], distinct=4)


def builder(model, item=None, schedule=None, joint=False):
    """FedRecon that is judged after so many steps on the support set; None: after none."""
    parts = partition(model, {"user": local(), **({} if item is None else {"item": item})})

    def build(rates):
        tune = update.by_steps(schedule, rates["fine_tune"], joint) if schedule else None
        return fed_recon(
            model,
            parts,
            split=split.halves(50),
            reconstruct=reconstruct.by_steps(Batches(4, 2), rates["reconstruct"]),
            update=update.by_steps(Batches(3), 0.1),
            optimizer=optimizers.Sgd(1.0).on_server(),
            fine_tune=tune,
        )

    return build


def judged(build, store, rates=RATES):
    """Squared errors [clients] of the query sets, and the parameters they are judged with."""
    params = init_params(build(rates), jax.random.key(1))
    return Evaluator(build, rates, store, seed=SEED).sums(params)["rmse"], params


def by_hand(model, store, item, position, steps, joint):
    """The squared errors of a client after R and so many steps of two examples, on its support set."""
    columns = store.examples(position)
    items, ratings = columns["item"], columns["rating"].astype(np.float64)
    number = words(client_numbers(store.client_ids)[position])
    rng = client_rng(round_rng(SEED, EVALUATION_ROUND), number)
    user, item = np.array(model.init(child(rng, "init"))["user"], np.float64), np.array(item, np.float64)
    half = -(-len(items) // 2)
    cut = lambda size: [np.arange(i, min(i + size, half)) for i in range(0, half, size)]
    for batch in cut(4) * 2:
        errors = item[items[batch]] @ user - ratings[batch]
        user = user - RATES["reconstruct"] * 2 * errors @ item[items[batch]] / len(batch)
    for batch in (cut(2) * steps)[:steps]:
        rows = item[items[batch]]
        errors = rows @ user - ratings[batch]
        slope = np.zeros_like(item)
        np.add.at(slope, items[batch], 2 * np.outer(errors, user) / len(batch))
        if joint:
            user = user - RATES["fine_tune"] * 2 * errors @ rows / len(batch)
        item = item - RATES["fine_tune"] * slope
    query = np.arange(half, len(items))
    return np.square(item[items[query]] @ user - ratings[query]).sum(), len(query)


@pytest.mark.parametrize("joint", [False, True], ids=["rest", "joint"])
@pytest.mark.parametrize("item", [None, keyed("item")], ids=["shared", "keyed"])
def test_by_hand(model, store, item, joint):
    """R on the support set, then 4 steps on shared or keyed parts there (with the local one, if joint), metrics on
    the query set; the second client has none."""
    build = builder(model, item, Batches(2, None, 4), joint)
    found, params = judged(build, store)
    expected = [by_hand(model, store, params["item"], k, 4, joint) for k in range(3)]
    np.testing.assert_array_equal(found.weight, [5, 0, 3])
    np.testing.assert_allclose(found.value, [value for value, _ in expected], rtol=1e-4)
    plain = [by_hand(model, store, params["item"], k, 0, False)[0] for k in range(3)]
    assert np.abs(found.value - plain)[[0, 2]].min() > 1e-3


def test_no_steps_change_nothing(model, store):
    item = keyed("item")
    expected, params = judged(builder(model, item), store)
    for schedule in (Batches(2, 5, 0), Batches(2, 0)):
        found, _ = judged(builder(model, item, schedule), store)
        np.testing.assert_allclose(found.value, expected.value, rtol=1e-6)
    at_zero, _ = judged(builder(model, item, Batches(2, 5)), store, {**RATES, "fine_tune": 0.0})
    np.testing.assert_allclose(at_zero.value, expected.value, rtol=1e-6)
    hand = [by_hand(model, store, params["item"], k, 0, False)[0] for k in range(3)]
    np.testing.assert_allclose(expected.value, hand, rtol=1e-4)


@pytest.mark.parametrize("joint", [False, True], ids=["rest", "joint"])
def test_all_clients_at_once_equal_one_after_the_other(model, store, joint):
    build = builder(model, keyed("item"), Batches(2, 3), joint)
    found, params = judged(build, store)
    algorithm = build(RATES)
    device, rng = Device(algorithm), round_rng(SEED, EVALUATION_ROUND)
    for position in range(3):
        mine = store.gather([position])
        message = send(algorithm.partition, params, device.ask(mine).keys, rng)
        alone = device.evaluate(message, mine)["rmse"]
        np.testing.assert_allclose(found.value[position], alone.value, rtol=1e-5)
        assert found.weight[position] == alone.weight
