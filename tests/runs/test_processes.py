"""Two processes with a device each give what one process with two devices gives, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from partwise.runs.folder import Folder
from partwise.runs.train import train

TRAIN = """
import json, sys
import partwise as pw
from partwise.simulation import loop

task, changes, out, staged, several = json.loads(sys.argv[1])
if several:
    pw.join_processes()
if staged:
    loop.RESIDENT_BYTES = 0
run = pw.train(task, out=out, changes=changes, resume=task is None)
print(len(run.records), run.summary["device"])
"""
SMALL = {"data.num_clients": 40, "data.num_items": 30, "data.mean_examples": 12, "data.dim": 2}
SMALL |= {"cohort.size": 7, "rounds": 6, "simulation.rounds_per_call": 2, "simulation.evaluate_every": 3}
POSTS = {"data.num_clients": 60, "data.num_words": 120, "data.num_tags": 6, "data.mean_examples": 8}
POSTS |= {"data.words_per_example": 5, "cohort.size": 9, "rounds": 10, "simulation.rounds_per_call": 4}
PRIVATE = {"privacy.clip": 1.0, "privacy.noise": 0.5, "privacy.delta": 1e-5, "server.weighting": "uniform"}


def words(
    task: str | None, changes: dict, out: Path, staged: bool = False, several: bool = True
) -> list[str]:
    """The words of Python for a training."""
    return ["-c", TRAIN, json.dumps([task, changes, str(out), staged, several])]


def together(start, task: str | None, changes: dict, out: Path, staged: bool = False, **environment: str):
    """Train in two processes of one device each."""
    running = start(*2 * [words(task, changes, out, staged)], **environment)
    told = [each.communicate(timeout=1500) for each in running]
    for process, (said, err) in zip(running, told, strict=True):
        assert process.returncode == 0, err
        assert said.endswith(" 2 x cpu in 2 processes\n")
    return out


def alone(task: str | None, changes: dict, out: Path, staged: bool = False) -> Path:
    """Train in one process of two devices."""
    command = [sys.executable, *words(task, changes, out, staged, several=False)]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def assert_same(one: Path, other: Path) -> None:
    """The same models, bit for bit, and the same records except for seconds."""
    for name in ("model.safetensors", "best.safetensors"):
        assert (one / name).exists() == (other / name).exists()
        if (one / name).exists():
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert [told(record) for record in Folder(one).records()] == [
        told(record) for record in Folder(other).records()
    ]
    first, second = Folder(one).summary(), Folder(other).summary()
    for name in ("test", "rounds", "stopped", "best_model", "lanes", "bytes_down_per_client", "privacy"):
        assert first[name] == second[name], name


def told(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "seconds"}


def test_a_script_that_is_started_twice(start_together, tmp_path):
    """Process 0 alone writes; the other has the same records, read from the folder."""
    changes = SMALL | {"simulation.lanes": 2, "keep.best": "rmse", "server.optimizer": "adam"}
    train("planted", out=tmp_path / "one", changes=changes)
    together(start_together, "planted", changes, tmp_path / "two")
    assert_same(tmp_path / "one", tmp_path / "two")
    assert not list(tmp_path.rglob("*.tmp"))


CASES = {
    "tags": ("tags-planted", POSTS | {"algorithm": "fed_select"}),
    "choices": (
        "tags-planted",
        POSTS | {"algorithm": "fed_select", "select.word": "with_random:10", "server.optimizer": "lazy_adam"},
    ),
    "scaffold": ("tags-planted", POSTS | {"algorithm": "scaffold", "rounds": 6}),
    "next word": ("next-word-planted", {"data.num_clients": 30, "cohort.size": 5, "rounds": 4}),
    "noise": ("planted", SMALL | PRIVATE | {"data.num_items": 3000}),
    "whole numbers": ("planted", SMALL | PRIVATE | {"privacy.noise": 0, "privacy.sums": "masked"}),
    "stops": (
        "planted",
        SMALL
        | {"rounds": 60, "server.rate": 3.0, "stop.metric": "rmse", "stop.patience": 2, "keep.best": "rmse"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "staged"),
    [
        *((case, False) for case in CASES),
        *((case, True) for case in ("tags", "choices", "scaffold", "stops")),
    ],
)
def test_two_processes_equal_two_devices(start_together, tmp_path, case, staged):
    """Also if each process reads the clients of its own devices only."""
    task, changes = CASES[case]
    changes = changes | {"simulation.lanes": 2}
    alone(task, changes, tmp_path / "one", staged)
    together(start_together, task, changes, tmp_path / "two", staged)
    assert_same(tmp_path / "one", tmp_path / "two")
