"""What a coordinator remembers: clients, the round, tasks. Rows, and the book that holds them.

The coordinator reads and writes these rows and nothing else. `Book` is what it needs of a transaction;
`deployment.journal` keeps the rows in a database, and `MemoryBook` in a dict, for tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

Phase = Literal["waiting", "open", "closing", "ended"]
Lock = Literal["none", "share", "alone"]
TaskState = Literal["open", "leased", "reported"]


class ClientRow(NamedTuple):
    """One client: the owner of some examples on a device. A device may have many clients."""

    name: str
    device: str


class RoundRow(NamedTuple):
    """The round that is going on. Its number is the version of the model that it starts from."""

    number: int = 0
    attempt: int = 0
    phase: Phase = "waiting"
    opened: float = 0.0
    closer: str = ""  # the process that closes it
    closing_until: float = 0.0  # if that process is not done by then, another one may


class VersionRow(NamedTuple):
    """A version of the model that was published."""

    number: int  # how many rounds made it
    file: str  # where its state is
    record: str  # of the round that made it, as JSON


class TaskRow(NamedTuple):
    """One client's work in a round."""

    id: str
    number: int
    attempt: int
    place: int  # in the cohort: reports are added up in this order
    client: str
    device: str
    state: TaskState = "open"
    lease_until: float = 0.0  # 0: nobody has begun with it
    keys: bytes | None = None
    report: bytes | None = None


class Book(Protocol):
    """The rows, as one transaction sees them: all of its writes happen, or none."""

    def round(self, lock: Lock = "none") -> RoundRow:
        """The round. Until this transaction ends, nobody else changes it ("share"), or reads it to share or change
        it ("alone")."""
        ...

    def put_round(self, row: RoundRow) -> None:
        """Replace it."""
        ...

    def join(self, clients: Sequence[ClientRow]) -> list[str]:
        """Add clients. Returns the names that are another device's, which stay there."""
        ...

    def see(self, device: str, now: float, ready: bool) -> None:
        """A device has asked for work; `ready` says that it may work (charging, unmetered, idle ...)."""
        ...

    def present(self, since: float) -> list[ClientRow]:
        """Clients on devices that were ready when last seen, which was not before `since`, sorted by name: who
        joined first must not matter."""
        ...

    def task(self, task: str) -> TaskRow | None:
        """One task, which nobody else changes until this transaction ends."""
        ...

    def tasks(self, number: int, attempt: int) -> list[TaskRow]:
        """The tasks of a round, by place, without the bytes of keys and reports."""
        ...

    def filled_tasks(self, number: int, attempt: int) -> list[TaskRow]:
        """The same with all their bytes."""
        ...

    def tasks_of(self, device: str, number: int, attempt: int) -> list[TaskRow]:
        """Those of one device, by place, without the bytes of keys and reports."""
        ...

    def put_tasks(self, rows: Iterable[TaskRow]) -> None:
        """Add them, or replace those of the same ids."""
        ...

    def lease(self, tasks: Iterable[str], until: float) -> None:
        """Lease these tasks until then; their bytes stay."""
        ...

    def put_version(self, row: VersionRow) -> None:
        """Add a version of the model."""
        ...

    def version(self, number: int) -> VersionRow | None:
        """The version that so many rounds made."""
        ...


class MemoryBook:
    """A book in memory."""

    def __init__(self) -> None:
        self._round = RoundRow()
        self._clients: dict[str, ClientRow] = {}
        self._seen: dict[str, tuple[float, bool]] = {}
        self._tasks: dict[str, TaskRow] = {}
        self._versions: dict[int, VersionRow] = {}

    def round(self, lock: Lock = "none") -> RoundRow:
        """As `Book.round`."""
        return self._round

    def put_round(self, row: RoundRow) -> None:
        """As `Book.put_round`."""
        self._round = row

    def join(self, clients: Sequence[ClientRow]) -> list[str]:
        """As `Book.join`."""
        for row in clients:
            self._clients.setdefault(row.name, row)
        return [row.name for row in clients if self._clients[row.name].device != row.device]

    def see(self, device: str, now: float, ready: bool) -> None:
        """As `Book.see`."""
        self._seen[device] = (now, ready)

    def present(self, since: float) -> list[ClientRow]:
        """As `Book.present`."""
        there = {device for device, (seen, ready) in self._seen.items() if ready and seen >= since}
        return sorted(row for row in self._clients.values() if row.device in there)

    def task(self, task: str) -> TaskRow | None:
        """As `Book.task`."""
        return self._tasks.get(task)

    def tasks(self, number: int, attempt: int) -> list[TaskRow]:
        """As `Book.tasks`."""
        return [row._replace(keys=None, report=None) for row in self.filled_tasks(number, attempt)]

    def filled_tasks(self, number: int, attempt: int) -> list[TaskRow]:
        """As `Book.filled_tasks`."""
        rows = [row for row in self._tasks.values() if (row.number, row.attempt) == (number, attempt)]
        return sorted(rows, key=lambda row: row.place)

    def tasks_of(self, device: str, number: int, attempt: int) -> list[TaskRow]:
        """As `Book.tasks_of`."""
        return [row for row in self.tasks(number, attempt) if row.device == device]

    def put_tasks(self, rows: Iterable[TaskRow]) -> None:
        """As `Book.put_tasks`."""
        self._tasks |= {row.id: row for row in rows}

    def lease(self, tasks: Iterable[str], until: float) -> None:
        """As `Book.lease`."""
        self.put_tasks(self._tasks[task]._replace(state="leased", lease_until=until) for task in tasks)

    def put_version(self, row: VersionRow) -> None:
        """As `Book.put_version`."""
        self._versions[row.number] = row

    def version(self, number: int) -> VersionRow | None:
        """As `Book.version`."""
        return self._versions.get(number)
