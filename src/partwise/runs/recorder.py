"""Where the rounds of a run are recorded: in its folder as they come, or in memory if there is no folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from partwise.runs.folder import Folder
from partwise.runs.records import iterate_records
from partwise.runs.tally import Tally


class Recorder:
    """Records rounds and tallies them. If a run continues, the tally starts with the rounds that the folder
    has."""

    def __init__(self, folder: Folder | None):
        self.folder, self.tally = folder, Tally()
        self._kept: list[dict[str, Any]] = []  # only if there is no folder
        if folder and folder.metrics.exists():
            for record in iterate_records(folder.metrics, folder.run):
                self.tally.add(record)

    def add(self, rounds: Sequence[Mapping[str, Any]]) -> None:
        """Record the next rounds."""
        if self.folder:
            self.folder.append(rounds)
        else:
            self._kept += map(dict, rounds)
        for record in rounds:
            self.tally.add(record)

    def iterate(self) -> Iterator[dict[str, Any]]:
        """All rounds so far, one after the other."""
        if self.folder is None:
            return iter(self._kept)
        return iterate_records(self.folder.metrics, self.folder.run) if self.tally.rounds else iter(())

    def records(self) -> list[dict[str, Any]]:
        """All rounds so far."""
        return self.folder.records() if self.folder else list(self._kept)
