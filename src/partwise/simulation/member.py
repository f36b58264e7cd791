"""One run of a `Sweep`, as what runs the rounds of a run. All members advance together, call by call."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from typing import Any

import jax
import numpy as np

from partwise.metrics import to_host
from partwise.server.record import Record
from partwise.server.step import ServerState
from partwise.simulation.backend import calls_of, copied
from partwise.simulation.many_runs import Sweep
from partwise.types import UserError


class Together:
    """A sweep whose members ask for their rounds in turns. The first that asks lets all of them advance, so the
    others must be done with the state before."""

    def __init__(self, runs: Sweep):
        self.runs = runs
        self._records: list[list[Record]] = []
        self._host: tuple[int, Any] | None = None  # round, and the states after it

    def members(self) -> list[Member]:
        """A member for every run."""
        return [Member(self, number) for number in range(len(self.runs.seeds))]

    def records(self, number: int, first: int, count: int) -> list[Record]:
        """The records of one run, of `count` rounds after round `first`."""
        if self.runs.round == first:
            self._records, self._host = self.runs.call(count), None
        if self.runs.round != first + count or len(self._records[number]) != count:
            raise UserError(
                f"runs side by side have come to different rounds ({first} and {self.runs.round}): remove the "
                f"folders of those that have not ended, and run them again"
            )
        return self._records[number]

    def state(self, number: int) -> ServerState:
        """The state of one run, on the host."""
        if self._host is None or self._host[0] != self.runs.round:
            self._host = self.runs.round, to_host(self.runs.state)
        return jax.tree_util.tree_map(lambda leaf: leaf[number], self._host[1])

    def resume(self, number: int, state: ServerState, round_number: int) -> None:
        """Continue one run from a state after this round. All must come to the same round before they go on."""
        self.runs.put(number, state)
        self.runs.round, self._host = round_number, None


class Member:
    """One of several runs side by side (a `Backend`)."""

    capacity: Mapping[str, int] = {}

    def __init__(self, together: Together, number: int):
        self._together, self._number = together, number
        self.algorithm, self.lanes, self.round = together.runs.algorithm, together.runs.lanes, 0

    @property
    def state(self) -> ServerState:
        return self._together.state(self._number)

    def run(self, num_rounds: int, ends: Collection[int] = ()) -> Generator[list[Record], None, None]:
        """Run this many rounds. Raises `UserError` if the parameters of this run are no longer finite."""
        runs = self._together.runs
        for first, end in calls_of(self.round, self.round + num_rounds, runs.rounds_per_call, ends):
            records = self._together.records(self._number, first, end - first)
            self.round = end
            if self._number in runs.errors:
                raise runs.errors[self._number]
            yield records

    def restart(self, seed: int, rates: Mapping[str, float] | None = None) -> None:
        raise UserError("one of several runs side by side cannot start again alone: make another sweep")

    def current(self) -> Any:
        """Like `Simulation.current`."""
        return self.state, {}

    def snapshot(self) -> Any:
        """Like `Simulation.snapshot`."""
        return copied(self.current())

    def resume(self, saved: Any, round_number: int, capacity: Mapping[str, int] = {}) -> None:
        """Continue from a snapshot."""
        self._together.resume(self._number, saved[0], round_number)
        self.round = round_number

    def kept_of(self, client_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Nothing: runs side by side have no room for what clients keep."""
        return {}
