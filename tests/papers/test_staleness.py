"""Kept local parts by age, against rebuilt ones: the machinery on 24 users, the finding on MovieLens."""

import json
import os

import numpy as np
import pytest

from partwise.metrics import Sums
from partwise.papers import reproduce as papers
from partwise.papers import staleness
from partwise.papers.staleness import METHODS, Judged, StalenessRuns, by_age, rmse
from partwise.runs.train import silent

COHORT, RATE, SEED = 2, 0.05, 1


@pytest.fixture(scope="module")
def runs(liked_folder):
    return StalenessRuns(str(liked_folder), quick=True, progress=silent)


@pytest.mark.slow
def test_it_runs_quick_to_the_end(liked_folder, tmp_path):
    result = papers.reproduce("staleness", str(liked_folder), tmp_path, seeds=1, quick=True)
    named = {(row["row"], row["metric"]) for row in result["rows"]}
    assert len(named) == len(result["rows"]) == 2 * len(METHODS) * len(staleness.QUICK_COHORTS)
    assert all(np.isfinite(row["ours"]) for row in result["rows"])
    assert (result["clients"], result["rounds"]) == (24, staleness.QUICK_ROUNDS)
    assert json.loads((tmp_path / "staleness.json").read_text())["rows"] == result["rows"]
    assert (tmp_path / "staleness.png").read_bytes().startswith(b"\x89PNG")


def test_clients_that_took_part_are_judged_with_what_they_kept_then(runs):
    """The vector of the run where they are known; for those who never came, what nobody has learned."""
    simulation = runs.train("fed_per", COHORT, RATE, SEED)
    ages = staleness.last_seen(simulation)
    assert ((ages >= 0) == (simulation.kept.arrays["began"] > 0)).all()
    assert 0 in ages
    assert -1 in ages
    judged = runs.judge(METHODS[0], simulation, "test")
    item = np.asarray(simulation.state.params["item"])
    position = int(np.flatnonzero(ages >= 0)[0])
    examples = runs.task.test.examples(position)
    predicted = item[examples["item"]] @ simulation.kept.arrays["user"][position]
    expected = np.square(predicted - examples["rating"]).sum()
    np.testing.assert_allclose(judged.errors.value[position], expected, rtol=1e-5)


def test_everyone_rebuilds_from_training_examples_and_the_model_stays(runs):
    simulation = runs.train("fed_recon", COHORT, RATE, SEED)
    params = {path: np.array(leaf) for path, leaf in simulation.state.params.items()}
    kept = runs.rebuild(params, SEED)(runs.task.test.client_ids)
    assert kept["began"].all()
    rebuilding = runs._simulations["rebuild", runs.everyone]
    np.testing.assert_array_equal(rebuilding.state.params["item"], params["item"])
    judged = runs.judge(METHODS[3], simulation, "test")
    mean = lambda store: np.sqrt(np.mean(np.square(store.columns["rating"])))
    assert rmse(judged.errors) < mean(
        runs.task.test
    )  # better than zeros, which are about what they began from


def test_by_age():
    errors = Sums(np.array([4.0, 1.0, 9.0, 0.0]), np.array([1.0, 1.0, 1.0, 0.0]))
    found = by_age(Judged(errors, np.array([-1, 9, 10, 99])))
    assert (found["never"], found["0 to 9"], found["10 to 49"]) == (2, 1, 3)
    assert np.isnan(found["50 to 99"])
    assert rmse(errors) == pytest.approx(np.sqrt(14 / 3))


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("PARTWISE_DATA"), reason="PARTWISE_DATA is not set")
def test_what_is_rebuilt_from_the_same_items_is_better_than_what_was_kept():
    runs = StalenessRuns(None, quick=False, progress=silent)
    simulation = runs.train("fed_per", 10, 0.2, 0)
    kept, rebuilt = (runs.judge(METHODS[i], simulation, "test") for i in (0, 2))
    came = kept.ages >= 0
    assert rmse(kept.errors, came) > rmse(rebuilt.errors, came) + 0.1
    assert rmse(kept.errors) > 2 * rmse(rebuilt.errors)
