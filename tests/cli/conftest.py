"""What tests of the command line share: a small run, and what commands print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from partwise.cli import main

OPTIONS = {"data.num_clients": 50, "data.num_items": 25, "data.mean_examples": 12, "data.dim": 3}
SMALL = [word for key, value in OPTIONS.items() for word in ("--set", f"{key}={value}")]
SMALL += ["--set", "simulation.lanes=2", "--cohort", "5", "--rounds", "4"]


@pytest.fixture(scope="session")
def small() -> list[str]:
    """Arguments of a small training on generated ratings."""
    return SMALL


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A small run; a module's own, because some tests go on with it."""
    out = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", "planted", *SMALL, "--out", str(out)]) == 0
    return out


@pytest.fixture
def output(capsys) -> Callable[..., Any]:
    """What a command prints with --json."""

    def run(*arguments: str) -> Any:
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def mistake(capsys) -> Callable[..., str]:
    """The paragraph that a mistake gets, having checked that it is one, without a traceback."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        assert main(list(arguments)) == 2
        progress, sign, text = capsys.readouterr().err.strip().partition("partwise: ")
        assert sign
        assert not progress or progress.endswith("\n")  # what was told before, in lines of its own
        text = sign + text
        assert "Traceback" not in text
        assert "\n\n" not in text
        return " ".join(text.split())

    return run
