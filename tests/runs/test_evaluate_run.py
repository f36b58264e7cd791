"""A trained model is judged as it was trained, and what is said of the judged clients is so."""

from __future__ import annotations

import numpy as np
import pytest

import partwise as pw
from partwise.algorithms.effects import check_judging
from partwise.algorithms.registry import prepare
from partwise.data import by_example
from partwise.runs.evaluation import evaluate_run
from partwise.runs.folder import Folder
from partwise.runs.resolve import as_trained, resolve
from partwise.runs.summary import judged
from partwise.runs.train import train
from partwise.types import RunWarning, UserError

SMALL = {"rounds": 2, "cohort.size": 4, "simulation.lanes": 2, "data.dim": 2}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Ratings of 40 users, each with a mean of their own."""
    path = tmp_path_factory.mktemp("table") / "ratings.csv"
    rng = np.random.default_rng(0)
    lines = [
        f"{user},{item},{min(5, max(1, round(rng.normal(1 + user / 10, 0.5))))}"
        for user in range(40)
        for item in rng.choice(15, 12, replace=False)
    ]
    path.write_text("\n".join(["user,item,rating", *lines]) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def run(table, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    train("ratings", data=table, out=out, changes=SMALL)
    return out


def test_constants_of_the_training_data_stay_as_they_were(run, table):
    """The mean and the spread of ratings are the model's; another cut of the clients does not change them."""
    task, _ = resolve("ratings", table, SMALL | {"data.seed": 3})
    trained = Folder(run).model_options()
    assert task.options["center"] != trained["center"]
    outputs = as_trained(Folder(run), task).personal.model.predict(
        {
            "mean": 0.0,
            "user": np.zeros(2),
            "user_bias": 0.0,
            "item": np.zeros((15, 2)),
            "item_bias": np.zeros(15),
        },
        {"item": np.zeros(1, int)},
        None,
    )
    assert float(outputs[0]) == pytest.approx(trained["center"], rel=1e-6)
    told = evaluate_run(run, changes={"data.seed": "3"})
    assert told["judged"]["clients"] == "other (some may have been trained on)"


def test_options_that_change_the_model_or_nothing_are_refused(run):
    with pytest.raises(UserError, match=r"data.dim = 3 would make another model"):
        evaluate_run(run, changes={"data.dim": "3"})
    with pytest.raises(UserError, match=r"data.normalize would have no effect: the clients stay the same"):
        evaluate_run(run, changes={"data.normalize": "false"})


@pytest.mark.parametrize("key", ["select.item", "algorithm", "task", "server.rate"])
def test_settings_of_training_are_refused(key):
    with pytest.raises(UserError, match="is a setting of training"):
        check_judging({key: "other"})


def test_who_is_seen_is_told_by_ids():
    store = pw.data.planted_ratings(num_clients=30, num_items=12, mean_examples=10).store
    task = pw.ratings_task(store, dim=2)
    seen = task._replace(test=task.train.take(np.arange(3)))
    some = task._replace(test=store.take(np.arange(30)))
    _, config = resolve(task, None, {})
    told = [judged(each, prepare(task, config), config)["clients"] for each in (task, seen, some)]
    assert told == ["unseen", "seen", "some seen (24 of 30), some unseen"]
    parts = by_example(store)
    task = pw.Task("mine", *parts, task.personal)
    assert judged(task, prepare(task, config), config)["clients"] == "seen"


def test_when_nobody_can_be_judged_it_is_said(table):
    with pytest.warns(RunWarning, match="no test client has an example to be judged on"):
        train("ratings", data=table, changes=SMALL | {"data.max_examples": 1})


def test_a_run_is_told_in_a_line(table):
    told = repr(train("ratings", data=table, changes=SMALL))
    assert told.startswith("Run(fed_recon on ratings, 2 rounds, test {'rmse': ")
    assert "\n" not in told
