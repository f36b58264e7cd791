"""`partwise heat`: what it tells of a task, and what it writes."""

import json

import numpy as np
import pytest

from partwise.data import planted_ratings
from partwise.data.heat import count_heat
from partwise.reports.heat_report import count_task, measure_heat
from partwise.runs.resolve import resolve
from partwise.selection.key_heat import load_heats
from partwise.tasks.ratings import ratings_task
from partwise.types import UserError

PLANTED = {"data.num_clients": 60, "data.num_items": 30, "data.mean_examples": 12, "data.dim": 4}
TAGS = {"data.num_clients": 40, "data.num_words": 60, "data.num_tags": 8, "data.mean_examples": 6}
TAGS |= {"data.words_per_example": 10}
WRITERS = {"data.num_clients": 20, "data.median": 20, "data.network": "2nn"}


def test_a_task_is_told_and_written(tmp_path):
    told = measure_heat("planted", None, PLANTED, out=tmp_path / "heat")
    item, user = told["spaces"]
    assert (item["space"], item["total"], item["keys"]) == ("item", 48, 30)
    assert (user["space"], user["keys_held"], user["keys_not_held"], user["dispersion"]) == (
        "user",
        48,
        12,
        1,
    )
    assert json.loads((tmp_path / "heat" / "heat.json").read_text()) == told
    assert (tmp_path / "heat" / "heat.png").read_bytes().startswith(b"\x89PNG")
    heats, task = load_heats(tmp_path / "heat" / "heat.safetensors"), resolve("planted", None, PLANTED)[0]
    np.testing.assert_array_equal(heats["item"].counts, count_heat(task.train, "item").counts)


@pytest.mark.parametrize("by", ["clients", "samples"])
def test_all_clients_are_those_of_the_splits_together(by):
    task = resolve("planted", None, PLANTED)[0]
    parts = [count_task(task, by, split)["item"] for split in ("train", "validation", "test")]
    whole = count_task(task, by, "all")["item"]
    np.testing.assert_array_equal(whole.counts, sum(part.counts for part in parts))
    assert whole.total == sum(part.total for part in parts)


@pytest.mark.parametrize(
    ("task", "changes", "spaces", "uncounted"),
    [("tags-planted", TAGS, ["word"], []), ("writers", WRITERS, [], ["filter"])],
)
def test_other_tasks(tmp_path, task, changes, spaces, uncounted):
    told = measure_heat(task, None, changes, out=tmp_path)
    assert ([each["space"] for each in told["spaces"]], told["uncounted"]) == (spaces, uncounted)
    assert (tmp_path / "heat.png").exists() == bool(spaces)


def test_mistakes():
    with pytest.raises(UserError, match="unknown unit of heat 'user'"):
        measure_heat("planted", None, PLANTED, by="user")
    with pytest.raises(UserError, match=r"unknown split 'tests' \(nearest: test"):
        measure_heat("planted", None, PLANTED, split="tests")
    with pytest.raises(UserError, match="counted more than once: use --split train"):
        count_task(ratings_task(planted_ratings(20, 30, mean_examples=12).store, seen=True), split="all")
