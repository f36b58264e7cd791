"""Runs: what is recorded, and that a killed run goes on as if it had never stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from partwise.data import planted_ratings
from partwise.runs.evaluation import evaluate_run
from partwise.runs.folder import Folder
from partwise.runs.train import train
from partwise.tasks.ratings import ratings_task
from partwise.types import UserError

SMALL = {
    "data.num_clients": 60,
    "data.num_items": 30,
    "data.mean_examples": 15,
    "data.dim": 4,
    "cohort.size": 6,
    "rounds": 12,
    "simulation.rounds_per_call": 3,
    "simulation.evaluate_every": 6,
    "simulation.checkpoint_every": 3,
    "simulation.lanes": 2,
    "server.schedule": "constant",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small run that was not interrupted."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return train("planted", out=out, changes=SMALL), Folder(out)


def test_a_run_folder_holds_what_the_contract_says(whole):
    run, folder = whole
    records = folder.records()
    assert [record["round"] for record in records] == list(range(1, 13))
    wanted = {"round", "seconds", "clients", "examples", "train", "bytes_down", "bytes_up", "evaluation"}
    assert all(wanted <= record.keys() for record in records)
    assert [record["round"] for record in records if record["evaluation"]] == [6, 12]
    summary = folder.summary()
    wanted = "task algorithm seed rounds seconds_total seconds_compile seconds_per_round test bytes_down_per_client"
    wanted += " bytes_up_per_client peak_memory_mb versions"
    assert set(wanted.split()) <= summary.keys()
    assert summary["test"]["rmse"] == pytest.approx(run.test["rmse"])
    assert summary["best"]["rmse"] < summary["test"]["rmse"]
    assert (folder.path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert folder.config() == run.config
    assert set(folder.model()) == {"item", "default/user"}


def test_bytes_of_a_client_are_its_rows(whole):
    run, _ = whole
    record = run.records[0]
    shared = 4 * 4 * record["clients"]  # the learned default, 4 floats each
    assert record["bytes_down"] == shared + 4 * 4 * record["examples"]
    assert record["bytes_up"] == record["bytes_down"] + 4 * record["examples"]  # a key is 4 bytes


def test_a_run_goes_on_bit_for_bit(whole, tmp_path):
    run, _ = whole
    train("planted", out=tmp_path / "run", changes={**SMALL, "rounds": 6})
    resumed = train("planted", out=tmp_path / "run", resume=True, changes={"rounds": 12})
    for path, leaf in run.params.items():
        np.testing.assert_array_equal(resumed.params[path], leaf)
    assert [r["train"] for r in resumed.records] == [r["train"] for r in run.records]


RUN = """
import json, sys
from partwise.runs.train import train
train("planted", out=sys.argv[1], changes=json.loads(sys.argv[2]))
"""


def test_killed_at_any_moment_and_resumed_equals_uninterrupted(whole, tmp_path):
    run, _ = whole
    out = tmp_path / "run"
    command = [sys.executable, "-c", RUN, str(out), json.dumps(SMALL)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    checkpoints, waited = out / "checkpoints", time.monotonic()
    while not list(checkpoints.glob("*.safetensors")) and time.monotonic() - waited < 600:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(checkpoints.glob("*.safetensors")), "it ended before its first checkpoint"
    resumed = train("planted", out=out, resume=True)
    assert [record["round"] for record in Folder(out).records()] == list(range(1, 13))
    for path, leaf in run.params.items():
        np.testing.assert_array_equal(resumed.params[path], leaf)


def test_killed_before_the_first_checkpoint_leaves_no_round_twice(tmp_path):
    out = tmp_path / "run"
    train("planted", out=out, changes={**SMALL, "rounds": 3})
    for checkpoint in (out / "checkpoints").iterdir():
        checkpoint.unlink()
    train("planted", out=out, resume=True)
    assert [record["round"] for record in Folder(out).records()] == [1, 2, 3]


def test_a_resumed_run_keeps_its_configuration(whole):
    _, folder = whole
    with pytest.raises(UserError, match=r"reconstruct.pull was 0.5 and is 3.0.*only the number of rounds"):
        train("planted", out=folder.path, resume=True, changes={"reconstruct.pull": 3.0})
    with pytest.raises(UserError, match="already holds a run"):
        train("planted", out=folder.path, changes=SMALL)


def test_a_falling_rate_cannot_be_made_longer(tmp_path):
    changes = {**SMALL, "server.schedule": "cosine", "rounds": 2}
    train("planted", out=tmp_path / "run", changes=changes)
    with pytest.raises(UserError, match="changes over its 2 rounds"):
        train("planted", out=tmp_path / "run", resume=True, rounds=4)


def test_never_evaluating_and_never_saving_is_possible(tmp_path):
    changes = {**SMALL, "simulation.evaluate_every": 0, "simulation.checkpoint_every": 0, "rounds": 4}
    run = train("planted", out=tmp_path / "run", changes=changes)
    assert [record["round"] for record in run.records if record["evaluation"]] == [4]


def test_a_full_disk_leaves_the_last_checkpoint_intact(tmp_path, monkeypatch):
    out = tmp_path / "run"
    real = os.fsync
    calls = {"left": 12}

    def full(handle):
        calls["left"] -= 1
        if calls["left"] < 0:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr("partwise.checkpoint.os.fsync", full)
    with pytest.raises(UserError, match=r"No space left on device.*untouched.*--resume"):
        train("planted", out=out, changes=SMALL)
    monkeypatch.undo()
    assert Folder(out).rounds_done() == 3
    assert not list(out.rglob("*.tmp"))
    assert len(train("planted", out=out, resume=True).records) == 12


def test_evaluating_a_recorded_run_again_gives_its_test_metrics(whole):
    run, folder = whole
    assert evaluate_run(folder.path)["rmse"] == pytest.approx(run.test["rmse"], rel=1e-6)
    other = evaluate_run(folder.path, changes={"reconstruct.method": "skip"})
    assert other["rmse"] > run.test["rmse"]
    with pytest.raises(UserError, match="split must be one of"):
        evaluate_run(folder.path, "tset")


def test_plain_and_compiled_backends_train_the_same_model():
    changes = {**SMALL, "rounds": 2}
    compiled = train("planted", changes=changes)
    plain = train("planted", changes={**changes, "simulation.backend": "plain"})
    for path, leaf in compiled.params.items():
        np.testing.assert_allclose(plain.params[path], leaf, rtol=1e-4, atol=1e-5)


def test_over_selection_and_dropouts_are_recorded():
    changes = {**SMALL, "cohort.over_selection": 1.5, "cohort.dropout": 0.3, "cohort.min_examples": 12}
    records = train("planted", changes=changes).records
    assert all(r["clients"] + r["empty"] + r["dropped"] + r["too_small"] + r["spare"] == 9 for r in records)
    assert sum(r["dropped"] for r in records) > 0
    assert sum(r["too_small"] for r in records) > 0


@pytest.mark.parametrize("algorithm", ["fed_avg", "central"])
def test_other_algorithms_run_on_the_default_task(algorithm):
    changes = {key: value for key, value in SMALL.items() if key != "cohort.size"}  # central has no cohort
    run = train("planted", changes={**changes, "algorithm": algorithm, "rounds": 3})
    assert np.isfinite(run.test["rmse"])


def test_a_small_population_without_validation_clients_is_told_so():
    store = planted_ratings(num_clients=4, num_items=20, mean_examples=12, seed=3).store
    run = train(ratings_task(store, dim=2), changes={"rounds": 2, "cohort.size": 2, "simulation.lanes": 1})
    assert run.records[-1]["evaluation"]["clients"] == 0
    assert run.test["clients"] == 1


def test_every_call_is_told_once(tiny):
    seen = []
    train("planted", changes=tiny | {"simulation.evaluate_every": 4}, progress=seen.append)
    told = [status for status in seen if not isinstance(status, str)]
    assert [status.round for status in told] == [2, 4, 6]
    assert [status.evaluation is not None for status in told] == [False, True, True]


@pytest.mark.parametrize("lanes", [0, 1])
def test_lanes_are_said_to_be_measured_only_if_they_are(tiny, lanes):
    said = []
    train("planted", changes=tiny | {"simulation.lanes": lanes}, told=said.append)
    assert [("measuring" in each) for each in said if "compiling" in each] == [lanes == 0]


@pytest.mark.parametrize("backend", ["compiled", "plain"])
def test_an_update_in_closed_form_learns_and_tells_its_loss(tiny, backend):
    closed = {"update.method": "solve", "data.initial": "zero", "simulation.backend": backend}
    run = train("planted", changes=tiny | closed)
    losses = [record["train"]["loss"] for record in run.records]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


def test_a_closed_form_of_what_is_not_least_squares_is_refused(tiny):
    with pytest.raises(UserError, match="least squares in the shared and keyed part, but this loss is not"):
        train("planted", changes=tiny | {"update.method": "solve", "algorithm": "fed_avg"})
