"""Follow a run that is served, by what its coordinator says to operators."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from partwise.pages.moment import Moment, pace
from partwise.runs.run_view import RunView
from partwise.runs.series import Series
from partwise.types import UserError, counted

AGAIN = 20  # versions that are asked for again, as their evaluations may have ended since
PATIENCE, ROUNDS = 120.0, 20  # as in `pages.follow_run`
PHASES = {
    "waiting": "waiting for devices",
    "open": "a round is open",
    "closing": "a round is being closed",
    "evaluating": "held-out clients evaluate the model",
    "ended": "the run has ended",
}


class CoordinatorFollower:
    """A coordinator, asked again and again.

    Args:
        url: Where it is, for people.
        ask: What it says of its status, with the records of versions after this one. Raises `UserError` if it does
            not answer.
    """

    def __init__(
        self, url: str, ask: Callable[[int], Mapping[str, Any]], clock: Callable[[], float] = time.time
    ):
        self._url, self._ask, self._clock = url, ask, clock
        self._records: dict[int, Mapping[str, Any]] = {}
        self._said: Mapping[str, Any] = ask(0)
        self._take()

    def look(self) -> tuple[RunView, Moment]:
        """The run as it is now. If the coordinator does not answer, as it was last."""
        try:
            self._said = self._ask(max(0, len(self._records) - AGAIN))
            self._take()
        except UserError as error:
            return self._view(), Moment("unreachable", f"{error}; trying again")
        return self._view(), self._moment()

    def _take(self) -> None:
        """Keep the records, and ask for those that did not fit into one answer."""
        while True:
            new = {each["round"]: each for each in self._said["versions"]}
            behind = bool(new) and max(new) < self._said["number"] and not new.keys() <= self._records.keys()
            self._records |= new
            if not behind:
                return
            self._said = self._ask(max(new))

    def _view(self) -> RunView:
        series = Series()
        for number in sorted(self._records):
            series.add(self._records[number])
        settings = {"rounds": self._said["rounds"], **self._said.get("settings", {})}
        name = PurePosixPath(self._url.rstrip("/")).name
        return RunView(name, settings, {}, series, ended=self._said["phase"] == "ended")

    def _moment(self) -> Moment:
        said, phase = self._said, str(self._said["phase"])
        words, devices = PHASES.get(phase, phase), _devices(said)
        if phase == "ended":
            return Moment("finished", words, devices)
        quiet = self._clock() - said["opened"] if phase == "open" else 0.0
        usual = pace(self._view())
        if quiet > max(PATIENCE, ROUNDS * usual if usual == usual else 0):
            return Moment("stalled", f"the round is open for {quiet / 60:.0f} minutes", devices)
        return Moment("serving", words, devices)


def _devices(said: Mapping[str, Any]) -> dict[str, str]:
    """What is known of devices. If clients are promised privacy, the coordinator does not say it."""
    told, tasks = {}, said.get("tasks")
    if said.get("waiting") is not None:
        told["devices that wait"] = f"{said['waiting']:,}"
    if tasks:
        told["reports of this round"] = f"{tasks['reported']:,} of {tasks['asked']:,}, {tasks['lost']:,} lost"
    if said.get("attempt"):
        told["tried again"] = counted(said["attempt"], "time")
    if said.get("refused") is not None:
        told["reports refused"] = f"{sum(said['refused'].values()):,}"
    if said.get("errors") is not None:
        told["errors of the server"] = f"{said['errors']:,}"
    return told
