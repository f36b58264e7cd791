"""A run on a server: the coordinator's decisions, its journal, and the versions of the model, for any transport.

Several hubs, in processes on several hosts, may serve one run: what they share is the journal and the folder of
versions. A version's file has the digest of its bytes in its name, so two hubs that close the same round write the
same file.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from partwise.checkpoint import digest_of, load_tree, save_tree
from partwise.deployment.auth import WINDOW
from partwise.deployment.book import HasLeft, RoundRow, TaskRow, VersionRow
from partwise.deployment.clerk import Answer, Clerk
from partwise.deployment.coordinator import Coordinator
from partwise.deployment.jobs import Due, Wait, Work
from partwise.deployment.journal import Journal, SqlBook, shown
from partwise.deployment.key_ring import KeyRing
from partwise.deployment.masked_sums import MaskedSums
from partwise.deployment.memory import give_back_memory
from partwise.deployment.one_by_one import TakenOverError, whole_tasks
from partwise.deployment.pair import Pair
from partwise.deployment.stages import MaskedRounds
from partwise.deployment.travelled import Travelled
from partwise.randomness import EVALUATION_ROUND
from partwise.server.messages import key_data, send
from partwise.server.round import Accepted, Closed, Refused, wrong_keys
from partwise.server.step import ServerState
from partwise.server.total import PUBLIC, Total
from partwise.server.update_sizes import spread_of
from partwise.types import UserError

logger = logging.getLogger("partwise.server")
# What is not recorded of a round if clients are promised privacy. The number of clients and their loss have noise.
_COUNTS = ("invited", "reports", "empty", "broken", "missing", "bytes_down", "bytes_up")
HIDDEN = (*_COUNTS, "norms", "usual_norm", "outliers")
FORGET = 60.0  # seconds between deletions of what is not needed any more


class OwnFaultError(Exception):
    """Something is wrong with the server's own files, and not with what was asked of it."""


class Publisher(Protocol):
    """Writes the slices of a version as files, and deletes them."""

    def publish(
        self, number: int, params: Mapping[str, np.ndarray], rng: np.ndarray, public: Mapping[str, Any]
    ) -> str:
        """Write a version, and what every client is told with it. Returns the name of the file that leads to the
        others."""
        ...

    def files(self) -> set[str]:
        """The names of all files that were written."""
        ...

    def keep(self, names: Iterable[str], among: Iterable[str]) -> None:
        """Of the files `among`, delete all but those that `names` lead to."""
        ...


class Sendable(NamedTuple):
    """A version of the model, ready to be sent."""

    params: Mapping[str, np.ndarray]
    rngs: Mapping[str, np.ndarray]  # kind of task -> its randomness
    public: Mapping[str, Any]  # what every client is told


class Hub:
    """One process's share of a run.

    Args:
        coordinator: Makes the decisions.
        journal: Keeps its rows.
        folder: Where the versions of the model are.
        start: The state before the first round.
        clock: Seconds since some moment, the same for all hubs of a run.
        publisher: Writes slices as files; None if devices ask for them.
        at_end: Called once when the run has ended, in every process. What it does must be the same each time.
        pair: This server and a helper, if they add up reports together that neither can read.
        spent: What is said of the promise to clients after so many rounds, if there is one.
        masked: What adds up masked reports.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        journal: Journal,
        folder: Path,
        start: ServerState,
        clock: Callable[[], float] = time.time,
        publisher: Publisher | None = None,
        at_end: Callable[[Hub], None] = lambda hub: None,
        pair: Pair | None = None,
        spent: Callable[[int], dict[str, Any]] | None = None,
        masked: MaskedSums | None = None,
    ):
        self.coordinator, self.journal, self.folder = coordinator, journal, Path(folder)
        self.process = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.keys, self.clerk = KeyRing(journal), Clerk(journal.transaction)
        self._start, self._clock, self._publisher, self._at_end = start, clock, publisher, at_end
        self.pair, self._masked, self._spent = pair, masked, spent
        self._ended = False
        self._load, self._version = lru_cache(2)(self._loaded), lru_cache(4)(self._sendable)
        self._loading, self._forgot = threading.RLock(), clock()
        self._begin()

    def _begin(self) -> None:
        """Publish the first version, unless there is one. The newest must be there."""
        try:
            self.state(self.round().number)
        except OwnFaultError as error:
            raise UserError(
                f"{error}. The journal '{shown(self.journal.url)}' has this version: restore the run's folder and "
                f"its journal from one backup"
            ) from None
        if self.pair:
            self.pair.publish(0, self._start.params)
        first = VersionRow(0, "", "{}")
        if self._publisher and self.clerk.do(lambda book: book.version(0)) is None:
            first = first._replace(slices=self._published(0, self._start))
        self.clerk.do(lambda book: book.version(0) or book.put_version(first))

    # What devices ask. The answers come when they are on the disk.

    def join(
        self, device: str, clients: Iterable[str], nonce: str = "", has_left: HasLeft | None = None
    ) -> Future[list[str] | Refused]:
        """A device says which clients it has. The answer is which of them are another device's: then none joins.
        Clients of a device that takes part no longer (by default: whose key is revoked or has expired) are the new
        device's from then on."""
        names, left = list(clients), has_left or self._has_no_key
        return self._asked(device, nonce, lambda book: self.coordinator.join(book, device, names, left))

    def _has_no_key(self, device: str) -> bool:
        row = self.keys.get(device)
        return row is not None and (
            row.revoked is not None or (row.expires is not None and row.expires < self._clock())
        )

    def poll(
        self, device: str, ready: bool = True, most: int = 1, nonce: str = ""
    ) -> Future[Work | Wait | Refused]:
        """A device asks for work."""
        return self._asked(
            device, nonce, lambda book: self.coordinator.poll(book, device, self._clock(), ready, most)
        )

    def grant(
        self, device: str, task: str, keys: Mapping[str, np.ndarray], nonce: str = ""
    ) -> Future[TaskRow | Refused]:
        """A device asks for the slices of a task's keys; `message` makes them."""
        return self._asked(
            device, nonce, lambda book: self.coordinator.grant(book, device, task, keys, self._clock())
        )

    def message(self, row: TaskRow, keys: Mapping[str, np.ndarray]) -> bytes:
        """The slices of a task's keys."""
        version, about = self._version(row.number), self.coordinator.about(row)
        partition = self.coordinator.server.algorithm.partition
        return send(partition, version.params, keys, version.rngs[row.kind], about, version.public)

    def renew(self, device: str, task: str, nonce: str = "") -> Future[TaskRow | Refused]:
        """A device is at work on a task, and asks for slices privately; `private_message` answers."""
        return self._asked(
            device, nonce, lambda book: self.coordinator.renew(book, device, task, self._clock())
        )

    def private_message(self, row: TaskRow, question: bytes) -> bytes:
        """The slices of keys that this server does not know."""
        assert self.pair is not None
        version, about = self._version(row.number), self.coordinator.about(row)
        return self.pair.slices(about, version.params, version.rngs[row.kind], question)

    def newest(self, keys: Mapping[str, np.ndarray]) -> bytes | Refused:
        """Slices of the newest version, for a client that wants to use it."""
        server, number = self.coordinator.server, self.round().number
        refused = wrong_keys(server.algorithm.partition, keys)
        if refused:
            return refused
        version = self._version(number)
        about = server.about(number, "")._replace(task="")
        return send(server.algorithm.partition, version.params, keys, version.rngs["evaluate"], about)

    def report(self, device: str, report: bytes, nonce: str = "") -> Future[Accepted | Refused]:
        """A device reports."""
        return self._asked(
            device, nonce, lambda book: self.coordinator.accept(book, device, report, self._clock())
        )

    def decline(self, device: str, task: str, nonce: str = "") -> Future[Refused | None]:
        """A device will not do a task."""
        return self._asked(device, nonce, lambda book: self.coordinator.decline(book, device, task))

    def letter(
        self, device: str, task: str, stage: int, letter: bytes, nonce: str = ""
    ) -> Future[Refused | None]:
        """A device sends a letter of a round with masked sums."""
        return self._asked(device, nonce, lambda book: self._stages.take(book, device, task, stage, letter))

    def answer(self, device: str, task: str, stage: int, nonce: str = "") -> Future[bytes | Wait | Refused]:
        """A device asks for the answer to its letter of a stage, which comes when the stage has ended."""
        wait = Wait(self.coordinator.rules.poll)

        def look(book: SqlBook) -> bytes | Wait | Refused:
            found = self._stages.answer(book, device, task, stage)
            return wait if found is None else found

        return self._asked(device, nonce, look)

    @property
    def _stages(self) -> MaskedRounds:
        if self.coordinator.stages is None:
            raise UserError("the sums of this run are not masked: there are no letters")
        return self.coordinator.stages

    def _asked(
        self, device: str, nonce: str, decide: Callable[[SqlBook], Answer]
    ) -> Future[Answer | Refused]:
        """A decision for a device, unless it has made this very request before."""

        def once(book: SqlBook) -> Answer | Refused:
            if nonce and not book.is_new(device, nonce, self._clock()):
                return Refused("replayed", f"device {device} has made this request before")
            return decide(book)

        return self.clerk.submit(once)

    # Rounds

    def round(self) -> RoundRow:
        """The round that is going on."""
        return self.clerk.do(lambda book: book.round())

    def version(self, number: int) -> VersionRow | None:
        """What is known of a version."""
        return self.clerk.do(lambda book: book.version(number))

    def records(self) -> list[dict[str, Any]]:
        """What is recorded of every round so far."""
        rows = [self.version(number) for number in range(1, self.round().number + 1)]
        return [json.loads(row.record) for row in rows if row is not None]

    def tick(self) -> bool:
        """Do what is due: close the round, end evaluations, draw clients. Returns whether there is anything new."""
        now = self._clock()
        due = self.clerk.do(lambda book: self.coordinator.due(book, self.process, now), alone=True)
        closed = due is not None and self._close(due)
        ended = self.clerk.do(lambda book: self.coordinator.evaluated(book, now), alone=True)
        opened = self.clerk.do(lambda book: self.coordinator.open(book, now), alone=True)
        if now - self._forgot > FORGET:
            self._forget(now)
        if not self._ended and self.round().phase == "ended":
            self._at_end(self)
            self._ended = True
        return closed or bool(ended) or opened

    def _close(self, due: Due) -> bool:
        number, partition = due.round.number + 1, self.coordinator.server.algorithm.partition
        counts = Travelled(partition, on_demand=self._publisher is None)
        try:
            usual_norm = self._usual_norm(due.round.number)
            closed = self._added_up(due, counts, usual_norm)
        except TakenOverError as error:
            logger.info("%s", error)
            return False
        if closed is None:
            self.clerk.do(lambda book: self.coordinator.repeat(book, due), alone=True)
            return True
        file, slices = self._saved(number, closed.state), self._published(number, closed.state)
        record = told(due, closed, self._clock(), usual_norm) | counts.record()
        if self.coordinator.server.algorithm.aggregator.private:
            record |= dict.fromkeys(HIDDEN)
        if self._spent:
            record["privacy"] = self._spent(number)
        done = self.clerk.do(
            lambda book: self.coordinator.commit(book, due, self._clock(), file, json.dumps(record), slices),
            alone=True,
        )
        give_back_memory()
        if done and self.pair:  # not before: with other noise, this version could still become another one
            self.pair.publish(number, closed.state.params)
        if done:
            logger.info("version %d: %d clients, loss %s", number, record["clients"], record["loss"])
            _log_left_out(record)
        return done

    def _added_up(self, due: Due, counts: Travelled, usual_norm: float) -> Closed | None:
        """A round that is closed, from its reports, which are read and counted one by one; None if they are sealed
        and cannot be added up."""

        def read() -> Iterator[TaskRow]:
            counts.begin()
            return map(counts.counted, whole_tasks(self.clerk.do, due))

        state = self.state(due.round.number)
        try:
            total = self._total(due, read)
        except UserError as error:
            logger.warning("round %d is tried again: %s", due.round.number, error)
            return None
        if total is None:
            return self.coordinator.close(state, due, read, usual_norm)
        return self.coordinator.close_sum(state, due, total, counts.reports)

    def _usual_norm(self, number: int) -> float:
        """The largest usual norm of an update before this version."""
        row = self.version(number)
        return (json.loads(row.record).get("usual_norm") or 0.0) if row else 0.0

    def _total(self, due: Due, read: Callable[[], Iterator[TaskRow]]) -> Total | None:
        """The sum of reports that this server cannot read."""
        if self._masked:
            letters = self.clerk.do(lambda book: self._stages.collected(book, due.round))
            return self._masked.total(read(), letters)
        return self.pair.total(read(), due.round.number) if self.pair else None

    def _forget(self, now: float) -> None:
        """Delete numbers that were used once, and files of versions that nobody needs any more."""
        self._forgot, rules = now, self.coordinator.rules
        # Files are listed before the round is looked at: those that another process writes from then on stay.
        files = self._publisher.files() if self._publisher else set()

        def look(book: SqlBook) -> tuple[RoundRow, int, list[VersionRow | None]]:
            book.forget_nonces(now - 2 * WINDOW)
            row = book.round()
            first = max(0, row.number - max(rules.keep, rules.stalest if rules.buffer else 0))
            return row, first, [book.version(each) for each in range(first, row.number + 1)]

        row, first, kept = self.clerk.do(look)
        names = {each.file for each in kept if each}
        for path in self.folder.glob("*.safetensors"):
            if path.name not in names and path.name < f"{first:08d}":
                path.unlink(missing_ok=True)
        if self._publisher and row.phase != "closing":
            self._publisher.keep((each.slices for each in kept if each and each.slices), files)

    def state(self, number: int) -> ServerState:
        """The server's state after so many rounds."""
        if number == 0:
            return self._start
        with self._loading:
            return self._load(number)

    def _loaded(self, number: int) -> ServerState:
        row = self.version(number)
        if row is None:
            raise LookupError(f"version {number} was not published")
        try:
            return load_tree(self.folder / row.file, self._start)[0]
        except UserError as error:
            raise OwnFaultError(f"version {number} of the model cannot be read: {error}") from error

    def _sendable(self, number: int) -> Sendable:
        """A version whose leaves are on the host."""
        state, rng = self.state(number), self.coordinator.rng
        params = {path: np.asarray(leaf) for path, leaf in state.params.items()}
        rngs = {"train": key_data(rng(number)), "evaluate": key_data(rng(EVALUATION_ROUND))}
        return Sendable(params, rngs, state.aggregator.get(PUBLIC, {}))

    def _published(self, number: int, state: ServerState) -> str:
        if self._publisher is None:
            return ""
        params = {path: np.asarray(leaf) for path, leaf in state.params.items()}
        public = state.aggregator.get(PUBLIC, {})
        return self._publisher.publish(number, params, key_data(self.coordinator.rng(number)), public)

    def _saved(self, number: int, state: ServerState) -> str:
        leaves = {f"{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree_util.tree_leaves(state))}
        file = f"{number:08d}-{digest_of(leaves, {})[:16]}.safetensors"
        save_tree(self.folder / file, state, {"run": self.coordinator.server.run, "round": number})
        return file

    def close(self) -> None:
        """Stop. What was asked for is done first."""
        self.clerk.close()
        self.journal.close()


def _log_left_out(record: Mapping[str, Any]) -> None:
    names = ", ".join(map(str, (record["outliers"] or [])[:10]))
    if not record["finite"]:
        logger.error(
            "version %d: the step was not finite, so the model is that of before. Lower server.rate, or look at "
            "these clients: %s",
            record["round"],
            names or "not recorded, as they are promised privacy",
        )
    elif names:
        logger.warning("version %d: left out, out of all proportion: %s", record["round"], names)


def told(due: Due, closed: Closed, now: float, usual_norm: float = 0.0) -> dict[str, Any]:
    """What is recorded of a round. `usual_norm` is the largest median norm of earlier rounds."""
    norms = spread_of(np.array([size.norm for size in closed.sizes]))
    loss, number = closed.total.loss, due.round.number
    late = [number - task.number for task in due.tasks if task.reported]
    return {
        "round": number + 1,
        "attempt": due.round.attempt,
        "seconds": now - due.round.opened,
        "invited": sum(task.clients for task in due.tasks),
        "reports": len(late),
        "clients": int(closed.total.clients),
        "loss": float(loss.value / loss.weight) if loss.weight > 0 else None,
        "empty": closed.empty,
        "broken": list(closed.broken),
        "outliers": list(closed.outliers),
        "norms": norms,
        "usual_norm": max(usual_norm, norms["median"]) if norms else usual_norm,
        "finite": closed.finite,
        "missing": closed.missing,
        "staleness": max(late, default=0),
    }
