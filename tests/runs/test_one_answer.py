"""One model, one answer: a client alone with `personalize` and `predict` gets what evaluation computed for it, the
compiled rounds what the plain loop does, for every task and whatever keys clients chose in training."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partwise as pw
from partwise.algorithm import init_params
from partwise.algorithms.registry import prepare
from partwise.client.split import everything
from partwise.config.parts import make_evaluation_split
from partwise.data import by_client, planted_ratings
from partwise.data.store import ClientStore
from partwise.model.spec import Pooled
from partwise.randomness import INIT_ROUND, round_rng
from partwise.runs.backends import make_evaluator
from partwise.runs.client_file import source_of
from partwise.runs.personal import Personal
from partwise.runs.resolve import resolve
from partwise.runs.train import train
from partwise.testing import check_algorithm

PLANTED = {
    "data.num_clients": 40,
    "data.num_items": 30,
    "data.mean_examples": 12,
    "data.dim": 4,
    "cohort.size": 6,
}
WORDS = {
    "data.num_clients": 20,
    "data.sentences": 8,
    "data.num_words": 30,
    "data.num_buckets": 4,
    "cohort.size": 4,
}
TAGS = {
    "data.num_clients": 30,
    "data.num_words": 120,
    "data.num_tags": 12,
    "data.mean_examples": 8,
    "cohort.size": 5,
}
DRAWN = {"data.num_clients": 20, "cohort.size": 4, "data.network": "2nn"}
KEYED = WORDS | {"data.words": "keyed"}
STEPS = {"reconstruct.method": "steps", "reconstruct.rate": 0.1, "reconstruct.pull": 0.1}

FAST = [
    ("planted", PLANTED | {"select.item": "top:3"}),
    ("planted", PLANTED | STEPS | {"select.item": "random:7"}),
    ("next-word-planted", KEYED),
    ("next-word-planted", KEYED | {"select.word": "top:5"}),
    ("tags-planted", TAGS | {"select.word": "top:20"}),
]
SLOW = [
    ("planted", PLANTED),
    ("planted", PLANTED | {"data.biases": "true", "select.item": "sample:4"}),
    ("planted", PLANTED | {"select.item": "all"}),
    ("planted", PLANTED | {"select.item": "top:9@0.5,2@0.5"}),
    ("next-word-planted", WORDS),
    ("next-word-planted", KEYED | {"select.word": "random:9"}),
    ("next-word-planted", KEYED | {"select.word": "all"}),
    ("next-word-planted", WORDS | {"data.words": "input"}),
    ("tags-planted", TAGS),
    ("tags-planted", TAGS | {"select.word": "random:30"}),
    ("writers", DRAWN | {"select.filter": "random:50"}),
    ("writers", DRAWN | {"select.filter": "same:50@0.5,10@0.5"}),
]
REAL = [
    ("movielens", {"data.size": "100k", "select.item": "top:20"}),
    ("movielens", {"data.size": "100k", "algorithm": "fed_avg"}),
    ("movielens-liked", {"data.size": "100k"}),
    ("sentiment", {}),
    ("clicks", {}),
    ("tags", {}),
]
needs_data = pytest.mark.skipif(not os.environ.get("PARTWISE_DATA"), reason="PARTWISE_DATA is not set")


def make(name, changes):
    task, config = resolve(name, None, changes)
    return task, config, prepare(task, config)


def judged_alone(task, config, prepared, params, position):
    """A test client's metrics, by `personalize` on its support set and `predict` on its query set."""
    me = Personal(config, task.personal, params, source_of(task.train))
    mine = task.test.select(prepared.evaluated.columns).gather([position])
    rebuilds = bool(task.personal.partition.local_paths)
    split = make_evaluation_split(config)
    support, query = (split.support, split.query) if rebuilds else (everything, everything)
    local = me.personalize(rows_of(mine, support))
    asked = rows_of(mine, query)
    outputs = jnp.asarray(me.predict(local, asked))
    batch = {name: jnp.asarray(column) for name, column in asked.columns.items()}
    model = prepared.evaluated.model
    means = {name: m.values for name, m in model.metrics.items() if not isinstance(m, Pooled)}
    return {name: float(jnp.sum(of(outputs, batch))) for name, of in ({"loss": model.loss} | means).items()}


def rows_of(store, subset) -> ClientStore:
    chosen = subset.index(np.arange(subset.count(store.num_examples)), store.num_examples)
    columns = {name: column[chosen] for name, column in store.columns.items()}
    return ClientStore(columns, np.zeros(1, int), np.array([len(chosen)]), store.client_ids)


def shaken(prepared):
    """A model as training might have left it: no two rows alike, without the time that training takes."""
    params = init_params(prepared.build(prepared.rates), round_rng(0, INIT_ROUND))
    keys = jax.random.split(jax.random.key(5), len(params))
    return {
        path: np.asarray(leaf + 0.3 * jax.random.normal(key, leaf.shape).astype(leaf.dtype))
        for (path, leaf), key in zip(params.items(), keys, strict=True)
    }


def check_one_answer(task, config, prepared):
    params = shaken(prepared)
    sums = make_evaluator(prepared, config, task.test).sums(params)
    checked = 0
    for position in range(min(3, task.test.num_clients)):
        if not sums["loss"].weight[position]:
            continue
        for name, value in judged_alone(task, config, prepared, params, position).items():
            assert value == pytest.approx(float(sums[name].value[position]), rel=2e-3, abs=1e-3), name
        checked += 1
    assert checked


@pytest.mark.parametrize(("name", "changes"), FAST)
def test_a_client_alone_gets_what_evaluation_computed(name, changes):
    check_one_answer(*make(name, changes))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), SLOW)
def test_every_task_and_every_choice_of_keys_has_one_answer(name, changes):
    check_one_answer(*make(name, changes))


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), REAL)
def test_real_data_has_one_answer_too(name, changes):
    check_one_answer(*make(name, changes))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), FAST + SLOW)
def test_plain_and_compiled_rounds_of_every_task_agree(name, changes):
    _, _, prepared = make(name, changes)
    few = prepared.store.take(np.arange(6))
    check_algorithm(prepared.build, prepared.rates, few, cohort=4, rounds=1, lanes=(1, 3), tol=2e-4)


@pytest.fixture(scope="module")
def own_rows():
    return planted_ratings(num_clients=60, num_items=30, mean_examples=20).store


def test_predictions_after_training_on_chosen_keys_are_item_times_user(own_rows):
    """Every item, not only those of the slice that a client trained on."""
    task = pw.ratings_task(own_rows, dim=4)
    run = train(task, rounds=3, cohort__size=5, select__item="top:3", simulation__lanes=2)
    mine = task.test.take([0]).select(("item", "rating"))
    local = run.personal.personalize(mine)
    found = run.personal.predict(local, mine)
    params = run.personal.setting.partition.merge(
        {path: jnp.asarray(leaf) for path, leaf in run.personal.params.items()}, local
    )
    batch = {name: jnp.asarray(column) for name, column in mine.gather().columns.items()}
    expected = run.personal.setting.model.predict(params, batch, jax.random.key(0))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("choice", [None, "own", "top:4"])
def test_a_model_that_scores_the_whole_table_scores_every_item_once(own_rows, choice):
    """Thirty items are thirty scores, in the order of the ids: no phantoms that fill up, no slice without ids."""

    def init(rng):
        user, item = jax.random.split(rng)
        return {"user": jax.random.normal(user, (3,)), "item": jax.random.normal(item, (30, 3))}

    predict = lambda params, batch, rng: jnp.tile(params["item"] @ params["user"], (len(batch["rating"]), 1))

    def loss(scores, batch):
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), batch["item"][:, None], axis=1)[:, 0]

    model = pw.Model(init, predict, loss)
    rules = {"user": pw.local("learned"), "item": pw.keyed("item", whole=True)}
    setting = pw.Setting(model, pw.partition(model, rules), ("item", "rating"))
    task = pw.Task("scores", *by_client(own_rows), setting)
    changes = {"cohort.size": 5, "rounds": 3, "simulation.lanes": 2, "reconstruct.rate": 0.5}
    changes |= {"select.item": choice} if choice else {}
    run = train(task, changes=changes)
    check_one_answer(task, run.config, prepare(task, run.config))
    mine = task.test.take([0]).select(("item", "rating"))
    local = run.personal.personalize(mine)
    scores = run.personal.predict(local, mine)
    assert scores.shape == (mine.num_examples, 30)
    np.testing.assert_allclose(scores[0], run.params["item"] @ local["user"], rtol=1e-4, atol=1e-5)
