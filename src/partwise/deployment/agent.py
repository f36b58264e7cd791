"""The device's side of a run: ask for work, train on one's own examples, report. Resident, so it compiles once.

An agent holds the examples of one client (a phone) or of many (a site). They stay here. What leaves is what
`Device.report` writes, and the keys that a client asks for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from partwise.algorithm import Algorithm
from partwise.data.store import ClientStore
from partwise.deployment.coordinator import Wait
from partwise.deployment.link import Link, UnreachableError
from partwise.device import Device
from partwise.server.messages import Invitation
from partwise.server.round import Refused

LONGEST_WAIT = 60.0  # seconds between two tries of a server that does not answer


class Worked(NamedTuple):
    """What came of one task."""

    client: str
    version: int
    accepted: bool
    reason: str = ""  # why not


class Agent:
    """A device with its clients.

    Args:
        link: The way to the run.
        algorithm: The run's algorithm.
        store: The clients' examples, with the columns that the model reads.
        ready: Whether the device may work now (charging, unmetered, idle ...).
        most: For how many clients it asks for work at a time.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        link: Link,
        algorithm: Algorithm,
        store: ClientStore,
        *,
        ready: Callable[[], bool] = lambda: True,
        most: int = 1,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._link, self._store, self._ready, self._most, self._sleep = link, store, ready, most, sleep
        self._device = Device(algorithm)
        self._places = {str(name): place for place, name in enumerate(store.client_ids.tolist())}
        self._kept: dict[str, dict[str, np.ndarray]] = {}

    def run(self) -> Iterator[Worked]:
        """Work until the run ends. A server that does not answer is tried again, later and later."""
        joined, tries = False, 0
        while True:
            try:
                if not joined:
                    self._link.join(self._places)
                    joined = True
                given = self._link.poll(self._ready(), self._most)
                if isinstance(given, Wait):
                    if given.ended:
                        return
                    self._sleep(given.seconds * random.uniform(0.8, 1.2))
                    continue
                for job in given.jobs:
                    yield self._work(job.invitation)
                tries = 0
            except UnreachableError:
                tries += 1
                self._sleep(min(LONGEST_WAIT, 0.5 * 2**tries) * random.uniform(0.5, 1.0))

    def _work(self, invitation: Invitation) -> Worked:
        """One task, from the choice of keys to the report."""
        client, here = invitation.client, invitation.about
        examples = self._store.gather([self._places[client]])
        asked = self._device.ask(examples, invitation.seed, invitation.round)
        message = self._link.slices(here.task, asked.keys)
        if isinstance(message, Refused):
            return Worked(client, here.version, accepted=False, reason=message.reason)
        report, kept = self._device.report_and_keep(message, examples, asked, self._kept.get(client))
        verdict = self._link.report(report)
        if isinstance(verdict, Refused):
            return Worked(client, here.version, accepted=False, reason=verdict.reason)
        if kept:
            self._kept[client] = kept
        return Worked(client, here.version, accepted=True)
