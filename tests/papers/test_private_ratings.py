"""What epsilon costs: the machinery on planted ratings, the finding on MovieLens."""

from __future__ import annotations

import os

import numpy as np
import pytest

from partwise import train
from partwise.algorithms.registry import prepare
from partwise.papers.private_ratings import EPSILONS, lines_of, train_line
from partwise.papers.reproduce import reproduce
from partwise.runs.backends import make_evaluator
from partwise.runs.resolve import resolve
from partwise.runs.train import silent

SMALL = {
    "data.num_clients": 60,
    "data.num_items": 30,
    "data.mean_examples": 12,
    "data.dim": 2,
    "rounds": 4,
    "cohort.size": 5,
    "server.weighting": "uniform",
    "simulation.evaluate_every": 2,
    "simulation.lanes": 5,
}


@pytest.fixture(scope="module")
def planted():
    return resolve("planted", None, SMALL)


def test_every_epsilon_is_trained_with_every_mechanism(planted):
    lines = lines_of(planted[1], 48, quick=False)
    assert len({line.words for line in lines}) == len(lines) == 2 + 3 * len(EPSILONS)
    assert [line.epsilon for line in lines if line.name == "BLT"] == list(EPSILONS)
    assert all(line.changes["cohort.sampling"] == "apart:9" for line in lines if line.name == "BLT")
    assert all("simulation" in line.name for line in lines if "privacy.noise_cohort" in line.changes)


def test_a_line_is_the_run_that_its_settings_name(planted):
    task, config = planted
    line = next(
        line for line in lines_of(config, task.train.num_clients, quick=True) if line.name == "Poisson"
    )
    evaluate = make_evaluator(prepare(task, config), config, task.validation, task.test)
    found = train_line(task, config, line, [3, 4], [0.5, 1.0], silent, evaluate)
    assert found.rounds == [2, 4]
    assert np.isfinite(found.curves).all()
    assert np.shape(found.curves) == (2, 2)
    changes = {**SMALL, **line.changes, "privacy.clip": found.clip, "seed": 4}
    done = train("planted", changes=changes | {"server.rate": config.server.rate * found.factor})
    assert done.summary["test"]["rmse"] == pytest.approx(found.tests[1], rel=1e-5)
    assert done.summary["privacy"]["epsilon"] <= line.epsilon
    assert done.records[-1]["evaluation"]["rmse"] == pytest.approx(found.curves[1][-1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("PARTWISE_DATA"), reason="PARTWISE_DATA is not set")
def test_it_runs_quick_to_the_end(tmp_path):
    result = reproduce("privacy-movielens", os.environ["PARTWISE_DATA"], tmp_path, seeds=1, quick=True)
    assert [row["row"] for row in result["rows"]][:2] == ["without privacy", "clipped, no noise"]
    assert all(np.isfinite(row["ours"]) for row in result["rows"])
    assert (tmp_path / "privacy-movielens.png").read_bytes().startswith(b"\x89PNG")
