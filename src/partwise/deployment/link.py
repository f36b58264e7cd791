"""How a device reaches its run: the seam between an agent and a transport, and the wire format of small requests.

`deployment.http_link` is the seam over HTTP. Slices and reports are messages of `server.messages`; everything
else is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from partwise.deployment.coordinator import Wait, Work
from partwise.server.messages import About, Invitation
from partwise.server.round import Accepted, Refused
from partwise.types import UserError


class Offer(NamedTuple):
    """What a device needs to know of a run before it can take part."""

    run: str
    model: str  # digest of the model's leaves and their roles
    config: str  # all settings, as TOML
    options: Mapping[str, Any]  # what rebuilds the model without data
    shapes: Mapping[str, Any]  # of a row's value, by column
    vocabularies: Mapping[str, list]  # the source id of every key, by column
    client: str  # the column of clients


class Link(Protocol):
    """One device's way to its run."""

    def offer(self) -> Offer:
        """What the run is."""
        ...

    def join(self, clients: Iterable[str]) -> None:
        """Say which clients this device has. Raises `UserError` if one of them is on another device."""
        ...

    def poll(self, ready: bool, most: int) -> Work | Wait:
        """Ask for work for at most so many clients."""
        ...

    def slices(self, task: str, keys: Mapping[str, np.ndarray]) -> bytes | Refused:
        """Fetch the slices of a task's keys."""
        ...

    def report(self, report: bytes) -> Accepted | Refused:
        """Send a report."""
        ...


def write_answer(answer: Work | Wait) -> bytes:
    """The answer to a poll, as JSON."""
    if isinstance(answer, Wait):
        return json.dumps({"wait": answer.seconds, "ended": answer.ended}).encode()
    tasks = [each._asdict() | {"about": each.about._asdict()} for each in answer.invitations]
    return json.dumps({"tasks": tasks, "lease": answer.lease}).encode()


def read_answer(data: bytes) -> Work | Wait:
    """The inverse of `write_answer`."""
    try:
        found = json.loads(data)
        if "wait" in found:
            return Wait(float(found["wait"]), bool(found["ended"]))
        tasks = [Invitation(**{**each, "about": About(**each["about"])}) for each in found["tasks"]]
        return Work(tasks, float(found["lease"]))
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"the server's answer to a poll cannot be read: {error}") from None
