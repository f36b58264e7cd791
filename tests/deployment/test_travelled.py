"""The bytes of a round, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from partwise.algorithms.registry import prepare
from partwise.checkpoint import to_bytes
from partwise.deployment.book import TaskRow
from partwise.deployment.travelled import Travelled
from partwise.runs.resolve import resolve


@pytest.fixture(scope="module")
def partition():
    """Of 2 numbers for each item, and 2 shared ones."""
    task, config = resolve("planted", None, {"data.num_clients": 30, "data.dim": 2})
    prepared = prepare(task, config)
    return prepared.build(prepared.rates).partition


def task(keys=None, report=None):
    asked = None if keys is None else to_bytes({"item": np.arange(keys)})
    sent = None if report is None else to_bytes({"any": np.zeros(report, np.int8)})
    return TaskRow("id", "train", 0, 0, 0, "ann", "device", keys=asked, report=sent)


def travelled(partition, tasks, on_demand):
    counts = Travelled(partition, on_demand)
    assert [counts.counted(task) for task in tasks] == tasks
    assert counts.reports == sum(len(task.report or b"") for task in tasks)
    return counts.record()


def test_slices_and_keys_count_for_all_who_asked(partition):
    tasks = [task(3, 100), task(5), task()]  # one is lost after it was sent its slices, one has never asked
    assert travelled(partition, tasks, on_demand=True) == {
        "bytes_down": 2 * 8 + (3 + 5) * 8,
        "bytes_up": 100 + 4 * (3 + 5),
    }


def test_what_a_host_of_files_sends_is_not_known(partition):
    assert travelled(partition, [task(3, 100)], on_demand=False) == {"bytes_down": None, "bytes_up": 100}


def test_a_round_in_which_nobody_asked(partition):
    assert travelled(partition, [], on_demand=True) == {"bytes_down": 0, "bytes_up": 0}
