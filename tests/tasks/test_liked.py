"""MovieLens as liked or not: features by hand, the contract, and training end to end on a small file."""

from __future__ import annotations

import os

import numpy as np
import pytest

from partwise import load_task, train
from partwise.testing import check_task


def test_the_contract_and_the_features(liked_folder):
    task = load_task("movielens-liked", str(liked_folder))
    check_task(task)
    names = task.train.vocabularies["features"]
    assert task.options["num_features"] == len(names) == 2 + 7 + 20 + 2 * 20 + 7 * 20
    own = task.train.examples(task.train.find(3))
    first = names[own["features"][0]].tolist()
    movie = first[2].removeprefix("movie=")
    assert first == [
        "gender=F",
        "age=18",
        f"movie={movie}",
        f"gender=F movie={movie}",
        f"age=18 movie={movie}",
    ]
    assert own["liked"][0] == (int(movie) < 30)
    for part, count in ((task.train, 16), (task.validation, 2), (task.test, 2)):
        assert part.counts.tolist() == [count] * 24


def test_the_cut_is_the_seeds(liked_folder):
    rows = lambda **options: load_task("movielens-liked", str(liked_folder), **options).test.columns[
        "features"
    ]
    assert np.array_equal(rows(), rows())
    assert not np.array_equal(rows(), rows(seed=1))


def test_it_learns_who_likes_what(liked_folder):
    settings = {"simulation__lanes": 4, "update__rate": 1.0}
    run = train("movielens-liked", data=str(liked_folder), rounds=12, **settings)
    assert run.test["auc"] > 0.9
    assert run.test["accuracy"] > 0.8
    assert run.config.algorithm == "fed_avg"


@pytest.mark.skipif(not os.environ.get("PARTWISE_DATA"), reason="PARTWISE_DATA is not set")
def test_the_papers_heat_dispersion():
    """Table 1: 4,331, the male users over a feature that one user holds."""
    task = load_task("movielens-liked")
    check_task(task)
    whole = task.train.columns["features"]  # before the cut, all of them
    counts = task.train.counts + task.validation.counts + task.test.counts
    client = np.repeat(np.arange(task.train.num_clients), counts)
    pairs = np.unique(client[:, None] * task.options["num_features"] + whole)
    heat = np.bincount(pairs % task.options["num_features"])
    assert heat.max() / heat[heat > 0].min() == 4331
