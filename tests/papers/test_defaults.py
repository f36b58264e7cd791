"""Every algorithm that a task offers ends well with its defaults: a small matrix, and a slow one that learns."""

from __future__ import annotations

import os
import shlex
import warnings

import numpy as np
import pytest

from partwise.algorithms.registry import ALGORITHMS, prepare, settings_for
from partwise.cli import main
from partwise.config.parts import make_evaluation_split
from partwise.papers.baselines import least_squares
from partwise.papers.defaults import TASKS, WITHOUT_MODEL, offered
from partwise.runs.resolve import resolve
from partwise.runs.summary import best_reachable
from partwise.runs.train import train
from partwise.tasks import load_task
from partwise.tasks.ratings import ratings_task
from partwise.types import RunWarning, UserError

FEW = {"rounds": 2, "simulation.lanes": 2, "simulation.evaluate_every": 0, "simulation.rounds_per_call": 2}
RATINGS = {"num_clients": 40, "num_items": 20, "mean_examples": 12, "dim": 2}
# of every kind of data: few clients, and enough to learn from
SMALL = {
    "planted": RATINGS,
    "seen": RATINGS | {"seen": True},
    "tags-planted": {"num_clients": 20, "num_words": 100, "num_tags": 8, "mean_examples": 5},
}
LARGER = {
    "planted": {"num_clients": 800, "num_items": 100},
    "seen": {"num_clients": 400, "num_items": 100, "mean_examples": 100, "seen": True},
    "tags-planted": {"num_clients": 200, "num_words": 300, "num_tags": 20, "mean_examples": 40},
    "events-planted": {"num_clients": 400, "num_items": 100},
    "writers": {"num_clients": 60},
}
SHORTER = {"tags-planted": {"rounds": 60}, "writers": {"rounds": 60}}
needs_data = pytest.mark.skipif(not os.environ.get("PARTWISE_DATA"), reason="PARTWISE_DATA is not set")
kind = lambda name: "planted" if name == "seen" else name


def refused(task, algorithm):
    """Why a task does not offer an algorithm; empty if it does."""
    try:
        prepare(*resolve(task, None, {"algorithm": algorithm}))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", SMALL)
def test_what_is_offered_ends_with_finite_numbers_and_the_rest_says_what_to_use(name):
    task = load_task(kind(name), **SMALL[name])
    found = offered(task, {})
    assert {"fed_avg", "fed_adam", "central"} <= {*found}
    for algorithm in found:
        run = train(task, changes=FEW | {"algorithm": algorithm}, progress="none")
        values = [value for value in run.test.values() if isinstance(value, float)]
        assert len(values) >= 2, algorithm
        assert np.isfinite(values).all(), algorithm
    for algorithm in {*ALGORITHMS} - {*found, *WITHOUT_MODEL}:
        assert "se " in refused(task, algorithm), algorithm  # "Use ..." or "use ..."


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGER)
def test_every_default_beats_the_baseline_where_there_is_something_to_learn(name):
    task, compared = load_task(kind(name), **LARGER[name]), TASKS[kind(name)]
    changes = SHORTER.get(name, {}) | {"simulation.evaluate_every": 0}
    _, config = resolve(task, None, changes)
    floor = compared.baseline(task, make_evaluation_split(config))
    for algorithm in offered(task, changes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RunWarning)
            found = train(task, changes=changes | {"algorithm": algorithm}, progress="none").test
        assert (found[compared.metric] > floor) == compared.higher, (algorithm, found[compared.metric], floor)


def test_least_squares_is_between_the_baseline_and_the_best_reachable():
    task = load_task("planted", num_clients=1000, num_items=100, rank=4)
    _, config = resolve(task, None, {})
    split = make_evaluation_split(config)
    best = best_reachable(task, prepare(task, config), config)["rmse"]
    assert best < least_squares(task, split) < 1.1 * best < TASKS["planted"].baseline(task, split)


@needs_data
@pytest.mark.slow
def test_in_one_place_steps_reach_least_squares():
    """Of the same users, with the same known ratings (MovieLens-1M, unseen users)."""
    task, config = resolve("movielens", None, {"algorithm": "central"})
    wanted = least_squares(task, make_evaluation_split(config))
    assert train(task, changes={"algorithm": "central"}).test["rmse"] < 1.01 * wanted


@pytest.mark.parametrize("size", [1, 3])
def test_a_batch_in_one_place_is_a_part_of_the_ratings(size):
    task = load_task("planted", **RATINGS | {"num_clients": size * 40})
    batch = settings_for(task.defaults, "central")["update.batch_size"]
    assert batch == max(task.train.num_examples // 200, 1)
    own = {"central": {"rounds": 3, "update.batch_size": 7}}
    given = ratings_task(task.train, defaults=own)
    assert settings_for(given.defaults, "central")["update.batch_size"] == 7


def test_where_no_rates_were_chosen_the_command_that_chooses_them_works(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = {f"data.{key}": value for key, value in SMALL["tags-planted"].items()}
    changes = {"algorithm": "fed_yogi", "cohort.size": 4, **sizes, **FEW}
    notes = [note for note in resolve("tags-planted", None, changes)[0].notes if "rates" in note]
    assert len(notes) == 1
    assert "No rates were chosen for fed_yogi" in notes[0]
    words = shlex.split(notes[0].partition("choose some: ")[2])
    assert words[:3] == ["partwise", "sweep", "tags-planted"]
    assert main([*words[1:], "--quiet"]) == 0
    assert (tmp_path / "sweeps" / "fed_yogi").is_dir()


@pytest.mark.parametrize(
    "changes", [{"algorithm": "fed_select"}, {"algorithm": "fed_yogi", "server.rate": 0.1}, {}]
)
def test_chosen_rates_need_no_note(changes):
    sizes = {f"data.{key}": value for key, value in SMALL["tags-planted"].items()}
    assert not [note for note in resolve("tags-planted", None, changes | sizes)[0].notes if "rates" in note]
