"""What a coordinator tells devices to do, and a process to close."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from partwise.deployment.book import Kind, RoundRow, TaskRow
from partwise.server.messages import Invitation

ADVERTISE, SHARE, MASK, UNMASK = range(4)  # stages of a round with masked sums (`deployment.stages`)


class Job(NamedTuple):
    """One task, as a device is told: train or evaluate for a client, or train several and report their sum (then
    the invitation's client is "")."""

    kind: Kind
    invitation: Invitation
    slices: str = ""  # the file that leads to the slices, if they are files
    clients: tuple[str, ...] = ()  # all clients of the task


class Work(NamedTuple):
    """What a device is given: tasks for some of its clients, and how many seconds it has for each of them."""

    jobs: Sequence[Job]
    lease: float


class Wait(NamedTuple):
    """Nothing to do now: ask again after so many seconds; `ended` says that there will be nothing any more."""

    seconds: float
    ended: bool = False


class Due(NamedTuple):
    """A round that this process is to close now, with its tasks in the cohort's order. They are without bytes,
    which `deployment.one_by_one` reads."""

    round: RoundRow
    tasks: Sequence[TaskRow]


# What is to become of a round. `next`: its next stage begins (`deployment.stages`).
Verdict = Literal["open", "next", "close", "repeat"]
