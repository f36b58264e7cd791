"""The one reader of a run's folder, whatever state the folder is in."""

from __future__ import annotations

import pytest

from partwise.checkpoint import load_json, save_json
from partwise.runs.compare import compare
from partwise.runs.folder import Folder
from partwise.runs.run_view import START_FILE, read_run, read_runs, whole
from partwise.types import UserError


def test_a_whole_run_is_read_as_it_was_written(tiny_run):
    run, folder = read_run(tiny_run), Folder(tiny_run)
    assert whole(run) is run
    assert (run.name, run.path, run.state) == ("run", tiny_run, "finished")
    assert (run.settings, run.begun) == (folder.settings(), folder.begun())
    assert run.summary["test"]["rmse"] == folder.summary()["test"]["rmse"]
    records = folder.records()
    assert run.series.losses == [record["train"]["loss"] for record in records]
    judged = {record["round"]: record["evaluation"] for record in records if record["evaluation"]}
    assert {look.round: look.metrics["rmse"] for look in run.series.looks} == {
        number: evaluation["rmse"] for number, evaluation in judged.items()
    }


def test_all_that_is_wrong_is_told_and_the_rest_is_read(copied, flip):
    flip(copied / "summary.json", 400)
    lines = (copied / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_bytes(b"".join([*lines[:3], lines[4]]))
    run = read_run(copied)
    assert (run.state, run.series.done, run.rounds) == ("damaged", 3, 6)
    with pytest.raises(UserError, match=r"metrics.jsonl' is damaged: line 4 .*summary.json' is damaged"):
        whole(run)


def test_a_round_of_another_form_is_damage(copied):
    folder = Folder(copied)
    records = folder.records()
    folder.replace_records([*records[:2], records[2] | {"train": [0.5]}, *records[3:]])
    run = read_run(copied)
    assert (run.state, run.series.done, len(run.series.losses)) == ("damaged", 2, 2)
    assert "line 3 should be of round 3, and this version cannot read it" in run.problem


def test_a_run_that_goes_on_after_its_summary_has_not_ended(copied):
    folder = Folder(copied)
    folder.append([folder.records()[-1] | {"round": 7}])
    assert (read_run(copied).state, read_run(copied).summary) == ("unfinished", {})
    (row,) = compare([copied]).rows
    assert row["unfinished"] == {str(copied): "has not ended (round 7 of 6)"}


def test_a_deployed_run_is_compared_without_a_test(copied):
    """It has no summary, and its rounds have no evaluation, or one by held-out clients."""
    folder = Folder(copied)
    (copied / "summary.json").unlink()
    (copied / START_FILE).touch()
    rounds = [{"round": number, "loss": 0.5, "seconds": 1.0, "reports": 4} for number in range(1, 7)]
    folder.replace_records(rounds)
    assert read_run(copied).state == "finished"
    with pytest.raises(UserError, match="none of these runs has been evaluated yet"):
        compare([copied])
    folder.replace_records([*rounds[:5], rounds[5] | {"metrics": {"rmse": 0.25, "clients": 3}}])
    compared = compare([copied])
    assert compared.result["metric"] == "rmse"
    assert compared.rows[0]["unfinished"] == {str(copied): "has ended without a test (round 6 of 6)"}


def test_null_is_the_same_as_nothing(copied):
    summary = load_json(copied / "summary.json")
    save_json(copied / "summary.json", summary | {"seconds_per_round": None, "bytes_up_per_client": None})
    assert "seconds_per_round" not in read_run(copied).summary
    assert compare([copied]).rows[0]["seconds_per_round"] is None


def test_no_run_at_all_is_an_error(tmp_path):
    (tmp_path / "sweep.json").write_text("{}")
    for given in ([], [tmp_path]):
        with pytest.raises(UserError, match="no run was given, or none of the sweep has begun"):
            read_runs(given)
