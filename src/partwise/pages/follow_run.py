"""Follow a run by its files, while another process writes them. Only what was appended is read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from partwise.pages.details import with_details
from partwise.pages.moment import Moment, pace
from partwise.runs.folder import Folder
from partwise.runs.lock import has_writer
from partwise.runs.records import cannot_read, damaged_line, to_record
from partwise.runs.run_view import START_FILE, RunView, read_beside, read_run, tried
from partwise.runs.series import Series

PATIENCE, ROUNDS = (
    60.0,
    20,
)  # a run is stalled after so many seconds, and so many rounds' time, without a record


class FolderFollower:
    """A run's folder, looked at again and again. Raises `UserError` at once if it holds no run, and no process is
    about to begin one there."""

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time):
        self._path, self._clock = Path(path), clock
        self._begin()
        if not has_writer(path):
            self.folder.settings()

    def _begin(self) -> None:
        """Read from the first line on."""
        self.folder, self._series = Folder(self._path), Series()
        self._offset, self._file, self._problem = 0, (0, 0), ""

    def look(self) -> tuple[RunView, Moment]:
        """The run as it is now."""
        if not self._append():
            self._begin()  # the run went on from an earlier round, or the folder has another one
            self._append()
        run = self._view()
        return run, self._moment(run)

    def _append(self) -> bool:
        """Read the lines that are new. Returns whether they go on from those before them."""
        try:
            with open(self.folder.metrics, "rb") as file:
                found = os.fstat(file.fileno())
                if self._offset and (
                    (found.st_dev, found.st_ino) != self._file or found.st_size < self._offset
                ):
                    return False
                self._file = (found.st_dev, found.st_ino)
                file.seek(self._offset)
                return self._add(file.readlines())
        except FileNotFoundError:
            return not self._offset
        except OSError as error:
            self._problem = str(cannot_read(self.folder.metrics, error))
            return True

    def _add(self, lines: list[bytes]) -> bool:
        self._problem = ""
        run, damaged = tried(lambda: self.folder.run, "")
        for line in () if damaged else lines:  # start.json is told with the other files
            if not line.endswith(b"\n"):  # it is still being written
                break
            number = len(self._series.rounds) + 1
            try:
                self._series.add(to_record(line, number, run))
            except ValueError as error:
                self._problem = str(damaged_line(self.folder.metrics, number, str(error)))
                return False
            self._offset += len(line)
        return True

    def _view(self) -> RunView:
        if not self.folder.exists() and has_writer(self._path):
            return RunView(self._path.resolve().name, {}, {}, self._series)
        run = read_beside(self.folder, self._series, self._problem)
        return with_details(read_run(self._path)) if run.state == "finished" else run  # with its last rounds

    def _moment(self, run: RunView) -> Moment:
        done = len(run.series.rounds)
        if run.problem:
            return Moment("damaged", run.problem)
        if run.ended and not has_writer(self._path):
            return Moment("finished", f"finished after {done:,} rounds")
        if (self._path / START_FILE).exists():
            return Moment(
                "serving", "this run is served to devices: watch its URL to see rounds as they come"
            )
        if run.state == "failed":
            return Moment("failed", run.failed)
        if not has_writer(self._path):
            go_on = f"partwise train --resume --out {self._path}"
            return Moment("stopped", f"stopped after round {done:,}; go on with `{go_on}`")
        quiet = self._quiet()
        if quiet > max(PATIENCE, ROUNDS * (pace(run) if done else 0)):
            return Moment(
                "stalled", f"no new round for {quiet / 60:.0f} minutes, though its process is there"
            )
        if not done:
            return Moment("starting", "compiling; no round is recorded yet")
        if done >= run.rounds:
            return Moment("evaluating", "all rounds are done: evaluating on the test clients")
        return Moment("training", "training")

    def _quiet(self) -> float:
        """Seconds since something was written."""
        written = self.folder.metrics if self.folder.metrics.exists() else self._path
        try:
            return self._clock() - written.stat().st_mtime
        except OSError:
            return 0.0
