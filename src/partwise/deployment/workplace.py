"""One run on one device: its algorithm, its clients, and what they keep. Work on one task, from the choice of keys
to the report.

What a client keeps is saved after its report was accepted. If the device dies between the two, the report counts,
and the client goes on with what it kept before that round. If only the server's answer is lost, the same report is
sent again: it counts once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from partwise.algorithm import Algorithm
from partwise.checkpoint import digest_of
from partwise.data.store import ClientStore
from partwise.deployment.coordinator import Job
from partwise.deployment.link import Link, UnreachableError
from partwise.deployment.own_store import OwnStore
from partwise.deployment.page_reader import Reader
from partwise.device import Asked, Device
from partwise.metrics import Measured, Sums
from partwise.server.messages import About, Invitation, Slices, about, write_metrics
from partwise.server.round import Refused
from partwise.types import UserError

log = logging.getLogger("partwise.agent")

PRECISION = "float32"
REFRESH = 10  # versions after which a local part is rebuilt, although the data is the same
KEYS = "#keys:"  # before the name of a space: the keys whose rows a client keeps; no leaf has such a name
# What a task of a server that lies can lead to. Nothing of it may stop an agent.
TROUBLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, MemoryError)


class Worked(NamedTuple):
    """What came of one task."""

    client: str
    version: int
    accepted: bool
    reason: str = ""  # why not


class Sent(NamedTuple):
    """A report that was sent, and what is needed once it is accepted."""

    invitation: Invitation
    message: bytes | Slices
    examples: ClientStore
    asked: Asked
    report: bytes
    kept: Mapping[str, np.ndarray]


class Workplace:
    """A run on this device.

    Args:
        link: The way to the run.
        algorithm: The run's algorithm.
        clients: The clients' examples as they are now; raises `UserError` while they cannot be read.
        own: What the device keeps for its clients.
        run: The run; None if it does not matter.
        refresh: After how many versions a local part is rebuilt, although the data is the same; None: local parts
            are not kept.
        precision: How updates are written (`server.report_form`).
        reader: Reads slices that are files; None if there are none.
    """

    def __init__(
        self,
        link: Link,
        algorithm: Algorithm,
        clients: Callable[[], ClientStore],
        own: OwnStore,
        run: str | None = None,
        refresh: int | None = None,
        precision: str = PRECISION,
        reader: Reader | None = None,
    ):
        self._link, self._device, self._clients, self._own = link, Device(algorithm, precision), clients, own
        self._partition, self._keeps, self._refresh = algorithm.partition, set(algorithm.keeps), refresh
        self.run, self.model = run, algorithm.partition.digest
        self._store: ClientStore | None = None
        self._places: dict[str, int] = {}
        self._unheard: Sent | None = None
        self._reader = reader

    def look(self) -> set[str]:
        """Look at the data. Returns the names of the clients that are there now."""
        store = self._clients()
        if store is not self._store:
            self._store = store
            self._places = {str(name): place for place, name in enumerate(store.client_ids.tolist())}
        return set(self._places)

    def fits(self, here: About) -> bool:
        """Whether a task is of this run and this model."""
        return here.model == self.model and self.run in (None, here.run)

    def work(self, job: Job) -> Worked:
        """Work on one task. Everything but a server that does not answer ends in a `Worked`, with a line in the log
        if nothing was accepted."""
        invitation = job.invitation
        try:
            check_invitation(invitation)
            if not self.fits(invitation.about):
                refused = "model", "it is of another run or model"
            elif invitation.client not in self._places:
                refused = "client", "this device does not have its client"
            else:
                refused = self._work(job)
        except TROUBLE as error:
            refused = "malformed", f"it makes no sense: {str(error) or repr(error)}"
        return _told(invitation, refused)

    def finish(self) -> Worked | None:
        """Send a report again to which the server's answer was lost; None if there is none."""
        if self._unheard is None:
            return None
        sent, refused = self._unheard, self._report(self._unheard)
        self._unheard = None
        return _told(sent.invitation, refused)

    def _work(self, job: Job) -> tuple[str, str] | None:
        """None, or why nothing came of it."""
        invitation, client, here = job.invitation, job.invitation.client, job.invitation.about
        assert self._store is not None  # there are clients
        examples, device = self._store.gather([self._places[client]]), self._device
        train = job.kind == "train"
        asked = (
            device.ask(examples, invitation.seed, invitation.round) if train else device.ask_whole(examples)
        )
        message = self._slices(job, asked)
        if isinstance(message, Refused):
            return message
        before = self._kept(client, asked)
        if train:
            named = here if job.slices else None
            report, kept = device.report_and_keep(message, examples, asked, before, named)
        else:
            report, kept = write_metrics(here, sums_of(device.evaluate(message, examples, asked, before))), {}
        self._unheard = Sent(invitation, message, examples, asked, report, kept)
        refused = self._report(self._unheard)
        self._unheard = None
        return refused

    def _slices(self, job: Job, asked: Asked) -> bytes | Slices | Refused:
        """The slices of a task: from files, if it names one, and else from the server."""
        here = job.invitation.about
        if job.slices:
            if self._reader is None:
                raise UserError("its slices are files, and this device has no way to them")
            return self._reader.slices(job.slices, asked.keys, here)
        message = self._link.slices(here.task, asked.keys)
        if not isinstance(message, Refused) and about(message) != here:
            raise UserError("the slices are of another task")
        return message

    def _report(self, sent: Sent) -> tuple[str, str] | None:
        """Report, and keep what is to be kept if the report is accepted."""
        try:
            verdict = self._link.report(sent.report)
        except TROUBLE as error:
            raise UnreachableError(f"its answer to a report cannot be read: {error!r}") from None
        if isinstance(verdict, Refused):
            return verdict
        client, version = sent.invitation.client, sent.invitation.about.version
        if sent.kept:
            keys = {KEYS + space: each for space, each in sent.asked.keys.items()}
            self._own.put("kept", client, {**sent.kept, **keys}, version=version)
        try:
            self._rebuild(client, version, sent)
        except TROUBLE as error:
            log.warning("the local part of client '%s' could not be rebuilt: %s", client, error)
        return None

    def _kept(self, client: str, asked: Asked) -> dict[str, np.ndarray] | None:
        """What the client kept, with rows for the keys that it has now. Keys that are new have zeros."""
        found = self._own.get("kept", client) if self._keeps else None
        if found is None:
            return None
        kept = {name: leaf for name, leaf in found.arrays.items() if not name.startswith(KEYS)}
        keys = {name.removeprefix(KEYS): each for name, each in found.arrays.items() if name.startswith(KEYS)}
        if set(kept) != self._keeps or set(keys) != set(asked.keys):
            log.warning("what client '%s' kept has other names than the algorithm's, and is not used", client)
            return None
        spaces = {path: role.space for path, role in self._partition.roles.items() if role.space}
        return {
            path: moved(leaf, keys[spaces[path]], asked.keys[spaces[path]]) if path in spaces else leaf
            for path, leaf in kept.items()
        }

    def _rebuild(self, client: str, version: int, sent: Sent) -> None:
        """Rebuild the client's local part if its data has changed, or if the version has moved on far enough."""
        if self._refresh is None or not self._partition.local_paths:
            return
        data, before = digest_of(sent.examples.columns, {}), self._own.get("local", client)
        if before and before.said.get("data") == data and _recent(before.said, version, self._refresh):
            return
        local = self._device.personalize(sent.message, sent.examples, sent.asked)
        if all(np.isfinite(leaf).all() for leaf in local.values()):
            self._own.put("local", client, local, version=version, data=data)
        else:
            log.warning("the local part of client '%s' is not finite, and is not kept", client)


def _told(invitation: Invitation, refused: tuple[str, str] | None) -> Worked:
    """What came of a task, in the log too if it was nothing."""
    client, version = str(invitation.client), invitation.about.version
    version = version if isinstance(version, int) else 0
    if refused is None:
        return Worked(client, version, accepted=True)
    reason, what = refused
    log.warning("a task of client '%s', version %d, came to nothing (%s): %s", client, version, reason, what)
    return Worked(client, version, accepted=False, reason=reason)


def _recent(said: Mapping[str, Any], version: int, refresh: int) -> bool:
    """Whether a local part is of this version, or of one shortly before it."""
    return 0 <= version - int(said.get("version", -refresh)) < refresh


def sums_of(measured: Measured) -> dict[str, Sums]:
    """The metrics that are sums. Others would need the scores and labels of all examples, which stay here."""
    return {name: each for name, each in measured.items() if isinstance(each, Sums)}


def moved(leaf: np.ndarray, keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The rows of these keys as rows of the wanted ones (both sorted); zeros where there was none."""
    if np.array_equal(keys, wanted):
        return leaf
    rows = np.zeros((len(wanted), *leaf.shape[1:]), leaf.dtype)
    _, here, there = np.intersect1d(keys, wanted, assume_unique=True, return_indices=True)
    rows[there] = leaf[here]
    return rows


def check_invitation(invitation: Invitation) -> None:
    """Raise `UserError` if a task is not what a server may send."""
    here = invitation.about
    values = {**invitation._asdict(), **here._asdict()}
    for name, kind in {"client": str, "run": str, "task": str, "model": str}.items():
        if not isinstance(values[name], kind) or len(values[name]) > 1000:
            raise UserError(f"its {name} is {str(values[name])[:100]!r}")
    for name in ("seed", "round", "version"):
        if type(values[name]) is not int or not 0 <= values[name] < 2**63:
            raise UserError(f"its {name} is {str(values[name])[:100]!r}")
