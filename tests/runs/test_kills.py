"""Killed at random moments, again and again, and resumed: every way ends in the same bytes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from partwise.runs.folder import Folder

CHANGES = {
    "data.num_clients": 200,
    "data.num_items": 60,
    "data.mean_examples": 15,
    "data.dim": 4,
    "cohort.size": 20,
    "rounds": 4000,
    "simulation.rounds_per_call": 10,
    "simulation.evaluate_every": 250,
    "simulation.checkpoint_every": 250,
}
RUNS, SEED = int(os.environ.get("PARTWISE_KILLED_RUNS", "2")), 0
TRAIN = """
import json, sys
from partwise.runs.train import train
train("planted" if sys.argv[3] == "new" else None, out=sys.argv[1], resume=sys.argv[3] != "new",
      changes=json.loads(sys.argv[2]))
"""


def start(out: Path, changes: dict, begin: bool) -> subprocess.Popen:
    words = [str(out), json.dumps(changes if begin else {}), "new" if begin else "resume"]
    return subprocess.Popen([sys.executable, "-c", TRAIN, *words], stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> None:
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err


def recorded(out: Path) -> int:
    """How many rounds there are in the run's records so far."""
    file = out / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill_and_end(out: Path, rng: random.Random, times: int) -> int:
    """Begin a run and kill it so often, each time a little after it has got to some round (the first time
    before its first checkpoint), and go on with it; how often it was killed."""
    kills = 0
    for number in range(times):
        process = start(out, CHANGES, begin=not Folder(out).exists())
        last = CHANGES["rounds"] if number else CHANGES["simulation.checkpoint_every"]
        until = rng.randrange(recorded(out), last) if recorded(out) < last else last
        while process.poll() is None and recorded(out) < until:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        kills += process.poll() is None
        process.kill()
        process.communicate()
    process = start(out, CHANGES, begin=not Folder(out).exists())
    finish(process)
    return kills


@pytest.fixture
def busy():
    """Another process that keeps a core busy."""
    load = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    load.kill()
    load.wait()


@pytest.fixture
def uninterrupted(tmp_path):
    """The model's bytes of a run with so many lanes that nobody disturbed."""

    @cache
    def model(lanes: int) -> bytes:
        out = tmp_path / f"whole {lanes}"
        finish(start(out, CHANGES | {"simulation.lanes": lanes}, begin=True))
        return (out / "model.safetensors").read_bytes()

    return model


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_in_the_same_bytes(tmp_path, busy, uninterrupted):
    """With lanes that are chosen by the run that was begun, and may differ from one to the next."""
    kills, rng = 0, random.Random(SEED)
    for number in range(RUNS):
        out = tmp_path / str(number)
        kills += kill_and_end(out, rng, times=4)
        assert (out / "model.safetensors").read_bytes() == uninterrupted(Folder(out).begun()["lanes"])
        assert len(Folder(out).records()) == CHANGES["rounds"]
        assert not [path for path in out.rglob(".*") if path.is_file()]
    print(f"{kills} kills")
    assert kills >= RUNS
