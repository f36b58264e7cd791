"""A run on a server: the coordinator's decisions, its journal, and the versions of the model, for any transport.

Several hubs, in processes on several hosts, may serve one run: what they share is the journal and the folder of
versions. A version's file has the digest of its bytes in its name, so two hubs that close the same round write the
same file.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path

import jax
import numpy as np

from partwise.checkpoint import digest_of, load_tree, save_tree
from partwise.deployment.book import RoundRow
from partwise.deployment.coordinator import Coordinator, Due, Wait, Work
from partwise.deployment.journal import Journal
from partwise.server.messages import send
from partwise.server.round import Accepted, Closed, Refused
from partwise.server.step import ServerState


class _Undone(Exception):  # noqa: N818
    """Ends a transaction whose writes are not wanted."""


class Hub:
    """One process's share of a run.

    Args:
        coordinator: Makes the decisions.
        journal: Keeps its rows.
        folder: Where the versions of the model are.
        start: The state before the first round.
        clock: Seconds since some moment, the same for all hubs of a run.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        journal: Journal,
        folder: Path,
        start: ServerState,
        clock: Callable[[], float] = time.time,
    ):
        self.coordinator, self.journal, self.folder = coordinator, journal, Path(folder)
        self.process = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._start, self._clock = start, clock
        self._load = lru_cache(maxsize=2)(self._loaded)
        self._loading = threading.Lock()

    # What devices ask

    def join(self, device: str, clients: Iterable[str]) -> Refused | None:
        """A device says which clients it has. If one of them is refused, none joins."""
        refused = None
        with contextlib.suppress(_Undone), self.journal.transaction() as book:
            refused = self.coordinator.join(book, device, clients, self._clock())
            if refused:
                raise _Undone
        return refused

    def poll(self, device: str, ready: bool = True, most: int = 1) -> Work | Wait:
        """A device asks for work."""
        with self.journal.transaction() as book:
            return self.coordinator.poll(book, device, self._clock(), ready, most)

    def slices(self, device: str, task: str, keys: Mapping[str, np.ndarray]) -> bytes | Refused:
        """A device asks for the slices of a task's keys."""
        with self.journal.transaction() as book:
            row = self.coordinator.grant(book, device, task, keys, self._clock())
        if isinstance(row, Refused):
            return row
        server = self.coordinator.server
        params, rng = self.state(row.number).params, self.coordinator.rng(row.number)
        return send(
            server.algorithm.partition, params, keys, rng, server.about(row.number, row.client, row.attempt)
        )

    def report(self, device: str, report: bytes) -> Accepted | Refused:
        """A device reports. When this returns, what was accepted is on the disk."""
        with self.journal.transaction() as book:
            return self.coordinator.accept(book, device, report, self._clock())

    # Rounds

    def round(self) -> RoundRow:
        """The round that is going on."""
        with self.journal.transaction() as book:
            return book.round()

    def tick(self) -> bool:
        """Close the round if it is due. Returns whether this hub published a version."""
        with self.journal.transaction() as book:
            due = self.coordinator.due(book, self.process, self._clock())
        if due is None:
            return False
        closed = self.coordinator.close(self.state(due.round.number), due)
        file = self._saved(due.round.number + 1, closed.state)
        with self.journal.transaction() as book:
            return self.coordinator.commit(book, due, file, json.dumps(told(due, closed, self._clock())))

    def state(self, number: int) -> ServerState:
        """The server's state after so many rounds."""
        if number == 0:
            return self._start
        with self._loading:
            return self._load(number)

    def _loaded(self, number: int) -> ServerState:
        with self.journal.transaction() as book:
            row = book.version(number)
        if row is None:
            raise LookupError(f"version {number} was not published")
        return load_tree(self.folder / row.file, self._start)[0]

    def _saved(self, number: int, state: ServerState) -> str:
        leaves = {f"{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree_util.tree_leaves(state))}
        file = f"{number:08d}-{digest_of(leaves, {})[:16]}.safetensors"
        save_tree(self.folder / file, state, {"run": self.coordinator.server.run, "round": number})
        return file


def told(due: Due, closed: Closed, now: float) -> dict[str, object]:
    """What is recorded of a round."""
    loss = closed.total.loss
    return {
        "round": due.round.number + 1,
        "attempt": due.round.attempt,
        "seconds": now - due.round.opened,
        "invited": len(due.tasks),
        "clients": int(closed.total.clients),
        "loss": float(loss.value / loss.weight) if loss.weight > 0 else None,
        "empty": closed.empty,
        "broken": list(closed.broken),
        "missing": closed.missing,
        "bytes_up": closed.bytes_up,
    }
