"""Sweeps: every run equals the run that `train` makes, and a sweep that was stopped goes on."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib

import pytest

from partwise.cli import main
from partwise.runs import sweep_family
from partwise.runs.evaluation import evaluate_run
from partwise.runs.folder import Folder
from partwise.runs.lock import held
from partwise.runs.reopen import load
from partwise.runs.sweep import sweep
from partwise.runs.sweep_plan import SweepPlan, check_grid, check_seeds, parse_grid
from partwise.runs.train import Status, train
from partwise.types import UserError

GRID = {"server.rate": [0.1, 0.5], "update.rate": [0.1, 1e30]}
EQUAL = ("rmse", "accuracy", "loss")


@pytest.fixture(scope="module")
def swept(tiny, tmp_path_factory):
    """Eight runs side by side, half of which diverge."""
    out = tmp_path_factory.mktemp("sweep") / "all"
    return sweep("planted", grid=GRID, seeds=2, out=out, changes=without_lanes(tiny))


def without_lanes(tiny):
    return {key: value for key, value in tiny.items() if key != "simulation.lanes"}


def records(folder):
    """The rounds of a run, without how long they took."""
    return [{**record, "seconds": 0} for record in Folder(folder).records()]


def nearly(ours, other):
    """Whether two documents are equal, numbers up to 1e-5: side by side, clients are added up in another order."""
    if isinstance(ours, dict):
        return ours.keys() == other.keys() and all(nearly(ours[key], other[key]) for key in ours)
    if isinstance(ours, list):
        return len(ours) == len(other) and all(map(nearly, ours, other))
    if isinstance(ours, float) and isinstance(other, float):
        return math.isclose(ours, other, rel_tol=1e-5, abs_tol=1e-6)
    return ours == other


def test_a_run_side_by_side_equals_the_run_that_train_makes(swept, tiny, tmp_path):
    changes = without_lanes(tiny) | {"server.rate": 0.5, "update.rate": 0.1, "seed": 1}
    alone = train("planted", changes=changes, out=tmp_path / "alone")
    beside = Folder(swept.folder / "server.rate=0.5,update.rate=0.1,seed=1")
    assert beside.summary()["side_by_side"] == 8
    assert beside.config() == alone.config
    assert nearly(records(beside.path), records(tmp_path / "alone"))
    for metric in EQUAL:
        assert beside.summary()["test"][metric] == pytest.approx(alone.test[metric], rel=1e-5)
    for path, leaf in beside.model().items():
        assert leaf == pytest.approx(alone.params[path], rel=1e-4, abs=1e-5)


def test_every_run_can_be_opened_and_goes_on_alone(swept, tmp_path):
    run = shutil.copytree(swept.folder / "server.rate=0.5,update.rate=0.1,seed=0", tmp_path / "run")
    told = json.loads((run / "summary.json").read_text())
    assert evaluate_run(run)["rmse"] == pytest.approx(told["test"]["rmse"], rel=1e-5)
    longer = train("planted", out=run, resume=True, rounds=8)
    assert [record["round"] for record in longer.records] == list(range(1, 9))


def test_a_run_that_diverges_is_a_row_that_says_so(swept, tiny, capsys):
    assert [len(row["failed"]) for row in swept.rows] == [0, 0, 2, 2]
    row = swept.rows[-1]
    assert row["validation"]["mean"] is None
    assert all(
        "no client counted" in why or "diverged" in why or "finite" in why for why in row["failed"].values()
    )
    assert "failed.json" in os.listdir(swept.folder / next(iter(row["failed"])))
    grid = [
        word for key, values in GRID.items() for word in ("--grid", f"{key}={','.join(map(str, values))}")
    ]
    given = [word for key, value in without_lanes(tiny).items() for word in ("--set", f"{key}={value}")]
    again = ["sweep", "planted", *grid, *given, "--seeds", "2", "--out", str(swept.folder), "--resume"]
    assert main([*again, "--quiet"]) == 1  # nothing is trained again
    assert f"{next(iter(row['failed']))} failed: " in capsys.readouterr().out


def test_rows_are_sorted_by_validation_and_the_best_is_a_config(swept, tiny, tmp_path):
    first, second = swept.rows[:2]
    assert first["validation"]["mean"] <= second["validation"]["mean"]
    last = [Folder(swept.folder / run).records()[-1]["evaluation"]["rmse"] for run in first["runs"]]
    assert first["validation"]["values"] == last
    assert swept.best == first["settings"] == {"server.rate": 0.5, "update.rate": 0.1}
    assert "test clients choose nothing" in swept.result["chosen_by"]
    best = tomllib.loads((swept.folder / "best.toml").read_text())
    assert (best["server"]["rate"], best["update"]["rate"], best["seed"]) == (0.5, 0.1, 0)
    out = tmp_path / "again"
    assert main(["train", "--config", str(swept.folder / "best.toml"), "--out", str(out), "--quiet"]) == 0
    again = json.loads((out / "summary.json").read_text())
    beside = json.loads((swept.folder / first["runs"][0] / "summary.json").read_text())
    assert again["test"]["rmse"] == pytest.approx(beside["test"]["rmse"], rel=1e-5)
    assert (swept.folder / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_that_was_stopped_goes_on_and_gives_the_same_table(swept, tiny, tmp_path, monkeypatch):
    """Stopped when one run has ended, and the others have their last checkpoint but no summary."""
    out = tmp_path / "copy"
    shutil.copytree(swept.folder, out)
    names = [run for row in swept.rows for run in row["runs"] if run not in row["failed"]]
    for name in names[1:]:
        for file in ("summary.json", "model.safetensors"):
            (out / name / file).unlink()
        for late in (out / name / "checkpoints").glob("*6.safetensors"):
            late.unlink()
    (out / names[2] / "checkpoints" / "00000004.safetensors").unlink()  # so they meet at an earlier round
    kept = (out / names[0] / "summary.json").stat().st_mtime_ns
    again = sweep("planted", grid=GRID, seeds=2, out=out, changes=without_lanes(tiny), resume=True)
    assert (out / names[0] / "summary.json").stat().st_mtime_ns == kept
    seconds = lambda rows: [{**row, "seconds": 0} for row in rows]
    assert seconds(again.rows) == seconds(swept.rows)  # bit for bit
    monkeypatch.setattr(sweep_family, "_train_batch", None)  # nothing is left to train
    sweep("planted", grid=GRID, seeds=2, out=out, changes=without_lanes(tiny), resume=True)


def test_a_sweep_is_resumed_as_it_began(swept, tiny):
    changes = without_lanes(tiny)
    with pytest.raises(UserError, match=r"grid server.rate=0.1, and was asked|has grid server.rate=0.1,0.5"):
        sweep("planted", grid={"server.rate": [0.1]}, seeds=2, out=swept.folder, changes=changes, resume=True)
    with pytest.raises(UserError, match="has seeds 0,1, and was asked to go on with 0,1,2"):
        sweep("planted", grid=GRID, seeds=3, out=swept.folder, changes=changes, resume=True)
    with pytest.raises(UserError, match="already holds a sweep: add --resume"):
        sweep("planted", grid=GRID, seeds=2, out=swept.folder, changes=changes)
    with held(swept.folder):
        code = f"import partwise as pw\npw.sweep(grid={{}}, out={str(swept.folder)!r}, resume=True)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "another run is writing to" in done.stderr


def test_other_shapes_are_trained_in_processes_and_equal_train(tiny, tmp_path):
    changes = {key: value for key, value in tiny.items() if key != "data.dim"}
    changes |= {"rounds": 2, "simulation.evaluate_every": 1}
    seen: list[Status] = []
    grid = {"data.dim": ["2", "3"], "server.rate": ["0.1", "0.5"]}
    how = {"processes": 2, "metric": "accuracy", "progress": seen.append}
    done = sweep("planted", grid=grid, out=tmp_path / "s", changes=changes, **how)
    told = {
        (status.part, status.round) for status in seen if status.evaluation and "rmse" in status.evaluation
    }
    names = [f"data.dim={dim},server.rate=0.1,seed=0 and 1 more" for dim in (2, 3)]
    assert told == {(name, number) for name in names for number in (1, 2)}  # as they train
    assert len(done.rows) == 4
    assert not any(row["failed"] for row in done.rows)
    assert done.result["better"] == "higher"
    alone = train("planted", changes=changes | {"data.dim": 3, "server.rate": 0.5})
    beside = Folder(tmp_path / "s" / "data.dim=3,server.rate=0.5,seed=0").summary()
    assert beside["test"]["rmse"] == pytest.approx(alone.test["rmse"], rel=1e-5)


def test_what_cannot_be_side_by_side_takes_turns_in_one_program(tiny, tmp_path):
    changes = tiny | {"algorithm": "fed_per", "rounds": 3}  # whose clients keep something
    done = sweep("planted", grid={"server.rate": [0.5, 1.0]}, out=tmp_path / "s", changes=changes)
    alone = train("planted", changes=changes | {"server.rate": 0.5})
    beside = Folder(tmp_path / "s" / "server.rate=0.5,seed=0").summary()
    assert beside["side_by_side"] == 1
    assert {name: beside["test"][name] for name in EQUAL} == {name: alone.test[name] for name in EQUAL}
    assert len(done.rows) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--grid", "server.rate"], "--grid takes dotted.key=value"),
        (["--grid", "server.rate=0.1", "--grid", "server.rate=0.2"], "was given twice"),
        (["--grid", "server.rate=0.1,,0.2"], "empty value of server.rate"),
        (["--grid", "server.rate=0.1,0.1"], "a value of server.rate twice"),
        (["--grid", "seed=1,2"], "--seeds 3"),
        (["--grid", "task=planted,tags"], "a sweep is of one task"),
        (["--grid", "server.rate=0.1", "--set", "server.rate=1"], "in the grid and also set"),
        (["--grid", "server.raet=0.1"], "unknown configuration key 'server.raet'"),
        (["--grid", "server.rate=fast"], "'server.rate' must be a number"),
        (["--seeds", "0"], "at least one seed"),
        (["--seeds", "two"], "must be a whole number"),
        (["--metric", "rsme"], "unknown metric 'rsme' (nearest: rmse)"),
        (["--processes", "0"], "--processes must be at least 1"),
        (["--resume"], "holds no sweep to go on with"),
        (["--grid", "cohort.size=1000000"], "cohort.size=1000000,seed=0: a round asks"),
    ],
)
def test_mistakes_are_told(arguments, words, tmp_path, capsys):
    assert main(["sweep", "planted", *arguments, "--out", str(tmp_path / "s"), "--quiet"]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_seeds_and_values_in_python():
    assert check_seeds(3, "5") == [5, 6, 7]
    assert check_seeds([4, 2]) == [4, 2]
    with pytest.raises(UserError, match="different whole numbers"):
        check_seeds([1, 1])
    with pytest.raises(UserError, match="leave one of the two out"):
        check_seeds([1, 2], 5)
    with pytest.raises(UserError, match="must be a list"):
        check_grid({"server.rate": 0.1}, {})
    assert parse_grid(["a.b= 1, 2"]) == {"a.b": ["1", "2"]}


def test_folders_have_names_that_any_system_takes():
    plan = SweepPlan("t", None, None, {}, {}, {"data.path": ["a/b", "a b"]}, [0], None)
    assert [cell.name for cell in plan.cells()] == ["0000-seed=0", "0001-seed=0"]
    assert [len(family) for family in plan.families()] == [1, 1]


PRIVATE = {
    "data.num_clients": 200,
    "data.num_items": 30,
    "data.mean_examples": 12,
    "data.dim": 2,
    "cohort.size": 20,
    "cohort.sampling": "poisson",
    "rounds": 3,
    "server.weighting": "uniform",
    "server.schedule": "constant",
    "privacy.clip": 0.5,
    "privacy.epsilon": 4.0,
}


def test_the_runs_of_a_private_sweep_are_within_the_budget_together(tmp_path):
    pytest.importorskip("dp_accounting")
    out = tmp_path / "s"
    done = sweep("planted", grid={"server.rate": [0.5, 1.0]}, seeds=2, out=out, changes=PRIVATE)
    for run in (run for row in done.rows for run in row["runs"]):
        promise = Folder(out / run).summary()["privacy"]
        assert 3.9 < promise["epsilon"] <= 4.0
        assert "4 trials" in promise["ledger"][0]["what"]
        assert Folder(out / run).begun()["trials"] == 4
    longer = train("planted", out=out / run, resume=True)  # nothing is left to do, and the promise stays
    assert "4 trials" in longer.summary["privacy"]["ledger"][0]["what"]
    with pytest.raises(UserError, match=r"costs are composed, and cohort.min_examples may change"):
        sweep("planted", grid={"cohort.min_examples": [1, 2]}, out=tmp_path / "t", changes=PRIVATE)
    noisy = PRIVATE | {"privacy.noise": 0.3, "privacy.epsilon": 1.0}
    with pytest.raises(UserError, match="2 trials of 3 rounds cost more"):
        sweep("planted", grid={"server.rate": [0.5, 1.0]}, out=tmp_path / "u", changes=noisy)


@pytest.mark.slow
def test_a_sweep_survives_kills(tiny, tmp_path):
    """Killed at some moments, then resumed until it ends: the table of a sweep that nobody stopped."""
    out, told = tmp_path / "killed", ["--grid", "server.rate=0.1,0.5", "--seeds", "2", "--quiet"]
    options = [
        part for key, value in (tiny | {"rounds": 400}).items() for part in ("--set", f"{key}={value}")
    ]
    command = [sys.executable, "-m", "partwise.cli", "sweep", "planted", *told, *options]
    for wait in (6, 7, 8):
        more = ["--resume"] if (out / "sweep.json").exists() else []
        process = subprocess.Popen([*command, "--out", str(out), *more], start_new_session=True)
        time.sleep(wait)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    more = ["--resume"] if (out / "sweep.json").exists() else []
    subprocess.run([*command, "--out", str(out), *more], check=True)
    subprocess.run([*command, "--out", str(tmp_path / "whole")], check=True)
    rows = [
        [{**row, "seconds": 0} for row in json.loads((folder / "sweep.json").read_text())["rows"]]
        for folder in (out, tmp_path / "whole")
    ]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_runs_side_by_side_stop_keep_and_follow_schedules_as_they_do_alone(tmp_path):
    """Early stops, the best model and schedules of rates, in one program: each run is what `train` gives."""
    changes = {"data.num_clients": 200, "data.num_items": 60, "simulation.evaluate_every": 5}
    changes |= {"reconstruct.method": "steps", "reconstruct.pull": 0.0, "keep.best": "rmse"}
    changes |= {
        "update.schedule": "linear:0.1",
        "reconstruct.schedule": "cosine",
        "server.schedule": "warmup_cosine:4",
    }
    changes |= {"stop.metric": "rmse", "stop.patience": 1}
    sweep("planted", grid={"server.rate": [0.1, 0.3]}, rounds=30, out=tmp_path / "sweep", changes=changes)
    lengths = set()
    for rate in (0.1, 0.3):
        (folder,) = (tmp_path / "sweep").glob(f"server.rate={rate}*")
        found = load(folder)
        alone = train("planted", rounds=30, changes={**changes, "server.rate": rate})
        assert found.summary["side_by_side"] == 2
        assert found.summary["rounds"] == alone.summary["rounds"]
        assert bool(found.summary["stopped"]) == bool(alone.summary["stopped"])
        assert found.summary["best_model"]["round"] == alone.summary["best_model"]["round"]
        assert found.best.params.keys() == alone.best.params.keys()
        assert found.test["rmse"] == pytest.approx(alone.test["rmse"], rel=1e-3, nan_ok=True)
        lengths.add(found.summary["rounds"])
    assert len(lengths) == 2  # one stopped early, the other did not
