"""Callbacks: what follows a run while it trains.

A callback is three functions, and each may be left out. It sees every recorded round exactly once, in order, from
the first on. When a run is resumed, the rounds that it has already are shown again before the next one is run. So
what a callback decides depends on the records alone, and a resumed run ends as one that nobody interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.config.settings import Config
from partwise.runs.recorder import Recorder
from partwise.simulation.exchange import agreed
from partwise.tasks import Task
from partwise.types import UserError

SHOWN = 1000  # recorded rounds that are shown at once

Records = Sequence[Mapping[str, Any]]


class Start(NamedTuple):
    """A run before its next round.

    Attributes:
        config: All settings, resolved.
        task: What is trained.
        folder: Where the run is recorded; None if it is not.
        round: How many rounds it has already: 0, unless it is resumed.
        params: Gives the server's parameters as they are now, {path: array}.
    """

    config: Config
    task: Task
    folder: Path | None
    round: int
    params: Callable[[], dict[str, np.ndarray]]


class Callback(NamedTuple):
    """What follows a run. Every function may be left out.

    Attributes:
        begin: Called once with a `Start`, before anything else.
        rounds: Called with the next records, as in metrics.jsonl; those of evaluated rounds have an `evaluation`.
            If it returns a text, the run ends after the last of these rounds, and the text is the reason.
        end: Called with the summary when the run has ended.
    """

    begin: Callable[[Start], None] = lambda start: None
    rounds: Callable[[Records], str | None] = lambda records: None
    end: Callable[[Mapping[str, Any]], None] = lambda summary: None


def check_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """The callbacks. Raises `UserError` if something else is among them."""
    given = (callbacks,) if isinstance(callbacks, Callback) else tuple(callbacks)
    for each in given:
        if not isinstance(each, Callback):
            raise UserError(
                f"a callback is a Callback, not a {type(each).__name__}: give its functions by name, as in "
                f"callbacks=[pw.Callback(rounds=function)]"
            )
    return given


class Followed:
    """A run with its callbacks, and the reason why it ends before its last round (empty: it does not). Of several
    processes, the first decides."""

    def __init__(self, callbacks: Sequence[Callback], start: Start):
        self._callbacks, self.reason = callbacks, ""
        self._may_end = agreed(bool(callbacks))
        for each in callbacks:
            each.begin(start)

    def show(self, records: Records) -> None:
        """Show recorded rounds to all callbacks. The first reason to stop is kept."""
        if records:
            self._look(records)
            self._decide()

    def show_again(self, recorder: Recorder) -> None:
        """Show the rounds that a resumed run has already."""
        rounds = recorder.iterate() if self._callbacks else iter(())
        for some in _in_blocks(rounds):
            self._look(some)
        self._decide()

    def _look(self, records: Records) -> None:
        reasons = [_checked(each.rounds(records)) for each in self._callbacks]
        self.reason = self.reason or next((reason for reason in reasons if reason), "")

    def _decide(self) -> None:
        if self._may_end:
            self.reason = agreed(self.reason)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tell all callbacks that the run has ended."""
        for each in self._callbacks:
            each.end(summary)


def _checked(reason: Any) -> str | None:
    if not isinstance(reason, str | None):
        raise UserError(
            f"`rounds` of a callback returned {reason!r}: return a text, which ends the run, or None"
        )
    return reason


def _in_blocks(rounds: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while some := list(islice(rounds, SHOWN)):
        yield some
