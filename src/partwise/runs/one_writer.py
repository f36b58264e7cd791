"""The folder and the decisions of a run that several processes train: the first process writes and decides.

The others must agree before the first round, on settings and data too. To go on with a run, all read its folder.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from partwise.checkpoint import numbered, read_along
from partwise.config.settings import Config
from partwise.runs.document import to_plain
from partwise.runs.fingerprint import differences, fingerprint
from partwise.runs.folder import Folder, Saved
from partwise.simulation.exchange import agreed, agreeing, told
from partwise.simulation.processes import is_writer, num_processes
from partwise.tasks import Task
from partwise.types import UserError

HERE_ALONE = ("data.path",)  # settings that may differ between machines


class UnwrittenFolder(Folder):
    """The folder of a run, for a process that is not its writer: nothing is written, locked or removed. Of tables
    that are spread over the processes, it has a part, so that it takes part when the writer saves them."""

    writes = False

    def held(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def check_free(self) -> None:
        """Nothing: the writer looks, and its files may be there already."""

    def start(self, *begun: Any) -> None:
        """Nothing."""

    def save_config(self, config: Config) -> None:
        """Nothing."""

    def discard(self) -> None:
        """Nothing."""

    def append(self, rounds: Iterable[Mapping[str, Any]]) -> None:
        """Nothing."""

    def save_checkpoint(self, state: Any, round_number: int, capacity: Mapping[str, int]) -> None:
        """Nothing is written."""
        read_along(numbered(state), {})

    def save_model(
        self, params: Mapping[str, Any], header: Mapping[str, Any], place: str | Path = ""
    ) -> None:
        """Nothing is written."""
        read_along(params, header)

    def save_failure(self, reason: str) -> None:
        """Nothing."""

    def clear_failure(self) -> None:
        """Nothing."""

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        """Nothing."""


def open_folder(path: str | Path) -> Folder:
    """The folder of a run, as this process may use it."""
    return Folder(path) if is_writer() else UnwrittenFolder(path)


def go_on(folder: Folder, like: Any) -> Saved | None:
    """The checkpoint from which a run goes on (see `Folder.go_on`), the same in all processes."""
    saved = None
    with agreeing():
        if folder.writes:
            saved = folder.go_on(like)
    number = agreed(saved.round if saved else 0)
    with agreeing():
        if number and saved is None:
            saved = folder.checkpoint(number, like)
    return saved


def check_same(task: Task, config: Config) -> None:
    """Raise `UserError` in all processes if one of them has other settings or other data than the first."""
    if num_processes() == 1:
        return
    flat = {key: value for key, value in config.flat().items() if key not in HERE_ALONE}
    mine = {"settings": to_plain(flat), "data": fingerprint(task)}
    first, *others = (json.loads(text) for text in told(json.dumps(mine).encode()))
    with agreeing():
        for number, other in enumerate(others, 1):
            found = _other_settings(first["settings"], other["settings"]) or _other_data(first, other)
            if found:
                raise UserError(
                    f"process 0 and process {number} do not train the same: {found}. Start all processes with the "
                    f"same command, on the same data."
                )


def _other_settings(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    names = [key for key in {**first, **other} if first.get(key) != other.get(key)]
    return ", ".join(f"{key} is {first.get(key)} and {other.get(key)}" for key in names)


def _other_data(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return "; ".join(differences(first["data"], other["data"]))
