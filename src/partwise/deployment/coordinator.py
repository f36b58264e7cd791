"""What the coordinator of a federation decides, without any I/O: rows in, rows and answers out, time as a number.

A round is *open* while its tasks are worked on, *closing* while a process adds up its reports, and the next one
*waits* until enough clients are there. A device takes a task with a *lease*; a lease that ends without a report
means that the device is lost for this round, unless it comes back before the round closes. A device that *declines*
a task is lost for it at once. A round closes

* when all its tasks have reported, or as many as the cohort needs (over-selection),
* when all that have not reported are lost, and the quorum has reported,
* at its deadline, if the quorum has reported. If it has not, the round is tried again with other clients.

Reports are added up in the order of the cohort, whatever the order in which they came. So the model depends on who
reported, and on nothing else: it equals the plain backend's bit for bit. They are read one at a time: those of a
round may be larger than memory.

With a *buffer* (FedBuff; Nguyen et al., 2022) there are no rounds to wait for: a version is made of every
`buffer` reports, and tasks are given out so that `concurrency` of them are not in the model yet. A report for
an older version counts less (`Rules.staleness`). If buffer, concurrency and cohort are equal, this is the
synchronous run.

If devices report sums (`Rules.reports`), clients are drawn as always, and a device has one task for all of its
clients that were drawn. Cohort, quorum, over-selection and lost devices are counted in clients, those of a task
together: with over-selection, a round may so end with more clients than the cohort needs. A report may leave out
clients that the device does not have any more; its task has reported all the same.

If sums are masked, an open round goes through the stages of `deployment.stages`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import jax
import numpy as np

from partwise.checkpoint import from_bytes, to_bytes
from partwise.deployment.book import Book, ClientRow, HasLeft, Kind, RoundRow, TaskRow, VersionRow
from partwise.deployment.drawing import candidates, draw, drawn, note_turns
from partwise.deployment.jobs import MASK, Due, Job, Verdict, Wait, Work
from partwise.deployment.one_by_one import is_closed_by, summed_metrics
from partwise.deployment.rules import Rules
from partwise.deployment.stages import MaskedRounds, not_now, try_again
from partwise.randomness import round_rng
from partwise.server.cohort import Recruiting
from partwise.server.masked_form import MaskedForm
from partwise.server.messages import About, Invitation, about, read_metrics
from partwise.server.round import (
    Accepted,
    Closed,
    Refused,
    Reported,
    Round,
    Server,
    Size,
    wrong_keys,
    wrong_place,
)
from partwise.server.step import ServerState
from partwise.server.total import Total
from partwise.server.update_sizes import out_of_proportion
from partwise.types import UserError


class Coordinator:
    """The decisions of a run. Every method that has a book is one transaction of it."""

    def __init__(self, server: Server, rules: Rules):
        self.server, self.rules = server, rules.check()
        self.stages = MaskedRounds(server.run, self.rules) if isinstance(server.sealed, MaskedForm) else None

    # Devices

    def join(
        self,
        book: Book,
        device: str,
        clients: Iterable[str],
        has_left: HasLeft = lambda device: False,
    ) -> list[str]:
        """A device says which clients it has. Returns those that are another device's: then none joins. If that
        device takes part no longer, the client has moved."""
        return book.join([ClientRow(name, device) for name in clients], has_left)

    def poll(self, book: Book, device: str, now: float, ready: bool = True, most: int = 1) -> Work | Wait:
        """A device asks for work for at most so many of its clients; `ready` says that it may work at all.

        A device that asks has nothing to do. If it has taken a task, it was not told, or has forgotten it: it is
        given the task again.
        """
        book.see(device, now, ready)
        if book.round("share").phase == "ended":
            return Wait(self.rules.poll, ended=True)
        tasks = book.tasks_of(device, most) if ready else []
        if not tasks:
            return Wait(self.rules.poll)
        book.lease(device, [task.id for task in tasks], now + self.rules.lease)
        versions = {number: book.version(number) for number in {task.number for task in tasks}}
        return Work([self._job(task, versions[task.number]) for task in tasks], self.rules.lease)

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

    def renew(self, book: Book, device: str, task: str, now: float) -> TaskRow | Refused:
        """A device is at work on a task: its lease begins anew."""
        row = self._current(book, device, task)
        if isinstance(row, Refused):
            return row
        row = row._replace(state="leased", lease_until=now + self.rules.lease)
        book.put_tasks([row])
        return row

    def accept(self, book: Book, device: str, report: bytes, now: float) -> Accepted | Refused:
        """A device reports. What it reported before is accepted again, without effect: it may not have heard."""
        try:
            task = about(report).task
        except UserError as error:
            return Refused("malformed", str(error))
        digest = hashlib.sha256(report).hexdigest()
        row = self._current(book, device, task, digest)
        if isinstance(row, Refused):
            return row
        if row.state == "reported":
            return Accepted(_one(row), valid=True)
        refused = not_now(book.round("share"), row, MASK) if self.stages else None
        found = refused or self._read(row, report)
        if isinstance(found, Refused):
            return found
        keys, valid = found
        done = row._replace(state="reported", report=report, digest=digest, keys=keys, lease_until=now)
        book.put_tasks([done])
        return Accepted(_one(row), valid)

    def decline(self, book: Book, device: str, task: str) -> Refused | None:
        """A device will not do a task, which is lost at once. Declining again has no effect: the device may not
        have heard."""
        book.round("share")
        row = book.task(task)
        if row is None or row.device != device:
            return Refused("task", f"this device has no task {task}")
        if row.state == "reported":
            return Refused("duplicate", f"task {task} has reported already")
        if row.state == "closed":
            return Refused("closed", f"task {task} came too late: its round is closed")
        book.put_tasks([row._replace(state="declined", lease_until=0.0)])
        return None

    def _read(self, row: TaskRow, report: bytes) -> tuple[bytes | None, bool] | Refused:
        """The keys of a report's rows, and whether it is valid."""
        if row.kind == "evaluate":
            refused = wrong_place(about(report), self.about(row))
            try:
                return refused or (row.keys, bool(read_metrics(report)))
            except UserError as error:
                return Refused("malformed", str(error))
        keys = from_bytes(row.keys)[0] if row.keys is not None else None
        found = self.server.read(self.about(row), keys, report, row.clients)
        if isinstance(found, Refused):
            return found
        named = row.keys is None and not self.server.sealed  # the report has told its keys
        return to_bytes(found.keys) if named else row.keys, bool(found.sent.valid)

    # Rounds

    def open(self, book: Book, now: float) -> bool:
        """Draw clients, if it is time to. Returns whether there are new tasks."""
        row = book.round()
        if row.phase != "waiting" and not (self.rules.buffer and row.phase == "open"):
            return False
        since, wanted = now - self.rules.fresh, self._wanted(book, row, now)
        least = 1 if row.phase == "open" else max(self.rules.num_asked, self.rules.population)
        if wanted < 1 or book.num_present(since) < least:
            return False
        row = book.round("alone")
        if row.phase not in ("waiting", "open") or wanted != self._wanted(book, row, now):
            return False
        there = candidates(book, self.rules, row, now)
        number = min(wanted, len(there)) if row.phase == "open" else wanted
        if number < 1 or len(there) < max(number, self.rules.drawn_from):
            return False
        chosen = draw(self.rules, there, number, row)
        book.put_tasks(self._tasks("train", chosen, row.number, row.attempt, now + self.rules.lease))
        attempt = row.attempt + 1 if self.rules.buffer else row.attempt
        book.put_round(row._replace(phase="open", opened=row.opened or now, attempt=attempt, staged=now))
        return True

    def due(self, book: Book, process: str, now: float) -> Due | None:
        """The round, if this process is to close it now; nobody else is until `closing` seconds have passed. A
        process that asks again could not close it, and may try at once."""
        if self._verdict(book, book.round(), process, now) == "open":
            return None
        row = book.round("alone")
        verdict = self._verdict(book, row, process, now)
        if verdict == "open":
            return None
        if verdict == "next" and self.stages:
            self.stages.advance(book, row, now)
            return None
        if not self.rules.buffer:
            book.close_tasks("train", row.number, row.attempt)
        if verdict == "repeat":
            try_again(book, row)
            return None
        row = row._replace(phase="closing", closer=process, closing_until=now + self.rules.closing)
        book.put_round(row)
        if self.rules.buffer:
            return Due(row, book.buffered(self.rules.buffer))
        return Due(row, book.tasks("train", row.number, row.attempt))

    def repeat(self, book: Book, due: Due) -> None:
        """Try a round again with other clients that this process could not close."""
        row = book.round("alone")
        if is_closed_by(book, due):
            try_again(book, row)

    def close(
        self, state: ServerState, due: Due, read: Callable[[], Iterable[TaskRow]], earlier: float = 0.0
    ) -> Closed:
        """Add up what was reported. The same reports always give the same bits.

        Reports out of all proportion to the others are left out (`server.update_sizes`). If the next version would
        still not be finite, the model stays as it is, and all reports are left out.

        Args:
            state: The state before the round.
            due: The round.
            read: Reads its tasks with their bytes (`deployment.one_by_one`). Each is let go of before the
                next one is asked for. All are read again if some are left out.
            earlier: The largest usual norm of an update in the rounds before.
        """
        closed = self._add_up(state, due, read())
        # With privacy, what one client adds must not depend on the others.
        private = self.server.algorithm.aggregator.private
        outliers = [] if private else _out_of_proportion(closed.sizes, earlier)
        if outliers:
            closed = self._add_up(state, due, read(), {size.task for size in outliers})
        return _if_finite(state, closed, outliers)

    def _add_up(
        self, state: ServerState, due: Due, tasks: Iterable[TaskRow], without: Collection[str] = ()
    ) -> Closed:
        now = self._begin(state, due)
        for task in tasks:
            if task.report is not None and task.id not in without:
                self._include(now, due, task, task.report)
            del task
        return _closed(now, due)

    def close_sum(self, state: ServerState, due: Due, total: Total, num_bytes: int) -> Closed:
        """The same if reports are sealed, and this is their sum. `num_bytes` is the size of all of them."""
        now = self._begin(state, due)
        now.include_sum(total, sum(task.clients for task in due.tasks if task.reported), num_bytes)
        return _if_finite(state, _closed(now, due), [])

    def _begin(self, state: ServerState, due: Due) -> Round:
        number = due.round.number
        return self.server.begin(state, number, self.rng(number), self.rules.seed)

    def _include(self, now: Round, due: Due, task: TaskRow, report: bytes) -> None:
        keys = from_bytes(task.keys)[0] if task.keys else None
        found = self.server.read(self.about(task), keys, report, task.clients)
        if not isinstance(found, Reported):
            raise UserError(f"a report of '{task.client}' in the journal is not one: {found.what}")
        factor = (1.0 + due.round.number - task.number) ** -self.rules.staleness
        now.include(task.names, self.about(task), found, len(report), factor, task.clients)

    def commit(
        self, book: Book, due: Due, now: float, file: str, record: str = "{}", slices: str = ""
    ) -> bool:
        """Publish the next version, whose state is in `file`; False if another process was quicker."""
        row = book.round("alone")
        if not is_closed_by(book, due):
            return False
        number = row.number + 1
        book.count((task.id for task in due.tasks if task.reported), number)
        note_turns(book, self.rules, due.tasks, row.number)
        if self.stages:
            book.drop_letters()
        book.forget(number - max(self.rules.keep, self.rules.stalest if self.rules.buffer else 0))
        last = number >= self.rules.rounds
        every = self.rules.evaluate_every
        evaluates = bool(every) and (last or number % every == 0) and self._evaluate(book, number, now)
        book.put_version(VersionRow(number, file, record, slices, "" if evaluates else None))
        phase = "waiting" if not last else "evaluating" if evaluates else "ended"
        if phase == "waiting" and self.rules.buffer:
            book.put_round(RoundRow(number, 0, "open", now))
        else:
            book.put_round(RoundRow(number, 0, phase))
        return True

    # Evaluation

    def _evaluate(self, book: Book, number: int, now: float) -> bool:
        """Give held-out clients a version to evaluate: as many as a cohort has, however cohorts are drawn. False if
        none of them is there."""
        there = [each for each in book.present(now - self.rules.fresh) if self.rules.is_held_out(each.name)]
        size = min(len(there), self.rules.recruiting.size)
        if size:
            chosen = drawn(self.rules, there, Recruiting(size), RoundRow(number))
            book.put_tasks(self._tasks("evaluate", chosen, number, 0, now + self.rules.deadline))
        return bool(size)

    def evaluated(self, book: Book, now: float) -> list[VersionRow]:
        """Versions whose evaluation has ended, with their metrics: {name: [sum of values, sum of weights]}."""
        ended = []
        for row in book.unevaluated():
            tally = book.tally("evaluate", row.number, 0, now)
            if tally.reported + tally.lost < tally.clients:
                continue
            here = book.round("alone")
            if (here.phase, here.number) == ("evaluating", row.number):
                book.put_round(here._replace(phase="ended"))
            done = [task.id for task in book.tasks("evaluate", row.number, 0) if task.reported]
            ended.append(row._replace(metrics=json.dumps(summed_metrics(book, done))))
            book.close_tasks("evaluate", row.number, 0)
            book.count(done, row.number)
            book.put_version(ended[-1])
        return ended

    # Parts

    def rng(self, number: int) -> jax.Array:
        """The randomness of a round."""
        return round_rng(self.rules.seed, number)

    def about(self, row: TaskRow) -> About:
        """What the messages of a task belong to."""
        return self.server.about(row.number, row.client)._replace(task=row.id)

    def _wanted(self, book: Book, row: RoundRow, now: float) -> int:
        """How many clients are to be drawn."""
        if not self.rules.buffer:
            return self.rules.num_asked
        return self.rules.concurrency - len(book.busy(now))

    def _tasks(
        self, kind: Kind, chosen: Sequence[ClientRow], number: int, attempt: int, until: float
    ) -> list[TaskRow]:
        """A task for each client, or for each device with the clients that it has of those (in their order)."""
        together = kind == "train" and self.rules.reports == "sum"
        groups: dict[str, list[ClientRow]] = {}
        for each in chosen:
            groups.setdefault(each.device if together else each.name, []).append(each)
        rows = []
        for place, group in enumerate(groups.values()):
            names = [each.name for each in group]
            client = names[0] if len(names) == 1 else json.dumps(names)
            # if there are sums, ids are made of lists only: no name can look like the list of another device
            name = self.server.about(number, json.dumps(names) if together else client, attempt, kind).task
            row = TaskRow(name, kind, number, attempt, place, client, group[0].device, clients=len(names))
            rows.append(row._replace(lease_until=until))
        return rows

    def _verdict(self, book: Book, row: RoundRow, process: str, now: float) -> Verdict:
        """Whether a round is to be closed or repeated by this process."""
        if row.phase == "closing":
            return "close" if row.closer == process or row.closing_until <= now else "open"
        if row.phase != "open":
            return "open"
        if self.rules.buffer:
            return "close" if book.num_buffered() >= self.rules.buffer else "open"
        if self.stages:
            return self.stages.verdict(book, row, now)
        tally, wanted = book.tally("train", row.number, row.attempt, now), self.rules.recruiting
        if tally.clients < self.rules.least:
            return "repeat"
        if tally.reported >= (wanted.size if wanted.over_selection > 1 else tally.clients):
            return "close"
        over = now >= row.opened + self.rules.deadline
        if over or tally.reported + tally.lost == tally.clients:
            if tally.reported >= min(self.rules.quorum, tally.clients):
                return "close"
            return "repeat" if over else "open"
        return "open"

    def _current(self, book: Book, device: str, task: str, digest: str | None = None) -> TaskRow | Refused:
        """A task of this device that can be worked on; or one that has sent the report of this digest before."""
        here, row = book.round("share"), book.task(task)
        if row is None or row.device != device:
            return Refused("task", f"this device has no task {task}")
        if row.state == "reported":
            same = digest is not None and row.digest == digest
            return row if same else Refused("duplicate", f"task {task} has reported already")
        if row.state == "declined":
            return Refused("declined", f"this device has declined task {task}")
        if row.state == "closed" or (row.kind == "train" and here.phase == "ended"):
            return Refused("closed", f"task {task} came too late: its round is closed")
        if row.kind == "train" and here.number - row.number > self.rules.stalest:
            return Refused(
                "stale", f"task {task} is of version {row.number}, and the model is at {here.number}"
            )
        return row

    def _job(self, row: TaskRow, version: VersionRow | None) -> Job:
        invitation = Invitation(self.about(row), _one(row), self.rules.seed, row.number)
        return Job(row.kind, invitation, version.slices if version else "", row.names)


def _closed(now: Round, due: Due) -> Closed:
    closed = now.close()
    return closed._replace(
        broken=tuple(name for names in closed.broken for name in names),
        missing=sum(task.clients for task in due.tasks if not task.reported),
    )


def _if_finite(state: ServerState, closed: Closed, outliers: Sequence[Size]) -> Closed:
    """The round without these reports, or without any if its next version would not be finite: then the state stays
    as it was."""
    if not closed.finite:
        total = closed.total._replace(clients=np.float32(0))
        closed, outliers = closed._replace(state=state, total=total, sizes=()), [*outliers, *closed.sizes]
    return closed._replace(outliers=tuple(name for size in outliers for name in size.client))


def _out_of_proportion(sizes: Sequence[Size], earlier: float) -> list[Size]:
    norms, weights = (np.array([getattr(size, name) for size in sizes]) for name in ("norm", "weight"))
    far = out_of_proportion(norms, weights, earlier)
    return [size for size, is_far in zip(sizes, far, strict=True) if is_far]


def _one(row: TaskRow) -> str:
    """The client of a task; "" if there are several."""
    return row.client if row.clients == 1 else ""
