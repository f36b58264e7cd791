"""The seam between an agent and its way to the server: what a run is, what a device asks, what it is told.

An agent knows nothing of HTTP. It calls a `Link`, which sends requests to a server, or to the hub of the same
process in tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from partwise.deployment.jobs import Job, Wait, Work
from partwise.deployment.page_reader import Fetch
from partwise.server.messages import About, Invitation
from partwise.server.round import Accepted, Refused
from partwise.types import UserError

PROTOCOL = 1
# Why a device declines a task: it does not have the client; it has another model; the task, or what leads to its
# slices, makes no sense; the server refuses its report; the files of its slices are gone.
DECLINES = ("client", "model", "malformed", "refused", "gone")


class UnreachableError(Exception):
    """The server does not answer, or not as it should: try again later."""


class Offer(NamedTuple):
    """What a device needs to know of a run before it can take part."""

    run: str
    model: str  # digest of the model's leaves and their roles
    config: str  # all settings, as TOML
    settings: Mapping[str, Any]  # the same by dotted key
    leaves: Mapping[str, Any]  # path -> role, shape, dtype, space, psi
    options: Mapping[str, Any]  # what rebuilds the model without data
    shapes: Mapping[str, Any]  # of a row's value, by column
    types: Mapping[str, str]  # of a value, by column
    vocabularies: Mapping[str, list]  # the source id of every key, by column
    client: str  # the column of clients
    files: str = ""  # URL of the folder of files, if slices are files; "": the server's own
    helper: str = ""  # the helper's public key in hex, if there are two servers
    protocol: int = PROTOCOL


class Link(Protocol):
    """One device's way to its run."""

    def offer(self) -> Offer:
        """What the run is."""
        ...

    def join(self, clients: Iterable[str]) -> list[str]:
        """Say which clients this device has. Returns those that the server refuses: then none of the others has
        joined either. Raises `UserError` if it refuses for another reason than the clients' names."""
        ...

    def poll(self, ready: bool, most: int, status: Mapping[str, Any] | None = None) -> Work | Wait:
        """Ask for work for at most so many clients. `status` is what the device says of itself (battery, ...)."""
        ...

    def slices(self, task: str, keys: Mapping[str, np.ndarray]) -> bytes | Refused:
        """Fetch the slices of a task's keys."""
        ...

    def private(self, task: str, question: bytes) -> bytes | Refused:
        """Fetch slices without saying of which keys."""
        ...

    def files(self, url: str) -> Fetch:
        """What fetches files of slices from this URL; if it is empty, from the server itself."""
        ...

    def report(self, report: bytes) -> Accepted | Refused:
        """Send a report."""
        ...

    def decline(self, task: str, reason: str) -> Refused | None:
        """Say that this device will not do a task it was given, so that nobody waits for it. `reason` is one of
        `DECLINES`. Returns None, also if it was declined before; `Refused` if the task has reported, is closed,
        or is not this device's."""
        ...

    def send_letter(self, task: str, stage: int, letter: bytes) -> Refused | None:
        """Send a letter of a task, if sums are masked (`deployment.stages`)."""
        ...

    def answer(self, task: str, stage: int) -> bytes | Wait | Refused:
        """The server's answer to the letter of a stage; a `Wait` until the stage has ended."""
        ...


def write_answer(answer: Work | Wait) -> bytes:
    """The answer to a poll, as JSON."""
    if isinstance(answer, Wait):
        return json.dumps({"wait": answer.seconds, "ended": answer.ended}).encode()
    tasks = []
    for job in answer.jobs:
        told = job.invitation
        rest = {"about": told.about._asdict(), "slices": job.slices, "clients": job.clients}
        tasks.append({"kind": job.kind, **told._asdict(), **rest})
    return json.dumps({"tasks": tasks, "lease": answer.lease}).encode()


def read_answer(data: bytes) -> Work | Wait:
    """The inverse of `write_answer`."""
    try:
        found = json.loads(data)
        if "wait" in found:
            return Wait(float(found["wait"]), bool(found["ended"]))
        return Work([_job(each) for each in found["tasks"]], float(found["lease"]))
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"the server's answer to a poll cannot be read: {error}") from None


def _job(told: Mapping[str, Any]) -> Job:
    rest = {name: told[name] for name in ("client", "seed", "round")}
    kind = told["kind"]
    if kind not in ("train", "evaluate"):
        raise ValueError(f"a task of kind {kind!r}")
    clients = told["clients"]
    if not isinstance(clients, list) or not all(isinstance(each, str) for each in clients):
        raise ValueError("a task whose clients are not a list of names")
    return Job(kind, Invitation(About(**told["about"]), **rest), str(told["slices"]), tuple(clients))
