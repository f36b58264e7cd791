"""Killed at random moments, again and again, and resumed: every way ends in the same bytes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from partwise.experiments.folder import Folder

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
TRAIN = """
import json, sys
from partwise.experiments.run import train
train("planted" if sys.argv[3] == "new" else None, out=sys.argv[1], resume=sys.argv[3] != "new",
      changes=json.loads(sys.argv[2]))
"""


def start(out: Path, changes: dict, begin: bool) -> subprocess.Popen:
    words = [str(out), json.dumps(changes if begin else {}), "new" if begin else "resume"]
    return subprocess.Popen([sys.executable, "-c", TRAIN, *words], stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> None:
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err


def kill_until_it_ends(out: Path, changes: dict, rng: random.Random, longest: float, most: int) -> int:
    """Begin it and kill it after up to so many seconds, most so often, beginning or resuming each time; how often
    it was killed."""
    kills = 0
    while True:
        process = start(out, changes, begin=not Folder(out).exists())
        if kills == most:
            finish(process)
            return kills
        try:
            process.wait(rng.uniform(0, longest))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            continue
        finish(process)
        return kills


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_in_the_same_bytes(tmp_path):
    """With lanes that are chosen, and another process that keeps a core busy."""
    load = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        began = time.monotonic()
        finish(start(tmp_path / "whole", CHANGES, begin=True))
        seconds = time.monotonic() - began
        kills, rng = 0, random.Random(0)
        for number in range(3):
            out = tmp_path / str(number)
            kills += kill_until_it_ends(out, CHANGES, rng, seconds, most=3)
            assert Folder(out).begun()["lanes"] == Folder(tmp_path / "whole").begun()["lanes"]
            expected, found = (folder / "model.safetensors" for folder in (tmp_path / "whole", out))
            assert found.read_bytes() == expected.read_bytes()
            assert len(Folder(out).records()) == CHANGES["rounds"]
            assert not [path for path in out.rglob(".*") if path.is_file()]
        assert kills
    finally:
        load.kill()
        load.wait()
