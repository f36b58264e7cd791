"""What the coordinator of a federation decides, without any I/O: rows in, rows and answers out, time as a number.

A round is *open* while its tasks are worked on, *closing* while a process adds up its reports, and the next one
*waits* until enough clients are there. A device takes a task with a *lease*; a lease that ends without a report
means that the device is lost for this round, unless it comes back before the round closes. A round closes

* when all its tasks have reported, or as many as the cohort needs (over-selection),
* when all that have not reported are lost, and the quorum has reported,
* at its deadline, if the quorum has reported. If it has not, the round is tried again with other clients.

Reports are added up in the order of the cohort, whatever the order in which they came. So the model depends on who
reported, and on nothing else: it equals the plain backend's bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np

from partwise.checkpoint import from_bytes, to_bytes
from partwise.deployment.book import Book, ClientRow, RoundRow, TaskRow, VersionRow
from partwise.randomness import round_rng
from partwise.server.cohort import Recruiting, recruit
from partwise.server.messages import About, Invitation, about
from partwise.server.round import Accepted, Closed, Refused, Server, wrong_keys
from partwise.server.step import ServerState
from partwise.types import UserError


class Rules(NamedTuple):
    """How rounds are run. Times are in seconds.

    rounds:     how many there are
    quorum:     reports that a round needs
    deadline:   after which a round waits no longer
    lease:      that a device has for a task
    closing:    that a process has to close a round, before another one may
    fresh:      a device that has not asked for work for longer than this is not invited
    poll:       after which a device without work asks again
    at_least:   clients that must be there before a round opens (it needs those that it asks in any case)
    """

    recruiting: Recruiting
    seed: int
    rounds: int
    quorum: int
    deadline: float = 600.0
    lease: float = 120.0
    closing: float = 60.0
    fresh: float = 60.0
    poll: float = 1.0
    at_least: int = 0

    def check(self) -> Rules:
        """Itself, if a round can be closed by these rules."""
        if not 1 <= self.quorum <= self.recruiting.size:
            raise UserError(
                f"the quorum must be from 1 to the cohort's {self.recruiting.size} clients, not {self.quorum}"
            )
        for name in ("deadline", "lease", "closing", "fresh", "poll"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} must be more than 0 seconds, not {getattr(self, name)}")
        return self


class Work(NamedTuple):
    """What a device is given: invitations for some of its clients, and how long it has for them."""

    invitations: Sequence[Invitation]
    lease: float


class Wait(NamedTuple):
    """Nothing to do now: ask again after so many seconds; `ended` says that there will be nothing any more."""

    seconds: float
    ended: bool = False


class Due(NamedTuple):
    """A round that this process is to close now, with what was asked for and reported, in the cohort's order."""

    round: RoundRow
    tasks: Sequence[TaskRow]


Verdict = Literal["open", "close", "repeat"]


class Coordinator:
    """The decisions of a run. Every method is one transaction of the book."""

    def __init__(self, server: Server, rules: Rules):
        self.server, self.rules = server, rules.check()

    # Devices

    def join(self, book: Book, device: str, clients: Iterable[str], now: float) -> Refused | None:
        """A device says which clients it has. A name that another device has is refused."""
        others = book.join([ClientRow(name, device) for name in clients])
        if others:
            return Refused("client", f"client '{others[0]}' is on another device")
        book.see(device, now, ready=True)
        return None

    def poll(self, book: Book, device: str, now: float, ready: bool = True, most: int = 1) -> Work | Wait:
        """A device asks for work for at most so many of its clients; `ready` says that it may work at all.

        A device that asks has nothing to do. If it has taken a task, it was not told, or has forgotten it: it is
        given the task again.
        """
        book.see(device, now, ready)
        row = self._opened(book, now)
        if row.phase == "ended":
            return Wait(self.rules.poll, ended=True)
        if row.phase != "open" or not ready:
            return Wait(self.rules.poll)
        mine = book.tasks_of(device, row.number, row.attempt)
        free = [task for task in mine if task.state != "reported"]
        if not free[:most]:
            return Wait(self.rules.poll)
        book.lease([task.id for task in free[:most]], now + self.rules.lease)
        return Work([self._invitation(task) for task in free[:most]], self.rules.lease)

    def grant(
        self, book: Book, device: str, task: str, keys: Mapping[str, np.ndarray], now: float
    ) -> TaskRow | Refused:
        """A client asks for slices: its keys are noted, once and for all."""
        row = self._current(book, device, task)
        if isinstance(row, Refused):
            return row
        before = from_bytes(row.keys)[0] if row.keys is not None else None
        refused = wrong_keys(self.server.algorithm.partition, keys, before)
        if refused:
            return refused
        row = row._replace(
            keys=row.keys or to_bytes(keys), state="leased", lease_until=now + self.rules.lease
        )
        book.put_tasks([row])
        return row

    def accept(self, book: Book, device: str, report: bytes, now: float) -> Accepted | Refused:
        """A device reports. What it reported before is accepted again, without effect: it may not have heard."""
        try:
            task = about(report).task
        except UserError as error:
            return Refused("malformed", str(error))
        row = self._current(book, device, task, report)
        if isinstance(row, Refused):
            return row
        keys = from_bytes(row.keys)[0] if row.keys is not None else None
        sent = self.server.read(self._about(row), keys, report)
        if isinstance(sent, Refused):
            return sent
        if row.state != "reported":
            book.put_tasks([row._replace(state="reported", report=report, lease_until=now)])
        return Accepted(row.client, bool(sent.valid))

    # Rounds

    def due(self, book: Book, process: str, now: float) -> Due | None:
        """The round, if this process is to close it now; nobody else is until `closing` seconds have passed."""
        row = self._opened(book, now)
        if row.phase not in ("open", "closing"):
            return None
        row = book.round("alone")
        if row.phase not in ("open", "closing") or (row.phase == "closing" and row.closing_until > now):
            return None
        verdict = "close" if row.phase == "closing" else self._verdict(book, row, now)
        if verdict == "repeat":
            book.put_round(row._replace(attempt=row.attempt + 1, phase="waiting"))
        if verdict != "close":
            return None
        row = row._replace(phase="closing", closer=process, closing_until=now + self.rules.closing)
        book.put_round(row)
        return Due(row, book.filled_tasks(row.number, row.attempt))

    def close(self, state: ServerState, due: Due) -> Closed:
        """Add up what was reported. It needs no book, and the same reports always give the same bits."""
        number, attempt = due.round.number, due.round.attempt
        now = self.server.begin(state, number, self.rng(number), self.rules.seed, attempt)
        now.invite(task.client for task in due.tasks)
        for task in due.tasks:
            if task.keys is not None:
                now.grant(task.id, from_bytes(task.keys)[0])
        for task in due.tasks:
            if task.report is not None:
                verdict = now.accept(task.report)
                if isinstance(verdict, Refused):
                    raise UserError(f"a report of '{task.client}' in the journal is not one: {verdict.what}")
        return now.close()

    def commit(self, book: Book, due: Due, file: str, record: str = "{}") -> bool:
        """Publish the next version, whose state is in `file`; False if another process was quicker."""
        row = book.round("alone")
        if (row.number, row.attempt, row.closer) != (due.round.number, due.round.attempt, due.round.closer):
            return False
        number = row.number + 1
        book.put_version(VersionRow(number, file, record))
        phase = "ended" if number >= self.rules.rounds else "waiting"
        book.put_round(RoundRow(number, 0, phase))
        return True

    def rng(self, number: int) -> jax.Array:
        """The randomness of a round."""
        return round_rng(self.rules.seed, number)

    def _opened(self, book: Book, now: float) -> RoundRow:
        """The round; opened, if it waits and there are enough clients."""
        row = book.round()
        if row.phase != "waiting":
            return row
        there, wanted = book.present(now - self.rules.fresh), self.rules.recruiting
        if len(there) < max(wanted.asked, self.rules.at_least):
            return row
        row = book.round("alone")
        if row.phase != "waiting":
            return row
        # All that are asked are invited; whether one has enough examples, its device knows.
        wanted = wanted._replace(size=wanted.asked, over_selection=1, dropout=0, min_examples=0)
        draw = row.number + (row.attempt << 32)
        cohort = recruit(wanted, np.zeros(len(there)), self.rules.seed, draw)
        chosen = [there[place] for place in cohort.clients]
        tasks = [
            TaskRow(
                self.server.about(row.number, client.name, row.attempt).task,
                row.number,
                row.attempt,
                place,
                client.name,
                client.device,
            )
            for place, client in enumerate(chosen)
        ]
        row = row._replace(phase="open", opened=now)
        book.put_round(row)
        book.put_tasks(tasks)
        return row

    def _verdict(self, book: Book, row: RoundRow, now: float) -> Verdict:
        tasks = book.tasks(row.number, row.attempt)
        reported = sum(task.state == "reported" for task in tasks)
        lost = sum(task.state == "leased" and task.lease_until <= now for task in tasks)
        wanted = self.rules.recruiting
        if reported >= (wanted.size if wanted.over_selection > 1 else len(tasks)):
            return "close"
        over = now >= row.opened + self.rules.deadline
        if over or reported + lost == len(tasks):
            if reported >= self.rules.quorum:
                return "close"
            return "repeat" if over else "open"
        return "open"

    def _current(self, book: Book, device: str, task: str, report: bytes | None = None) -> TaskRow | Refused:
        """A task of this device in the open round; or one that has sent just this report before."""
        here, row = book.round("share"), book.task(task)
        if row is None or row.device != device:
            return Refused("task", f"this device has no task {task}")
        if row.state == "reported":
            same = report is not None and row.report == report
            return row if same else Refused("duplicate", f"task {task} has reported already")
        if (row.number, row.attempt) != (here.number, here.attempt) or here.phase != "open":
            return Refused("closed", f"task {task} came too late: its round is closed")
        return row

    def _about(self, row: TaskRow) -> About:
        return self.server.about(row.number, row.client, row.attempt)

    def _invitation(self, row: TaskRow) -> Invitation:
        return Invitation(self._about(row), row.client, self.rules.seed, row.number)
