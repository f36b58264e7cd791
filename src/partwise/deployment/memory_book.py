"""A book in memory: the obvious twin of `deployment.journal`, for tests and for simulations of a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partwise.deployment.book import ClientRow, HasLeft, Kind, Lock, RoundRow, TaskCounts, TaskRow, VersionRow

HELD = ("open", "leased", "reported")  # states of tasks that go on


class MemoryBook:
    """`deployment.book.Book` in dicts. Methods are as there."""

    def __init__(self) -> None:
        self._round = RoundRow()
        self._clients: dict[str, ClientRow] = {}
        self._seen: dict[str, tuple[float, bool]] = {}
        self._tasks: dict[str, TaskRow] = {}
        self._versions: dict[int, VersionRow] = {}
        self._letters: dict[tuple[str, int], bytes] = {}
        self._turns: dict[str, int] = {}

    def round(self, lock: Lock = "none") -> RoundRow:
        """The round."""
        return self._round

    def put_round(self, row: RoundRow) -> None:
        """Replace it."""
        self._round = row

    def join(self, clients: Sequence[ClientRow], has_left: HasLeft) -> list[str]:
        """Add clients, or return the names of those that are another device's."""
        before = {row.name: self._clients.get(row.name, row).device for row in clients}
        others = [
            row.name for row in clients if before[row.name] != row.device and not has_left(before[row.name])
        ]
        if not others:
            self._clients |= {row.name: row for row in clients}
        return others

    def see(self, device: str, now: float, ready: bool) -> None:
        """A device has asked for work."""
        self._seen[device] = (now, ready)

    def num_present(self, since: float) -> int:
        """How many clients are present."""
        return len(self.present(since))

    def present(self, since: float) -> list[ClientRow]:
        """Clients on devices that are there and ready, sorted by name."""
        there = {device for device, (seen, ready) in self._seen.items() if ready and seen >= since}
        return sorted(row for row in self._clients.values() if row.device in there)

    def task(self, task: str) -> TaskRow | None:
        """One task with all its bytes."""
        return self._tasks.get(task)

    def whole(self, task: str) -> TaskRow | None:
        """The same."""
        return self._tasks.get(task)

    def put_tasks(self, rows: Iterable[TaskRow]) -> None:
        """Add or replace tasks."""
        self._tasks |= {row.id: row for row in rows}

    def tasks(self, kind: Kind, number: int, attempt: int) -> list[TaskRow]:
        """The tasks of a round, by place, without bytes."""
        return [_bare(row) for row in self._of_round(kind, number, attempt)]

    def tally(self, kind: Kind, number: int, attempt: int, now: float) -> TaskCounts:
        """How many clients these tasks have, have reported, and are lost."""
        tasks = self.tasks(kind, number, attempt)
        reported = [row.clients for row in tasks if row.state == "reported"]
        lost = [row.clients for row in tasks if row.state != "reported" and row.lease_until <= now]
        return TaskCounts(sum(row.clients for row in tasks), sum(reported), sum(lost))

    def tasks_of(self, device: str, most: int) -> list[TaskRow]:
        """Tasks that one device has to do."""
        return [_bare(row) for row in self._to_do(device)[:most]]

    def devices_with_tasks(self) -> set[str]:
        """The devices that have something to do."""
        return {row.device for row in self._tasks.values() if row.state in ("open", "leased")}

    def lease(self, device: str, tasks: Sequence[str], until: float) -> None:
        """Lease these tasks to a device until then."""
        mine = [row._replace(lease_until=until) for row in self._to_do(device)]
        self.put_tasks([row._replace(state="leased") if row.id in tasks else row for row in mine])

    def close_tasks(self, kind: Kind, number: int, attempt: int) -> None:
        """Those of a round that have not reported will not any more."""
        self.close_some(row.id for row in self._of_round(kind, number, attempt))

    def buffered(self, most: int) -> list[TaskRow]:
        """Training tasks that have reported and were not counted, without bytes."""
        return [_bare(row) for row in self._sorted() if _is_buffered(row)][:most]

    def num_buffered(self) -> int:
        """How many such tasks there are."""
        return sum(_is_buffered(row) for row in self._tasks.values())

    def busy(self, now: float) -> set[str]:
        """Clients whose training task is being worked on, or whose report was not counted yet."""
        at_work = lambda row: row.state in ("open", "leased") and row.lease_until > now
        tasks = [row for row in self._tasks.values() if row.kind == "train"]
        return {row.client for row in tasks if at_work(row) or _is_buffered(row)}

    def count(self, tasks: Iterable[str], version: int) -> None:
        """Note that these reports are in a version, and delete their bytes."""
        done = [self._tasks[task] for task in tasks]
        self.put_tasks([row._replace(counted=version, keys=None, report=None) for row in done])

    def forget(self, before: int) -> None:
        """Delete the tasks of versions before this one."""
        self._tasks = {id: row for id, row in self._tasks.items() if row.number >= before}

    def close_some(self, tasks: Iterable[str]) -> None:
        """These tasks will not report any more."""
        found = [self._tasks[task] for task in tasks]
        self.put_tasks([row._replace(state="closed") for row in found if row.state in ("open", "leased")])

    def hold(self, number: int, attempt: int, until: float) -> None:
        """The training tasks of a round are their devices' until then."""
        tasks = self._of_round("train", number, attempt)
        self.put_tasks([row._replace(lease_until=until) for row in tasks if row.state in HELD])

    def put_letter(self, task: str, stage: int, body: bytes) -> None:
        """Add the letter of a task in a stage."""
        self._letters[task, stage] = body

    def letter(self, task: str, stage: int) -> bytes | None:
        """The letter of a task in a stage."""
        return self._letters.get((task, stage))

    def letters(self, number: int, attempt: int, stage: int) -> dict[str, bytes]:
        """The letters of a round in a stage, by task."""
        tasks = {row.id for row in self.tasks("train", number, attempt)}
        return {task: body for (task, at), body in self._letters.items() if at == stage and task in tasks}

    def writers(self, number: int, attempt: int, stage: int) -> set[str]:
        """The tasks of these letters."""
        return set(self.letters(number, attempt, stage))

    def drop_letters(self, tasks: Iterable[str] | None = None) -> None:
        """Delete the letters of these tasks, or all."""
        gone = None if tasks is None else set(tasks)
        kept = {at: body for at, body in self._letters.items() if gone is not None and at[0] not in gone}
        self._letters = kept

    def put_turns(self, clients: Iterable[str], number: int) -> None:
        """These clients took part in a round."""
        self._turns |= dict.fromkeys(clients, number)

    def turns_since(self, number: int) -> set[str]:
        """The clients that took part in this round or in a later one."""
        return {client for client, last in self._turns.items() if last >= number}

    def put_version(self, row: VersionRow) -> None:
        """Add or change a version of the model."""
        self._versions[row.number] = row

    def version(self, number: int) -> VersionRow | None:
        """The version that so many rounds made."""
        return self._versions.get(number)

    def unevaluated(self) -> list[VersionRow]:
        """Versions whose evaluation was begun and has no metrics yet."""
        return [row for row in self._versions.values() if row.metrics == ""]

    def _to_do(self, device: str) -> list[TaskRow]:
        return [row for row in self._sorted() if row.device == device and row.state in ("open", "leased")]

    def _of_round(self, kind: Kind, number: int, attempt: int) -> list[TaskRow]:
        wanted = (kind, number, attempt)
        return [row for row in self._sorted() if (row.kind, row.number, row.attempt) == wanted]

    def _sorted(self) -> list[TaskRow]:
        return sorted(self._tasks.values(), key=lambda row: (row.number, row.attempt, row.place, row.id))


def _bare(row: TaskRow) -> TaskRow:
    return row._replace(keys=None, report=None)


def _is_buffered(row: TaskRow) -> bool:
    return row.kind == "train" and row.state == "reported" and row.counted is None
