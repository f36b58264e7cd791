"""How a server gives out tasks and makes versions, and what comes of it. The rules are those of a network's
coordinator (docs/deployment.md)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partwise.simulation.fleet.flight import Flight
from partwise.types import UserError


class Tempo(NamedTuple):
    """When versions are made. Times are in seconds.

    seed:        of the clients and devices that are drawn
    size:        reports that a round wants
    asked:       devices that a round asks
    quorum:      reports that a round needs
    deadline:    after which a round waits no longer
    buffer:      reports that make a version, without rounds; 0: rounds
    concurrency: tasks that are not in the model yet, with a buffer
    stalest:     versions after which a late report is refused, with a buffer
    """

    seed: int
    size: int
    asked: int
    quorum: int
    deadline: float
    buffer: int = 0
    concurrency: int = 0
    stalest: int = 20

    def check(self) -> Tempo:
        """Itself, if versions can be made so."""
        if not 1 <= self.quorum <= self.size <= self.asked:
            raise UserError(
                f"a round needs a quorum of 1 to the {self.size} reports that it wants, and asks no fewer devices: "
                f"the quorum is {self.quorum}, and {self.asked} are asked"
            )
        if self.buffer > self.concurrency:
            raise UserError(
                f"a buffer of {self.buffer} reports is never full with {self.concurrency} tasks at a time: raise "
                f"deploy.concurrency, or lower deploy.buffer"
            )
        return self

    @property
    def at_once(self) -> int:
        """The most devices that work at the same time."""
        return self.concurrency if self.buffer else self.asked


class Window(NamedTuple):
    """The time between two versions, or in which one was to be made and was not (`made` is False)."""

    number: int  # of the version that is current in it
    opened: float
    closed: float
    made: bool
    started: Flight  # tasks that were taken in it
    members: Flight  # those whose reports make the next version, in the order in which they were taken
    unused: np.ndarray  # clients of tasks whose reports are refused, because they are too old or too late
