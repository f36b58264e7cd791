"""Metrics of pooled scores and labels: many clients at once equal one after the other, and a run survives them."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from partwise import Setting, Task, optimizers, train
from partwise.algorithm import init_params
from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.fed_recon import fed_recon
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.data import by_client
from partwise.device import Device, ask
from partwise.metrics import area_under_curve
from partwise.model.partition import keyed, local, partition
from partwise.model.spec import auc
from partwise.randomness import EVALUATION_ROUND, round_rng
from partwise.server.messages import send
from partwise.simulation import evaluator as evaluate
from partwise.simulation.evaluator import Evaluator
from partwise.tasks.matrix_factorization import matrix_factorization

NUM_ITEMS, SEED = 30, 4
COUNTS = [7, 0, 100, 6, 70, 8]  # two take several batches of 64


def ranked(num_users=None):
    model = matrix_factorization(NUM_ITEMS, 3, num_users, scale=1.0)
    return model._replace(metrics={"auc": auc("liked"), **model.metrics})


def reconstructing(rates):
    model = ranked()
    return fed_recon(
        model,
        partition(model, {"user": local(), "item": keyed("item")}),
        split=split.alternate(2),
        reconstruct=reconstruct.by_steps(Batches(3, 2), 0.1),
        update=update.by_steps(Batches(3), 0.1),
        optimizer=optimizers.Sgd(1.0).on_server(),
    )


def averaging(rates):
    model = ranked(len(COUNTS))
    parts = partition(model, {"user": keyed("user"), "item": keyed("item")})
    return fed_avg(
        model, parts, update=update.by_steps(Batches(3), 0.1), optimizer=optimizers.Sgd(1.0).on_server()
    )


@pytest.fixture(scope="module")
def store(make_ratings):
    ratings = make_ratings(COUNTS, NUM_ITEMS, seed=9, distinct=8)
    return ratings.with_columns(liked=(ratings.columns["rating"] >= 4).astype(np.int32))


def one_by_one(build, store, params):
    """The pairs of a loop over clients, each as the plain path gives them."""
    algorithm = build({})
    device, rng = Device(algorithm), round_rng(SEED, EVALUATION_ROUND)
    pairs = []
    for position in range(store.num_clients):
        examples = store.gather([position])
        asked = ask(algorithm.partition, algorithm.choose, examples)
        found = device.evaluate(send(algorithm.partition, params, asked.keys, rng), examples)["auc"]
        pairs.append([np.asarray(part)[np.asarray(found.held)] for part in found])
    return [np.concatenate(parts) for parts in zip(*pairs, strict=True)]


@pytest.mark.parametrize(
    ("build", "columns", "evaluated"),
    [
        (reconstructing, ("item", "rating", "liked"), 3 + 0 + 50 + 2 + 34 + 4),  # the query sets
        (averaging, ("item", "rating", "liked", "user"), sum(COUNTS)),
    ],
)
def test_all_clients_at_once_equal_a_loop(build, columns, evaluated, store, monkeypatch):
    monkeypatch.setattr(evaluate, "CLIENTS_PER_CALL", 4)  # in two calls
    store = store.select(columns)
    params = init_params(build({}), jax.random.key(1))
    scores, labels, _ = one_by_one(build, store, params)
    evaluator = Evaluator(build, {}, store, seed=SEED)
    _, pairs = evaluator.measure(params)
    assert len(scores) == len(pairs["auc"].scores) == evaluated
    found = np.lexsort((pairs["auc"].scores, pairs["auc"].labels))
    order = np.lexsort((scores, labels))
    np.testing.assert_array_equal(pairs["auc"].labels[found], labels[order])
    np.testing.assert_allclose(pairs["auc"].scores[found], scores[order], rtol=1e-4, atol=1e-5)
    told = evaluator(params)
    assert told["auc"] == pytest.approx(area_under_curve(scores, labels), abs=1e-3)
    assert list(told)[:4] == ["auc", "rmse", "accuracy", "loss"]
    assert told["over_clients"]["auc"] == {"clients": told["clients"]}


def test_other_clients_need_no_other_program_if_they_were_named(store):
    store = store.select(("item", "rating", "liked"))
    small = store.take(np.arange(2))
    params = init_params(reconstructing({}), jax.random.key(1))
    first = Evaluator(reconstructing, {}, small, seed=SEED, others=[store])
    first(params)
    expected = Evaluator(reconstructing, {}, store, seed=SEED)(params)["auc"]
    assert first.of(store)(params)["auc"] == pytest.approx(expected, abs=1e-3)
    assert first._program._cache_size() <= 1
    unnamed = Evaluator(reconstructing, {}, small, seed=SEED)
    assert unnamed.of(store)(params)["auc"] == pytest.approx(expected, abs=1e-3)


def test_a_run_whose_test_labels_are_all_alike_says_so_and_ends_well(make_ratings, tmp_path):
    ratings = make_ratings([6] * 30, NUM_ITEMS, seed=2)
    parts = by_client(ratings.with_columns(liked=np.ones(ratings.num_examples, np.int32)))
    model = ranked()
    roles = partition(model, {"user": local(), "item": keyed("item")})
    task = Task("mine", *parts, personal=Setting(model, roles, ("item", "rating", "liked")))
    run = train(task, rounds=2, cohort__size=5, simulation__lanes=2, out=tmp_path / "run")
    assert run.test["auc"] is None
    assert "labels are positive" in run.test["undefined"]["auc"]
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert told["test"]["auc"] is None
    assert told["test"]["undefined"] == run.test["undefined"]
    assert told["not_finite"] == []
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["evaluation"]["auc"] is None
    assert "labels are positive" in record["evaluation"]["undefined"]["auc"]


def test_an_undefined_metric_is_a_dash_and_a_sentence(capsys):
    from partwise.cli import progress, show

    reason = "all 3 labels are positive, and both kinds are needed"
    told = {
        "auc": None,
        "loss": 0.5,
        "over_clients": {"auc": {"clients": 2}, "loss": {"clients": 2, "mean": 0.5}},
        "clients": 2,
        "clients_without_examples": 0,
        "judged": {"clients": "seen", "local": "none", "others": "as trained", "weights": "examples"},
    }
    show.evaluation(told | {"undefined": {"auc": reason}}, "run")
    text = capsys.readouterr().out
    assert f"auc has no value for these clients: {reason}." in text
    assert "Evaluated on seen clients. Parameters: as trained." in text
    assert progress._metric(told) == "validation auc undefined"
    assert progress._metric(told | {"auc": 0.75}) == "validation auc 0.7500"
