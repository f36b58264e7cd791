"""What tests of runs share: a tiny run that has ended, copied for every test that harms it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from partwise.runs.train import train

TINY = {
    "data.num_clients": 20,
    "data.num_items": 12,
    "data.mean_examples": 10,
    "data.dim": 2,
    "cohort.size": 4,
    "rounds": 6,
    "simulation.rounds_per_call": 2,
    "simulation.checkpoint_every": 2,
    "simulation.evaluate_every": 3,
    "simulation.lanes": 2,
    "server.schedule": "constant",
}


@pytest.fixture(scope="session")
def tiny() -> dict[str, Any]:
    """Settings of a run of seconds."""
    return dict(TINY)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> Path:
    """The folder of such a run; nobody writes to it."""
    out = tmp_path_factory.mktemp("tiny") / "run"
    train("planted", out=out, changes=TINY)
    return out


@pytest.fixture
def copied(tiny_run, tmp_path) -> Path:
    """A copy of the tiny run."""
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


@pytest.fixture(scope="session")
def flip() -> Callable[[Path, int], None]:
    """Flip one bit of a file."""

    def flipped(path: Path, bit: int) -> None:
        data = bytearray(path.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(data))

    return flipped
