"""How clients are judged, by configuration: fine-tuning, and local parts that the server has trained."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from partwise.algorithm import init_params
from partwise.algorithms.registry import prepare, settings_for
from partwise.checkpoint import load_arrays
from partwise.cli import main
from partwise.config.judged import judged_setting
from partwise.config.parts import make_fine_tune, rates_of
from partwise.config.settings import Config
from partwise.model.partition import DEFAULT
from partwise.runs.backends import make_evaluator
from partwise.runs.evaluation import evaluate_run
from partwise.runs.train import train
from partwise.tasks import load_task
from partwise.types import UserError

SHAPE = {"num_clients": 30, "sentences": 6, "num_words": 9, "num_buckets": 3, "length": 4}
SHAPE |= {"embedding": 4, "units": 5, "words": "input"}
PLANTED = {"num_clients": 40, "num_items": 20, "mean_examples": 12, "dim": 2}
SMALL = {
    "rounds": 1,
    "cohort.size": 4,
    "simulation.lanes": 1,
    "update.max_steps": 2,
    "reconstruct.max_steps": 3,
}
SMALL |= {"update.rate": 3.0, "reconstruct.rate": 3.0}
METRIC = "accuracy_with_oov"


@pytest.fixture(scope="module")
def task():
    return load_task("next-word-planted", **SHAPE)


def configured(task, algorithm="fed_yogi", **changes):
    given = settings_for(task.defaults, algorithm) | SMALL
    return Config(task=task.name).changed(given | {k.replace("__", "."): v for k, v in changes.items()})


@pytest.fixture(scope="module")
def params(task):
    """All on the server, with embeddings of buckets that differ from what clients would begin with."""
    ready = prepare(task, configured(task))
    leaves = init_params(ready.build(ready.rates), jax.random.key(5))
    return {
        path: np.array(leaf) + 0.3 * np.cos(np.arange(leaf.size)).reshape(leaf.shape)
        for path, leaf in leaves.items()
    }


@pytest.fixture(scope="module")
def losses(task, params):
    """Losses [clients] of the test clients' query sets, by how they are judged."""

    def measure(**changes):
        config = configured(task, **changes)
        return make_evaluator(prepare(task, config), config, task.test).sums(params)["loss"].value

    return measure


@pytest.fixture(scope="module")
def trained(losses):
    return losses(evaluation__local="trained")


def test_fed_avg_and_its_kin_judge_words_as_trained(task):
    for algorithm, local in (("fed_yogi", "trained"), ("central", "trained"), ("fed_recon", "rebuilt")):
        assert configured(task, algorithm).evaluation.local == local


def test_trained_is_the_servers_model_on_the_query_set(task, params, trained):
    """Standard evaluation of the model with all parameters on the server, by hand."""
    model, partition = task.stateful.model, task.stateful.partition
    whole = partition.merge(params, {})
    for position in range(task.test.num_clients):
        rows = task.test.examples(position)
        batch = {name: np.asarray(rows[name])[3:] for name in task.stateful.columns}  # of 6, the second half
        scores = model.predict(whole, batch, jax.random.key(0))
        np.testing.assert_allclose(trained[position], model.loss(scores, batch).sum(), rtol=1e-4)


def test_tuned_begins_where_training_ended(losses, trained):
    np.testing.assert_allclose(
        losses(evaluation__local="tuned", reconstruct__max_steps=0), trained, rtol=1e-5
    )
    tuned, rebuilt = losses(evaluation__local="tuned"), losses(evaluation__local="rebuilt")
    for first, second in ((tuned, trained), (rebuilt, trained), (tuned, rebuilt)):
        assert np.abs(first - second).max() > 1e-3


def test_fine_tuning_of_everything_begins_there_too(losses, trained):
    steps = {"fine_tune__max_steps": 2, "fine_tune__rate": 1.0}
    np.testing.assert_allclose(losses(**steps | {"fine_tune__rate": 0.0}), trained, rtol=1e-5)
    rest, joint = losses(**steps), losses(**steps, fine_tune__joint=True)
    assert np.abs(rest - trained).max() > 1e-3
    assert np.abs(joint - rest).max() > 1e-4


def test_no_steps_are_no_fine_tuning(task):
    config = configured(task, fine_tune__max_steps=0)
    assert make_fine_tune(config, rates_of(config)) is None
    some = config.changed({"fine_tune.max_steps": "none"})
    assert make_fine_tune(some, rates_of(some)) is not None
    assert rates_of(config.changed({"fine_tune.rate": 0.7}))["fine_tune"] == 0.7


def test_without_a_local_part_only_fine_tuning_asks_for_a_split(liked_folder):
    task = load_task("movielens-liked", str(liked_folder))
    assert task.seen or not task.personal.partition.local_paths
    plain = prepare(task, configured(task, "fed_avg"))
    assert plain.evaluation is plain.build


def test_judged_makes_the_local_part_a_learned_one(task):
    role = lambda local: judged_setting(
        task.personal, configured(task, evaluation__local=local)
    ).partition.roles["oov"]
    assert role("rebuilt").initial == "random"
    for local in ("tuned", "trained"):
        assert role(local).initial == "learned"
    with pytest.raises(UserError, match=r"unknown value of evaluation\.local 'fresh'.*rebuilt"):
        role("fresh")


def test_the_servers_leaf_is_the_default_or_the_mean_of_a_table():
    setting = load_task("planted", **PLANTED, initial="learned").personal
    table, item = np.arange(6.0).reshape(3, 2), np.zeros((20, 2))
    leaves = setting.partition.server_leaves
    np.testing.assert_array_equal(leaves({"user": table, "item": item})[DEFAULT + "user"], [2, 3])
    np.testing.assert_array_equal(leaves({"user": table[0], "item": item})[DEFAULT + "user"], [0, 1])
    both = {DEFAULT + "user": table[1], "user": table, "item": item, "more": item}
    assert set(leaves(both)) == {DEFAULT + "user", "item"}
    np.testing.assert_array_equal(leaves(both)[DEFAULT + "user"], [2, 3])
    with pytest.raises(KeyError, match="user"):
        leaves({"item": item})


@pytest.mark.parametrize("local", ["tuned", "trained"])
@pytest.mark.parametrize("algorithm", ["fed_recon", "fed_per"])
def test_what_trains_no_local_part_on_the_server_cannot_judge_by_it(task, algorithm, local):
    says = rf"evaluation\.local = {local} takes .* with {algorithm} it trains none: use rebuilt"
    with pytest.raises(UserError, match=says):
        prepare(task, configured(task, algorithm, evaluation__local=local))


def test_a_run_is_judged_again_and_personalizes_from_what_was_trained(tmp_path):
    """A new client begins at the mean of the vectors that the server has for others."""
    run, local = tmp_path / "run", tmp_path / "local.safetensors"
    changes = {f"data.{name}": value for name, value in PLANTED.items()} | SMALL
    changes |= {
        "reconstruct.method": "steps",
        "evaluation.local": "tuned",
        "algorithm": "fed_avg",
        "data.initial": "random",
    }
    done = train("planted", out=run, changes=changes | {"update.rate": 0.1, "reconstruct.rate": 0.1})
    assert evaluate_run(run)["rmse"] == pytest.approx(done.test["rmse"], rel=1e-6)
    other = evaluate_run(run, changes={"evaluation.local": "rebuilt"})
    assert other["rmse"] != pytest.approx(done.test["rmse"], rel=1e-6)
    mine = done.task.test.gather(np.array([0])).select(("item", "rating"))
    begun = done.params["user"].mean(axis=0)
    assert np.abs(done.personal.personalize(mine)["user"] - begun).max() > 1e-4
    still = replace(done, config=done.config.changed({"evaluation.local": "trained"})).personal
    np.testing.assert_allclose(still.personalize(mine)["user"], begun, rtol=1e-5)
    (tmp_path / "mine.csv").write_text("item,rating\n1,4.5\n2,3.0\n7,2.0\n")
    given = ["--client", str(tmp_path / "mine.csv"), "--out", str(local), "--json"]
    assert main(["personalize", str(run), *given]) == 0
    assert load_arrays(local)[0]["user"].shape == begun.shape


def test_words_personalize_from_what_was_trained(task, tmp_path):
    changes = SMALL | {"algorithm": "fed_yogi", "evaluation.local": "tuned"}
    run = train(task, changes=changes, out=tmp_path / "run")
    mine = task.test.gather(np.array([0])).select(task.personal.columns)
    tuned = run.personal.personalize(mine)["oov"]
    assert tuned.shape == run.params["oov"].shape
    met = np.unique(mine.columns["bucket"][mine.columns["bucket"] >= 0])
    others = np.setdiff1d(np.arange(len(tuned)), met)
    np.testing.assert_allclose(tuned[others], run.params["oov"][others], atol=1e-6)
    assert np.abs(tuned[met] - run.params["oov"][met]).max() > 1e-5
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test"][METRIC] == run.test[METRIC]
