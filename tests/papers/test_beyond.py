"""The steps beyond the papers: where to cut predictions, and that the last step keeps what it gained."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from partwise.papers.beyond import best_cuts, rounded_right, steps
from partwise.papers.reproduce import reproduce
from partwise.runs.train import train
from partwise.tasks.movielens import INFORMED

needs_data = pytest.mark.skipif(not os.environ.get("PARTWISE_DATA"), reason="PARTWISE_DATA is not set")


def test_no_other_cuts_are_right_more_often():
    rng = np.random.default_rng(0)
    ratings = rng.integers(1, 6, 40).astype(float)
    predicted = 3 + 0.4 * (ratings - 3) + rng.normal(0, 0.3, 40)
    found = best_cuts(predicted, ratings)
    assert found == sorted(found)
    grid = np.linspace(predicted.min(), predicted.max() + 1e-6, 18)
    other = max(
        rounded_right(predicted, ratings, cuts) for cuts in itertools.combinations_with_replacement(grid, 4)
    )
    halves = rounded_right(predicted, ratings, (1.5, 2.5, 3.5, 4.5))
    assert rounded_right(predicted, ratings, found) >= max(other, halves)


def test_the_steps_are_the_preset_but_for_those_it_leaves_out():
    by_name = {step.name: step.changes for step in steps()}
    last = by_name["+ items pulled to their genres"]
    assert {key: INFORMED[key] for key in last} == last


@needs_data
@pytest.mark.slow
def test_it_runs_quick_to_the_end(tmp_path):
    result = reproduce("movielens-beyond", os.environ["PARTWISE_DATA"], tmp_path, seeds=2, quick=True)
    rows = [row["row"] for row in result["rows"] if row["metric"] == "rmse"]
    assert rows == [*(step.name for step in steps()), "+ ensemble of 2 models"]
    assert all(np.isfinite(row["ours"]) for row in result["rows"])
    assert (tmp_path / "movielens-beyond.png").read_bytes().startswith(b"\x89PNG")


@needs_data
@pytest.mark.slow
def test_more_knowledge_gives_better_ratings(tmp_path):
    """On validation users, who are not those of the reported table."""
    found = {
        preset: train(
            "movielens", preset=preset, changes={"rounds": 300}, out=tmp_path / str(preset)
        ).evaluate("validation")["rmse"]
        for preset in (None, "informed")
    }
    assert found["informed"] < found[None] - 0.005
