"""What a run says of updates that are out of all proportion to the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.runs.folder import Folder
from partwise.runs.resolve import resolve
from partwise.runs.series import Series
from partwise.runs.tally import Tally
from partwise.runs.train import train
from partwise.server.record import Record
from partwise.server.update_sizes import outlying, spread_of
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


@given(st.lists(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=5), max_size=5), st.booleans())
def test_a_page_counts_outliers_as_the_summary_does(rounds, private):
    tally, series = Tally(), Series()
    for number, sizes in enumerate(rounds, 1):
        norms = np.array(sizes)
        record = dict.fromkeys(Record._fields, 0) | {
            "round": number,
            "train": {"loss": 1.0},
            "evaluation": None,
        }
        record |= {"broken": [], "outliers": [], "norms": None}
        if not private:
            record |= {"outliers": np.flatnonzero(outlying(norms)).tolist(), "norms": spread_of(norms)}
        tally.add(record)
        series.add(record)
    assert series.counts["outliers"] == tally.sums["outliers"]
    assert bool(tally.outlier) == (tally.sums["outliers"] > 0)


def test_rounds_in_which_others_have_nothing_to_learn_are_not_counted_on_a_page():
    series = Series()
    for number, norms in enumerate(([1.0, 1.0, 1.0], [1e-6, 1e-6, 0.5]), 1):
        outliers = np.flatnonzero(outlying(np.array(norms))).tolist()
        assert len(outliers) == number - 1
        series.add({"round": number, "loss": 1.0, "norms": spread_of(np.array(norms)), "outliers": outliers})
    assert series.counts["outliers"] == 0


def test_a_page_counts_all_that_a_server_left_out():
    series = Series()
    norms = spread_of(np.array([1.0, 1.0]))  # of those that were used
    series.add({"round": 1, "loss": 1.0, "norms": norms, "usual_norm": 1.0, "outliers": ["ann"]})
    series.add({"round": 2, "loss": None, "norms": None, "usual_norm": None, "outliers": None})
    assert series.counts["outliers"] == 1
