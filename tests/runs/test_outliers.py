"""What a run says of updates that are out of all proportion to the others."""

from __future__ import annotations

import pytest

from partwise.runs.folder import Folder
from partwise.runs.resolve import resolve
from partwise.runs.train import train
from partwise.types import RunWarning

CHANGES = {"algorithm": "fed_avg", "rounds": 6, "cohort.size": 12, "update.rate": 1e-7}


@pytest.fixture(scope="module")
def outlandish(tiny):
    """A task with one client whose ratings are a million times too large, that client, and settings."""
    task = resolve("planted", None, tiny | CHANGES)[0]
    store = task.train
    rating = store.columns["rating"].copy()
    rating[store.starts[0] : store.starts[0] + store.counts[0]] *= 1e6
    columns = {**store.columns, "rating": rating}
    train = type(store)(columns, store.starts, store.counts, store.client_ids)
    settings = {key: value for key, value in tiny.items() if not key.startswith("data.")}
    return task._replace(train=train), store.client_ids[0].item(), settings | CHANGES


def test_a_run_names_its_outlier_once_and_says_so_at_its_end(outlandish, tmp_path):
    task, name, changes = outlandish
    with pytest.warns(RunWarning, match=r"update of client .* was [\d,]+ times as large as usual") as caught:
        run = train(task, changes=changes, out=tmp_path)
    assert sum("as large as usual" in str(each.message) for each in caught) == 1
    told, named = run.summary["outliers"], [name in record["outliers"] for record in run.records]
    assert told["updates"] == sum(named) > 0
    assert told["first"]["clients"] == [name]
    assert told["first"]["round"] == 1 + named.index(True)
    assert [each["norms"] for each in Folder(tmp_path).records()] == [each["norms"] for each in run.records]


def test_a_resumed_run_says_the_same(outlandish, tmp_path):
    task, _, changes = outlandish
    with pytest.warns(RunWarning, match="as large as usual"):
        whole = train(task, changes=changes)
    with pytest.warns(RunWarning, match="as large as usual"):
        train(task, changes=changes | {"rounds": 3}, out=tmp_path)
    resumed = train(task, changes={"rounds": 6}, out=tmp_path, resume=True)
    assert resumed.summary["outliers"] == whole.summary["outliers"]


def test_a_run_without_outliers_says_nothing(tiny):
    assert train("planted", changes=tiny | {"rounds": 4}).summary["outliers"] is None
