"""Evaluation of many clients at once equals one client after the other."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithm import init_params
from partwise.algorithms.fed_recon import fed_recon
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.device import Device, ask
from partwise.metrics import PERCENTILES
from partwise.model.partition import keyed, local, partition
from partwise.model.spec import Metric
from partwise.randomness import EVALUATION_ROUND, round_rng
from partwise.server.messages import send
from partwise.simulation import evaluator as evaluate
from partwise.simulation.evaluator import Evaluator
from partwise.tasks.matrix_factorization import matrix_factorization

NUM_ITEMS, DIM, SEED = 30, 3, 4
COUNTS = [7, 0, 1, 12, 6, 14, 1, 9]


@pytest.fixture(scope="module")
def build():
    model = matrix_factorization(NUM_ITEMS, DIM, scale=1.0)
    parts = partition(model, {"user": local(), "item": keyed("item")})
    return lambda rates: fed_recon(
        model,
        parts,
        split=split.alternate(2),
        reconstruct=reconstruct.by_steps(Batches(3, 2), rates["recon"]),
        update=update.by_steps(Batches(3), 0.1),
        optimizer=optimizers.Sgd(1.0).on_server(),
    )


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings(COUNTS, NUM_ITEMS, seed=9, distinct=5)


@pytest.fixture(scope="module")
def params(build):
    return init_params(build({"recon": 0.1}), jax.random.key(1))


@pytest.fixture(scope="module")
def one_by_one(build, store, params):
    """{metric: (values [clients], weights [clients])} of a loop over clients."""
    algorithm = build({"recon": 0.1})
    device, rng = Device(algorithm), round_rng(SEED, EVALUATION_ROUND)
    sums = []
    for position in range(store.num_clients):
        examples = store.gather([position])
        message = send(
            algorithm.partition, params, ask(algorithm.partition, algorithm.choose, examples).keys, rng
        )
        sums.append(device.evaluate(message, examples))
    return {
        name: (
            np.array([float(s[name].value) for s in sums]),
            np.array([float(s[name].weight) for s in sums]),
        )
        for name in sums[0]
    }


@pytest.fixture(scope="module")
def evaluator(build, store):
    return Evaluator(build, {"recon": 0.1}, store, seed=SEED)


def test_all_clients_at_once_equal_a_loop_over_them(evaluator, params, one_by_one):
    found = evaluator.sums(params)
    assert found.keys() == one_by_one.keys() == {"loss", "rmse", "accuracy"}
    for name, (values, weights) in one_by_one.items():
        np.testing.assert_allclose(found[name].value, values, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found[name].weight, weights)
    assert weights.tolist() == [3, 0, 0, 6, 2, 6, 0, 4]


def test_clients_in_several_calls_are_the_same(build, store, params, one_by_one, monkeypatch):
    monkeypatch.setattr(evaluate, "CLIENTS_PER_CALL", 3)
    evaluator = Evaluator(build, {"recon": 0.1}, store, seed=SEED)
    for _ in range(2):
        found = evaluator.sums(params)
        np.testing.assert_allclose(found["rmse"].value, one_by_one["rmse"][0], rtol=1e-5, atol=1e-6)
    mixed = [6, 1, 4, 0, 7, 3, 5, 2]
    found = evaluator.of(store.take(mixed)).sums(params)
    np.testing.assert_allclose(found["rmse"].value, one_by_one["rmse"][0][mixed], rtol=1e-5, atol=1e-6)


def test_the_summary_is_pooled_over_examples_and_spread_over_clients(evaluator, params, one_by_one):
    told = evaluator(params)
    values, weights = one_by_one["rmse"]
    held = weights > 0
    each = np.sqrt(values[held] / weights[held])
    assert told["rmse"] == pytest.approx(np.sqrt(values.sum() / weights.sum()), rel=1e-5)
    correct, _ = one_by_one["accuracy"]
    assert told["accuracy"] == pytest.approx(correct.sum() / weights.sum(), rel=1e-5)
    assert (told["clients"], told["clients_without_examples"]) == (5, 3)
    spread = told["over_clients"]["rmse"]
    assert spread["mean"] == pytest.approx(each.mean(), rel=1e-5)
    for p in PERCENTILES:
        assert spread[f"p{p}"] == pytest.approx(np.percentile(each, p), rel=1e-5)


def test_how_many_clients_are_counted_does_not_depend_on_the_order_of_metrics(build, store, params):
    """One metric weighs ratings above 4 alone, which few clients have; another weighs all."""
    rare = Metric(lambda outputs, batch: outputs, weight=lambda batch: (batch["rating"] > 4).astype("f4"))
    algorithm = build({"recon": 0.1})
    counts = []
    for names in (("rare", "rmse"), ("rmse", "rare")):
        metrics = {"rare": rare, **algorithm.model.metrics}
        model = algorithm.model._replace(metrics={name: metrics[name] for name in names})
        found = Evaluator(lambda rates, model=model: algorithm._replace(model=model), {}, store)(params)
        counts.append((found["clients"], found["clients_without_examples"]))
        assert found["over_clients"]["rare"]["clients"] < found["clients"]
    assert counts[0] == counts[1] == (5, 3)


def test_another_evaluation_does_not_compile_again(evaluator, params):
    evaluator(params)
    evaluator({path: leaf * 0.5 for path, leaf in params.items()})
    assert evaluator._program._cache_size() <= 1


def test_other_clients_are_evaluated_by_the_same_program(build, store, params, one_by_one):
    """Fewer clients, another number of examples: padded, not compiled again."""
    half = store.take(np.arange(4))
    first = Evaluator(build, {"recon": 0.1}, half, seed=SEED, others=[store])
    assert first.sums(params)["rmse"].value.shape == (4,)
    found = first.of(store).sums(params)
    np.testing.assert_allclose(found["rmse"].value, one_by_one["rmse"][0], rtol=1e-5, atol=1e-6)
    assert first._program._cache_size() <= 1
