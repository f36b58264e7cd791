"""What a task starts from: on real ratings it never diverges, and few ratings are used as well as many."""

from __future__ import annotations

import os

import numpy as np
import pytest

from partwise.algorithms.registry import prepare
from partwise.papers.paper_settings import first_of
from partwise.papers.reproduce import reproduce
from partwise.runs.resolve import resolve
from partwise.runs.summary import best_reachable
from partwise.tasks import load_task

needs_data = pytest.mark.skipif(not os.environ.get("PARTWISE_DATA"), reason="PARTWISE_DATA is not set")


@pytest.mark.parametrize(
    ("count", "support", "query"), [(20, 4, 10), (9, 4, 5), (5, 2, 3), (1, 0, 1), (0, 0, 0)]
)
def test_the_first_ratings_are_known_and_the_second_half_is_asked_for(count, support, query):
    split = first_of(4)
    assert (split.support.count(count), split.query.count(count)) == (support, query)
    known = split.support.index(np.arange(support), count)
    asked = split.query.index(np.arange(query), count)
    assert known.tolist() == [*range(support)]
    assert asked.tolist() == [*range(count // 2, count)]


def test_the_best_reachable_is_of_the_split_that_clients_are_judged_with():
    task = load_task("planted", num_clients=60, num_items=30, mean_examples=14, dim=2)
    best = {}
    for name, changes in {
        "alternate": {},
        "more": {"evaluation_split.kind": "halves", "evaluation_split.percent": 90},
        "less": {"evaluation_split.kind": "halves", "evaluation_split.percent": 10},
        "averaged": {"algorithm": "fed_avg"},
    }.items():
        _, config = resolve(task, None, changes)
        best[name] = best_reachable(task, prepare(task, config), config)["rmse"]
    assert best["more"] < best["alternate"] < best["less"]
    assert best["averaged"] == best["alternate"]  # unseen clients are judged in the same way


def test_of_seen_clients_it_is_not_known():
    task = load_task("planted", num_clients=60, num_items=30, mean_examples=14, dim=2, seen=True)
    _, config = resolve(task, None, {})
    assert best_reachable(task, prepare(task, config), config) == {}


@needs_data
@pytest.mark.slow
def test_neither_defaults_nor_the_preset_diverge(tmp_path):
    """The fourth seed is the one that diverges with the authors' server rate."""
    rows = {
        (row["row"], row["metric"]): row
        for row in reproduce("paper-settings", None, tmp_path, seeds=4)["rows"]
    }
    worst = lambda name, metric: max(rows[name, metric]["values"])
    assert worst("defaults", "rmse") < 0.875
    assert worst("preset paper", "rmse") < 0.935
    for known in (1, 4, 20, 200):
        metric = f"rmse, {known} known"
        assert worst("defaults", metric) < 0.96 * worst("mean rating", metric)
