"""`partwise recommend`, and all commands on a run of code that only `module:function` names, each in a process of
its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CODE = """
import partwise as pw
from partwise.data import by_client, planted_ratings
from partwise.tasks.ratings import ratings_task

def make_task(dim: int = 2) -> pw.Task:
    store = planted_ratings(num_clients=40, num_items=20, rank=2, mean_examples=12).store
    return ratings_task(store, dim=dim)

def another() -> pw.Task:
    return make_task(dim=7)
"""
MINE = "item,rating\n1,5\n2,1\n5,4\n"


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with code and a client's table; one process trains there."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "films.py").write_text(CODE)
    (folder / "mine.csv").write_text(MINE)
    done = run(folder, "train", "films:make_task", "--set", "data.dim=3", *SMALL)
    assert done["task"] == "films:make_task"
    return folder


SMALL = ["--rounds", "3", "--cohort", "5", "--set", "simulation.lanes=2", "--out", "run"]


def run(folder, *arguments: str, state: str = "state") -> dict:
    """What a command prints with --json, in a new process."""
    env = {**os.environ, "XDG_STATE_HOME": str(folder / state)}
    command = [sys.executable, "-m", "partwise.cli", *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return json.loads(done.stdout)


def test_a_run_of_ones_own_code_goes_all_the_way(here):
    told = run(here, "evaluate", "run")
    assert told["rmse"] == pytest.approx(
        json.loads((here / "run" / "summary.json").read_text())["test"]["rmse"]
    )
    assert run(here, "personalize", "run", "--client", "mine.csv", "--out", "me.safetensors")["examples"] == 3
    local = ("--local", "me.safetensors")
    outputs = run(here, "predict", "run", *local, "--client", "mine.csv")["predictions"]
    found = run(here, "recommend", "run", *local, "-k", "30")["recommended"]
    assert len(found) == 20
    scores = {each["id"]: each["score"] for each in found}
    assert [scores[row["item"]] for row in outputs] == pytest.approx([row["output"] for row in outputs])
    left = run(here, "recommend", "run", *local, "--exclude", "mine.csv")["recommended"]
    assert [each["id"] for each in left] == [each["id"] for each in found if each["id"] not in (1, 2, 5)][:10]
    about = run(here, "export", "run", *local, "--out", "out", "--format", "numpy")
    assert list(about["rows"]) == ["model.npz"]


def test_code_of_somebody_elses_run_must_be_named(here):
    told = run(here, "evaluate", "run", state="other")["error"]
    assert "was not made by you on this machine" in told
    assert "--task films:make_task" in told
    assert "rmse" in run(here, "evaluate", "run", "--task", "films:make_task", state="other")
    told = run(here, "evaluate", "run", "--task", "films:another")["error"]
    assert "(20, 3)" in told or "data" in told


def test_a_file_does_not_choose_code(here, output, mistake, monkeypatch):
    told = mistake("train", "--config", str(here / "run" / "config.toml"), "--out", str(here / "new"))
    assert "films:make_task" in told
    assert "name it yourself" in told


def test_the_table_for_people(run_folder, tmp_path, capsys):
    from partwise.cli import main

    (tmp_path / "mine.csv").write_text("item,rating\n1,5\n2,1\n999,1\n")
    local = str(tmp_path / "me")
    assert main(["personalize", str(run_folder), "--client", str(tmp_path / "mine.csv"), "--out", local]) == 0
    capsys.readouterr()
    command = [
        "recommend",
        str(run_folder),
        "--local",
        local,
        "-k",
        "3",
        "--exclude",
        str(tmp_path / "mine.csv"),
    ]
    assert main(command) == 0
    told = capsys.readouterr()
    assert "item" in told.out
    assert "score" in told.out
    assert len([line for line in told.out.splitlines() if line.startswith("│")]) == 3
    assert "1 row of" in told.err  # the item that the model does not know


def test_mistakes(run_folder, tmp_path, mistake):
    (tmp_path / "mine.csv").write_text("item,rating\n1,5\n")
    folder, local = str(run_folder), str(tmp_path / "me")
    assert "without which it predicts nothing" in mistake("recommend", folder)
    assert "personalize" in mistake("recommend", folder, "--local", str(tmp_path / "none"))
    from partwise.cli import main

    assert main(["personalize", folder, "--client", str(tmp_path / "mine.csv"), "--out", local]) == 0
    assert "1 or more" in mistake("recommend", folder, "--local", local, "-k", "0")
    assert "no model was fetched" in mistake("recommend", "https://nowhere.example", "--local", local)
