"""Following runs on the command line: stops, the best model, logs, and the metrics of every client."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from partwise.cli import main
from partwise.runs.folder import Folder

FOLLOW = ["--set", "stop.metric=rmse", "--set", "stop.patience=1", "--set", "keep.best=rmse"]
FOLLOW += ["--set", "simulation.evaluate_every=2", "--set", "server.schedule=constant"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, small) -> Path:
    out = tmp_path_factory.mktemp("follow") / "run"
    given = [*small, *FOLLOW, "--rounds", "100", "--out", str(out)]
    assert main(["train", "planted", *given]) == 0
    return out


def test_a_run_that_stops_says_why_and_its_best_model_can_be_used(stopped, output, capsys, tmp_path):
    summary = json.loads((stopped / "summary.json").read_text())
    assert summary["rounds"] < 100
    assert summary["stopped"].startswith("rmse got no better than")
    best = output("evaluate", str(stopped), "--model", "best")
    assert best["rmse"] == pytest.approx(summary["best_model"]["test"]["rmse"], rel=1e-6)
    mine, local = tmp_path / "mine.csv", str(tmp_path / "local.safetensors")
    mine.write_text("item,rating\n1,4.5\n2,3.0\n")
    run = (str(stopped), "--model", "best", "--client", str(mine))
    output("personalize", *run, "--out", local)
    assert len(output("predict", *run, "--local", local)["predictions"]) == 2
    assert main(["train", "--resume", "--out", str(stopped), "--quiet"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Ended before its last round: rmse got no better" in told
    assert f"The best model is of round {summary['best_model']['round']}" in told
    table, last = told.split("The last model, of round ")
    own = summary["best_model"]["test"]
    for name, found in own["over_clients"].items():
        assert f"{name} │ {own[name]:.4f} │ {found['mean']:.4f}" in table
        assert f"{name} {summary['test'][name]:.4f}" in last
    assert f"the best model, of round {summary['best_model']['round']}" in table


def test_every_client_in_a_file_and_by_group(stopped, output, capsys, mistake, tmp_path):
    file, groups = tmp_path / "clients.csv", tmp_path / "groups.csv"
    told = output("evaluate", str(stopped), "--per-client", str(file))
    lines = file.read_text().splitlines()
    assert len(lines) == 1 + told["clients"] + told["clients_without_examples"]
    assert told["fairness"]["rmse"]["mean"] == pytest.approx(told["over_clients"]["rmse"]["mean"])
    ids = [line.split(",")[0] for line in lines[1:]]
    groups.write_text("\n".join(["id,kind", *(f"{each},{'ab'[n % 2]}" for n, each in enumerate(ids))]))
    assert main(["evaluate", str(stopped), "--group", f"{groups}:id,kind"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("tenth") == 2
    assert "Between the best and the worst group's mean: rmse" in " ".join(shown.split())
    assert "should end in .csv or .parquet" in mistake("evaluate", str(stopped), "--per-client", "clients")
    assert "--group takes FILE.csv:CLIENT,COLUMN" in mistake("evaluate", str(stopped), "--group", "x.csv")
    assert "must be last or best" in mistake("evaluate", str(stopped), "--model", "first")


def test_wrong_settings_and_logs_are_refused_before_the_first_round(mistake, small, tmp_path):
    out = ("--out", str(tmp_path / "run"))
    assert "is no metric of this task: use one of rmse" in mistake(
        "train", "planted", *small, *out, "--set", "stop.metric=mse"
    )
    assert "unknown log 'tb'" in mistake("train", "planted", *small, *out, "--log", "tb")
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.slow
def test_killed_with_a_log_and_resumed(small, tmp_path):
    """kill -9 in the middle: the same best model, and every round once in the log."""
    pytest.importorskip("tensorboardX")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    given = [*small, "--rounds", "1500", "--set", "keep.best=loss", "--set", "simulation.evaluate_every=50"]
    train = [sys.executable, "-m", "partwise.cli", "train", "--log", "tensorboard", "--quiet"]
    whole, out = tmp_path / "whole", tmp_path / "run"
    subprocess.run([*train, "planted", *given, "--out", str(whole)], check=True, capture_output=True)
    process = subprocess.Popen([*train, "planted", *given, "--out", str(out)])
    metrics, last = out / "metrics.jsonl", time.monotonic() + 600
    while time.monotonic() < last and (not metrics.exists() or metrics.read_bytes().count(b"\n") < 730):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 0 < Folder(out).rounds_done() < 1500
    subprocess.run([*train, "--resume", "--out", str(out)], check=True, capture_output=True)
    for name in ("model.safetensors", "best.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    keep_all = {reader.SCALARS: 0}
    log = reader.EventAccumulator(str(out / "tensorboard"), keep_all).Reload()
    assert [each.step for each in log.Scalars("train/loss")] == list(range(1, 1501))
