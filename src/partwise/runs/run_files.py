"""The files of a run, as they are, for people who compare runs. Nothing here needs JAX, the task or its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from partwise.checkpoint import load_json, load_text
from partwise.config.settings import parse_toml
from partwise.runs.records import read_records
from partwise.types import UserError

SWEEP = "sweep.json"
FAILED = "failed.json"  # of a run of a sweep whose training went wrong


class RunFiles(NamedTuple):
    """What the folder of a run holds.

    path:     the folder
    settings: config.toml as dotted keys
    begun:    start.json: the data's fingerprint, lanes, devices
    records:  metrics.jsonl
    summary:  summary.json; None if the run has not ended
    failed:   why its training went wrong; empty if it did not
    """

    path: Path
    settings: Mapping[str, Any]
    begun: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] | None
    failed: str = ""

    @property
    def seed(self) -> int:
        return int(self.settings.get("seed", 0))

    @property
    def evaluations(self) -> list[tuple[int, Mapping[str, Any]]]:
        """(round, metrics of the validation clients), in order."""
        return [(record["round"], record["evaluation"]) for record in self.records if record["evaluation"]]


def read_run(path: str | Path) -> RunFiles:
    """Read the folder of a run. Raises `UserError` if it holds none, or if a file is damaged."""
    path = Path(path)
    if not (path / "config.toml").is_file():
        raise UserError(
            f"'{path}' holds no run (there is no config.toml in it): give the folder of a run, as `partwise train` "
            f"names it at its end, or of a sweep"
        )
    settings = parse_toml(load_text(path / "config.toml"))
    begun = load_json(path / "start.json")
    records = read_records(path / "metrics.jsonl", begun["run"])
    summary = load_json(path / "summary.json") if (path / "summary.json").exists() else None
    return RunFiles(path, settings, begun, records, summary, failure(path))


def failure(path: Path) -> str:
    """Why the training of a sweep's run went wrong; empty if it did not."""
    return str(load_json(path / FAILED)["error"]) if (path / FAILED).exists() else ""


def read_runs(paths: Sequence[str | Path]) -> list[RunFiles]:
    """Read runs. The folder of a sweep stands for all its runs that have begun."""
    found: dict[Path, RunFiles] = {}
    for path in paths:
        for each in runs_in(Path(path)):
            found.setdefault(each.resolve(), read_run(each))
    if not found:
        raise UserError(
            "there is no run to compare: give the folders of runs, as in `partwise compare runs/*`"
        )
    return list(found.values())


def runs_in(path: Path) -> list[Path]:
    """The folder itself, or those of all runs of a sweep that have begun."""
    if (path / "config.toml").exists() or not (path / SWEEP).exists():
        return [path]
    return sorted(file.parent for file in path.glob("*/config.toml"))
