"""What a coordinator remembers: clients, the round, tasks, versions. Rows, and the book that holds them.

The coordinator reads and writes these rows and nothing else. `Book` is what it needs of a transaction.
`deployment.journal` keeps the rows in a database, and `deployment.memory_book` in dicts, for tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

Phase = Literal["waiting", "open", "closing", "evaluating", "ended"]
Lock = Literal["none", "share", "alone"]
Kind = Literal["train", "evaluate"]
TaskState = Literal["open", "leased", "reported", "declined", "closed"]


class ClientRow(NamedTuple):
    """One client: the owner of some examples on a device. A device may have many clients."""

    name: str
    device: str


class RoundRow(NamedTuple):
    """The round that is going on. Its number is the version of the model that it starts from."""

    number: int = 0
    attempt: int = 0  # times that clients were drawn for it before
    phase: Phase = "waiting"
    opened: float = 0.0
    closer: str = ""  # the process that closes it
    closing_until: float = 0.0  # if that process is not done by then, another one may
    stage: int = 0  # of a round with masked sums (`deployment.stages`)
    staged: float = 0.0  # when it began


class VersionRow(NamedTuple):
    """A version of the model that was published."""

    number: int  # how many rounds made it
    file: str  # where its state is
    record: str  # of the round that made it, as JSON
    slices: str = ""  # where devices find its slices, if they are files
    metrics: str | None = None  # of its evaluation by held-out clients, as JSON


class TaskRow(NamedTuple):
    """Work for a version of the model, of one client, or of several clients of a device that report their sum."""

    id: str
    kind: Kind
    number: int  # the version
    attempt: int
    place: int  # in the cohort: reports are added up in this order
    client: str  # its name; of several, a JSON list of their names
    device: str
    state: TaskState = "open"
    lease_until: float = 0.0  # after this, the device counts as lost
    keys: bytes | None = None
    report: bytes | None = None
    digest: str | None = None  # of the report, which stays when the report is deleted
    counted: int | None = None  # the version that it helped to make
    clients: int = 1  # how many there are

    @property
    def names(self) -> tuple[str, ...]:
        """The clients."""
        return (self.client,) if self.clients == 1 else tuple(json.loads(self.client))

    @property
    def reported(self) -> bool:
        """Whether it has a report, which this row may be without."""
        return self.state == "reported"


class TaskCounts(NamedTuple):
    """How many clients the tasks of a round have: all, those of tasks that have reported, those of lost tasks."""

    clients: int
    reported: int
    lost: int


HasLeft = Callable[[str], bool]  # whether a device takes part no longer


class Book(Protocol):
    """The rows, as one transaction sees them: all of its writes happen, or none."""

    def round(self, lock: Lock = "none") -> RoundRow:
        """The round. Until this transaction ends, nobody else changes it ("share"), or reads it to share or change
        it ("alone")."""
        ...

    def put_round(self, row: RoundRow) -> None:
        """Replace it."""
        ...

    def join(self, clients: Sequence[ClientRow], has_left: HasLeft) -> list[str]:
        """Add clients, unless some of them are another device's that has not left: then add none, and return their
        names."""
        ...

    def see(self, device: str, now: float, ready: bool) -> None:
        """A device has asked for work; `ready` says that it may be given some."""
        ...

    def num_present(self, since: float) -> int:
        """How many clients `present` would return."""
        ...

    def present(self, since: float) -> list[ClientRow]:
        """Clients on devices that were ready when last seen, which was not before `since`, sorted by name: who
        joined first must not matter."""
        ...

    def task(self, task: str) -> TaskRow | None:
        """One task with all its bytes, which nobody else changes until this transaction ends."""
        ...

    def whole(self, task: str) -> TaskRow | None:
        """One task with all its bytes, as it is now."""
        ...

    def put_tasks(self, rows: Iterable[TaskRow]) -> None:
        """Add them, or replace those of the same ids."""
        ...

    def tasks(self, kind: Kind, number: int, attempt: int) -> list[TaskRow]:
        """The tasks of a round, by place, without bytes: together, their reports may be larger than memory."""
        ...

    def tally(self, kind: Kind, number: int, attempt: int, now: float) -> TaskCounts:
        """How many clients these tasks have: in all, in those that have reported, and in those that are lost."""
        ...

    def tasks_of(self, device: str, most: int) -> list[TaskRow]:
        """At most so many tasks that one device has to do, the oldest first, without bytes."""
        ...

    def devices_with_tasks(self) -> set[str]:
        """The devices that have something to do."""
        ...

    def lease(self, device: str, tasks: Sequence[str], until: float) -> None:
        """Lease these tasks to a device until then. Its other tasks are its until then too: it is at work."""
        ...

    def close_tasks(self, kind: Kind, number: int, attempt: int) -> None:
        """Those of a round that have neither reported nor declined will not any more."""
        ...

    def buffered(self, most: int) -> list[TaskRow]:
        """At most so many training tasks that have reported and were not counted, by version, attempt and place,
        without bytes."""
        ...

    def num_buffered(self) -> int:
        """How many such tasks there are."""
        ...

    def busy(self, now: float) -> set[str]:
        """Clients whose training task is being worked on, or whose report was not counted yet."""
        ...

    def count(self, tasks: Iterable[str], version: int) -> None:
        """Note that these reports are in a version, and delete their bytes."""
        ...

    def forget(self, before: int) -> None:
        """Delete the tasks of versions before this one."""
        ...

    def close_some(self, tasks: Iterable[str]) -> None:
        """Those of these tasks that have neither reported nor declined will not any more."""
        ...

    def hold(self, number: int, attempt: int, until: float) -> None:
        """Those training tasks of a round that are not closed or declined are their devices' until then."""
        ...

    def put_letter(self, task: str, stage: int, body: bytes) -> None:
        """Add the letter of a task in a stage, of which there is none yet."""
        ...

    def letter(self, task: str, stage: int) -> bytes | None:
        """The letter of a task in a stage."""
        ...

    def letters(self, number: int, attempt: int, stage: int) -> dict[str, bytes]:
        """The letters of a round in a stage, by task."""
        ...

    def writers(self, number: int, attempt: int, stage: int) -> set[str]:
        """The tasks of these letters."""
        ...

    def drop_letters(self, tasks: Iterable[str] | None = None) -> None:
        """Delete the letters of these tasks, or all."""
        ...

    def put_turns(self, clients: Iterable[str], number: int) -> None:
        """Note that these clients took part in the round of this number."""
        ...

    def turns_since(self, number: int) -> set[str]:
        """The clients that took part in this round or in a later one."""
        ...

    def put_version(self, row: VersionRow) -> None:
        """Add a version of the model, or change what is known of it."""
        ...

    def version(self, number: int) -> VersionRow | None:
        """The version that so many rounds made."""
        ...

    def unevaluated(self) -> list[VersionRow]:
        """Versions whose evaluation was begun and has no metrics yet."""
        ...
