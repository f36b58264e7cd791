"""A run as it is looked at by `compare`, `sweep`, `report` and `watch`. This needs no JAX, no task and no data.

The files of a folder are read as far as they can be, and what is wrong with them is told in words (`problem`). Who
needs whole runs asks for them with `whole`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from partwise.data.heat import Heat
from partwise.runs.folder import Folder
from partwise.runs.records import give_records
from partwise.runs.series import Series
from partwise.types import UserError

SWEEP = "sweep.json"
HEAT_FILE, START_FILE = "heat.safetensors", "first.safetensors"  # of a run that is deployed
Content = TypeVar("Content")


class RunView(NamedTuple):
    """A run as it is looked at.

    name:     of its folder
    settings: config.toml as dotted keys; empty if it cannot be read
    summary:  summary.json without what is null; empty if the run has not ended
    series:   its rounds
    problem:  what is wrong with its files, in words; empty if nothing is
    ended:    whether all its rounds were run
    path:     the folder, as it was given
    begun:    start.json: the data's fingerprint, lanes, devices
    failed:   why its training went wrong; empty if it did not
    heats:    how many clients hold each key, if a page has asked for it (`pages.details`)
    clients:  {metric: [clients]} of the test clients, if a page has asked for it
    """

    name: str
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    series: Series
    problem: str = ""
    ended: bool = False
    path: Path = Path()
    begun: Mapping[str, Any] = {}
    failed: str = ""
    heats: Mapping[str, Heat] = {}
    clients: Mapping[str, Any] = {}

    @property
    def rounds(self) -> int:
        """How many rounds the run shall have."""
        return int(self.settings.get("rounds") or 0)

    @property
    def seed(self) -> int:
        """The seed of the training."""
        return int(self.settings.get("seed") or 0)

    @property
    def state(self) -> str:
        """finished, failed, unfinished or damaged."""
        if self.problem or self.ended:
            return "damaged" if self.problem else "finished"
        return "failed" if self.failed else "unfinished"


def read_run(path: str | Path) -> RunView:
    """Read the folder of a run. Raises `UserError` if it holds none."""
    folder, series = Folder(path), Series()
    if not folder.exists():
        folder.settings()  # says what there is instead
    run, _ = tried(lambda: folder.run, "")  # without start.json, no round can be checked
    error = give_records(folder.metrics, run, series.add) if run else None
    return read_beside(folder, series, str(error or ""))


def read_beside(folder: Folder, series: Series, problem: str = "") -> RunView:
    """Read what the folder holds beside these rounds. `problem` is what is wrong with them."""
    settings, unset = tried(folder.settings, {})
    begun, unbegun = tried(folder.begun, {})
    summary, unsummed = tried(lambda: _read_summary(folder, len(series.rounds)), {})
    failed, untold = tried(folder.failure, "")
    problems = "; ".join(filter(None, (unset, unbegun, problem, unsummed, untold)))
    ended = bool(summary) or _has_been_served(folder.path)
    name = folder.path.resolve().name
    return RunView(name, settings, summary, series, problems, ended, folder.path, begun, failed)


def tried(read: Callable[[], Content], otherwise: Content) -> tuple[Content, str]:
    """What was read, and what is wrong with it; empty if nothing is."""
    try:
        return read(), ""
    except UserError as error:
        return otherwise, str(error)


def _read_summary(folder: Folder, rounds: int) -> dict[str, Any]:
    """summary.json; empty if there is none yet, or if the run goes on after it."""
    told = known(folder.summary()) if (folder.path / "summary.json").exists() else {}
    return told if told.get("rounds", 0) >= rounds else {}


def known(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without what is null. Runs of other versions may have less, and that is the same to a reader."""
    inside = lambda value: known(value) if isinstance(value, Mapping) else value
    return {name: inside(value) for name, value in document.items() if value is not None}


def _has_been_served(path: Path) -> bool:
    """Whether a run that was deployed, which has no summary, has ended."""
    return (path / START_FILE).exists() and (path / "model.safetensors").exists()


def read_runs(paths: Iterable[str | Path]) -> list[RunView]:
    """Read runs. The folder of a sweep stands for all its runs that have begun. A run that is given twice is read
    once, as it is no second seed."""
    once = {run.resolve(): run for path in paths for run in _runs_in(Path(path))}
    if not once:
        raise UserError(
            "no run was given, or none of the sweep has begun: give the folders of one or more, as `partwise "
            "train` names them at its end"
        )
    return [read_run(path) for path in once.values()]


def _runs_in(path: Path) -> list[Path]:
    """The folder itself, or those of all runs of a sweep that have begun."""
    if (path / "config.toml").exists() or not (path / SWEEP).exists():
        return [path]
    return sorted(file.parent for file in path.glob("*/config.toml"))


def whole(run: RunView) -> RunView:
    """The same run. Raises `UserError` if a file of it is damaged."""
    if run.problem:
        raise UserError(run.problem)
    return run
