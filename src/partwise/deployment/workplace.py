"""One run on one device: its algorithm, its clients, and what they keep. Work on one task, from the choice of keys
to the report.

A task is of one client, or of several, which then train in compiled lanes and report their sum (`simulation.site`).
Clients that are not here any more are left out of a sum.

What a client keeps is saved after its report was accepted. If the device dies between the two, the report counts,
and the client goes on with what it kept before that round. If only the server's answer is lost, the same report is
sent again: it counts once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from partwise.algorithm import Algorithm
from partwise.checkpoint import digest_of
from partwise.data.store import ClientStore
from partwise.deployment.jobs import Job
from partwise.deployment.link import Link, UnreachableError
from partwise.deployment.own_store import OwnStore
from partwise.deployment.page_reader import GoneError, Reader
from partwise.deployment.secret import Secret
from partwise.deployment.shares import (
    Share,
    check_invitation,
    clients_of,
    evaluation_rng,
    large_enough,
    moved,
    rows_of,
    sums_of,
)
from partwise.device import Asked, Device
from partwise.server.masked_form import MaskingForm
from partwise.server.messages import About, Slices, about, read_slices, write_metrics
from partwise.server.report_form import ReportForm
from partwise.server.round import Refused
from partwise.simulation.site import Site, SiteAsked
from partwise.types import UserError, counted

log = logging.getLogger("partwise.agent")

PRECISION = "float32"
REFRESH = 10  # versions after which a local part is rebuilt, although the data is the same
KEYS = "#keys:"  # before the name of a space: the keys whose rows a client keeps; no leaf has such a name
# What a task of a server that lies can lead to. Nothing of it may stop an agent.
TROUBLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, MemoryError)
Came = TypeVar("Came")


class Worked(NamedTuple):
    """What came of one task."""

    client: str  # of several: how many there are
    version: int
    accepted: bool
    reason: str = ""  # why not


class Sent(NamedTuple):
    """A report that was sent, and what is needed once it is accepted."""

    job: Job
    report: bytes
    shares: Iterable[
        Share
    ]  # of all clients that have something to keep; they may be made when they are asked for


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
        least: Examples that a client must have to take part.
        secret: What two servers need, if neither may read reports; and whether slices are fetched privately.
        masking: How contributions are written that are masked; then tasks are not worked on one by one
            (`deployment.masked_group`).
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
        least: int = 0,
        secret: Secret | None = None,
        masking: MaskingForm | None = None,
    ):
        self._link, self._clients, self._own, self._secret = link, clients, own, secret
        self.masking = masking
        self._device = Device(algorithm, precision, secret.sealing if secret else masking)
        self._form = ReportForm(algorithm.aggregator, algorithm.partition, precision)
        self._site: Site | None = None
        self._partition, self._keeps, self._refresh = algorithm.partition, set(algorithm.keeps), refresh
        self.run, self.model = run, algorithm.partition.digest
        self._store: ClientStore | None = None
        self._places: dict[str, int] = {}
        self._unheard: Sent | None = None
        self._reader, self._least = reader, least

    def look(self) -> set[str]:
        """Look at the data. Returns the names of the clients that are there now, and have enough examples."""
        store = self._clients()
        if store is not self._store:
            self._store, self._site = store, None
            self._places = large_enough(store, self._least)
            _tell_too_small(store.num_clients, len(self._places), self._least)
        return set(self._places)

    def fits(self, here: About) -> bool:
        """Whether a task is of this run and this model."""
        return here.model == self.model and self.run in (None, here.run)

    def work(self, job: Job) -> Worked:
        """Work on one task. Everything but a server that does not answer ends in a `Worked`, with a line in the log
        if nothing was accepted."""
        return told(job, self._tried(job, self._work))

    def trained(self, job: Job) -> Sent | tuple[str, str]:
        """Train for a task of one client. Returns what it would report, which is not sent; or why there is
        nothing."""
        if job.kind != "train" or len(clients_of(job)) > 1:
            return "malformed", "masked sums are of single clients that train"
        return self._tried(job, self._alone)

    def keep(self, sent: Sent) -> None:
        """Keep what is to be kept after a report was accepted."""
        for share in sent.shares:
            self._keep(share, sent.job.invitation.about.version)

    def _tried(self, job: Job, work: Callable[[Job], Came]) -> Came | tuple[str, str]:
        """What comes of the work on a task; or why nothing does, whatever the server sends."""
        try:
            check_invitation(job.invitation)
            if not self.fits(job.invitation.about):
                return "model", "it is of another run or model"
            if not self._here(job):
                return "client", "this device does not have its client, or too few examples of it"
            return work(job)
        except GoneError as error:
            return "gone", f"its version is not kept any more: {error}"
        except TROUBLE as error:
            return "malformed", f"it makes no sense: {str(error) or repr(error)}"

    def finish(self) -> Worked | None:
        """Send a report again to which the server's answer was lost; None if there is none."""
        if self._unheard is None:
            return None
        sent, refused = self._unheard, self._report(self._unheard)
        self._unheard = None
        return told(sent.job, refused)

    def _here(self, job: Job) -> list[str]:
        """Those clients of a task that are on this device."""
        return [name for name in clients_of(job) if name in self._places]

    def _work(self, job: Job) -> tuple[str, str] | None:
        """None, or why nothing came of it."""
        several = len(clients_of(job)) > 1
        if several and job.kind != "train":
            raise UserError("one report of several clients is of their training")
        sent = self._together(job) if several else self._alone(job)
        if isinstance(sent, Refused):
            return sent
        self._unheard = sent
        refused = self._report(sent)
        self._unheard = None
        return refused

    def _alone(self, job: Job) -> Sent | Refused:
        """The report of a task of one client."""
        client, here, device = job.invitation.client, job.invitation.about, self._device
        examples = self._examples(client)
        train = job.kind == "train"
        asked = self._ask(job, examples) if train else device.ask_whole(examples)
        message = self._slices(job, asked.keys)
        if isinstance(message, Refused):
            return message
        before = self._kept(client, asked)
        if train:
            named = here if job.slices else None
            report, kept = device.report_and_keep(message, examples, asked, before, named)
        else:
            report, kept = write_metrics(here, sums_of(device.evaluate(message, examples, asked, before))), {}
        return Sent(job, report, [Share(client, message, examples, asked, kept)])

    def _together(self, job: Job) -> Sent | Refused:
        """The report of a task of several clients: the sum of those that are here."""
        assert self._store is not None  # there are clients
        self._site = self._site or Site(lambda _: self._device.algorithm, {}, self._store)
        names, clients = self._here(job), len(job.clients)
        _left_out(clients - len(names), "not here any more, or with too few examples")
        places = [self._places[name] for name in names]
        asked = self._site.ask(places, job.invitation.seed, job.invitation.round)
        message = self._slices(job, asked.keys)
        if isinstance(message, Refused):
            return message
        slices = message if isinstance(message, Slices) else read_slices(self._partition, message, asked.keys)
        total = self._site.total(slices, asked, self._all_kept(job, names), clients)
        _left_out(len(total.broken), "without a finite update")
        report = self._form.write(job.invitation.about, total.sent, asked.keys if job.slices else None)
        return Sent(job, report, self._shares(job, names, asked, slices, total.kept))

    def _all_kept(self, job: Job, names: Sequence[str]) -> dict[int, dict[str, np.ndarray]]:
        """What several clients kept, by their places."""
        kept = {}
        for name in names if self._keeps else ():
            kept[self._places[name]] = self._kept(name, self._ask(job, self._examples(name))) or {}
        return kept

    def _shares(
        self,
        job: Job,
        names: Sequence[str],
        asked: SiteAsked,
        slices: Slices,
        kept: Mapping[int, Mapping[str, np.ndarray]],
    ) -> Iterator[Share]:
        """Each client's share in a sum, if clients have something to keep."""
        for name in names if self._keeps or self._rebuilds else ():
            examples = self._examples(name)
            own = self._ask(job, examples)
            mine = rows_of(self._partition, slices, asked.keys, own.keys)
            yield Share(name, mine, examples, own, kept.get(self._places[name], {}))

    def _examples(self, client: str) -> ClientStore:
        assert self._store is not None  # there are clients
        return self._store.gather([self._places[client]])

    def _ask(self, job: Job, examples: ClientStore) -> Asked:
        return self._device.ask(examples, job.invitation.seed, job.invitation.round)

    def _slices(self, job: Job, keys: Mapping[str, np.ndarray]) -> bytes | Slices | Refused:
        """The slices of a task: from files, if it names one, and else from the server."""
        here = job.invitation.about
        if job.slices:
            if self._reader is None:
                raise UserError("its slices are files, and this device has no way to them")
            found = self._reader.slices(job.slices, keys, here)
            return found if job.kind == "train" else found._replace(rng=evaluation_rng(job.invitation))
        if self._secret and self._secret.privately:
            return self._secret.slices(self._link, self._partition, here, keys)
        message = self._link.slices(here.task, keys)
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
        self.keep(sent)
        return None

    def _keep(self, share: Share, version: int) -> None:
        """Keep what is to be kept of a client."""
        if share.kept:
            keys = {KEYS + space: each for space, each in share.asked.keys.items()}
            self._own.put("kept", share.client, {**share.kept, **keys}, version=version)
        try:
            self._rebuild(share, version)
        except TROUBLE as error:
            log.warning("the local part of client '%s' could not be rebuilt: %s", share.client, error)

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

    @property
    def _rebuilds(self) -> bool:
        return self._refresh is not None and bool(self._partition.local_paths)

    def _rebuild(self, share: Share, version: int) -> None:
        """Rebuild the client's local part if its data has changed, or if the version has moved on far enough."""
        if self._refresh is None or not self._rebuilds:
            return
        client = share.client
        data, before = digest_of(share.examples.columns, {}), self._own.get("local", client)
        if before and before.said.get("data") == data and _recent(before.said, version, self._refresh):
            return
        local = self._device.personalize(share.message, share.examples, share.asked)
        if all(np.isfinite(leaf).all() for leaf in local.values()):
            self._own.put("local", client, local, version=version, data=data)
        else:
            log.warning("the local part of client '%s' is not finite, and is not kept", client)


def _tell_too_small(all: int, enough: int, least: int) -> None:
    """A line in the log if clients have too few examples to take part."""
    if all > enough:
        have, small = "has" if all - enough == 1 else "have", counted(all - enough, "client")
        rest = "they join when they have more" if enough else "waiting until there are more"
        log.info("%s of %d %s fewer than the run's %d examples: %s", small, all, have, least, rest)


def _left_out(number: int, why: str) -> None:
    """A line in the log if clients of a task are not in its sum."""
    if number:
        log.warning("%s of a task: %s, and not in its sum", counted(number, "client"), why)


def told(job: Job, refused: tuple[str, str] | None) -> Worked:
    """What came of a task, in the log too if it was nothing."""
    clients, version = clients_of(job), job.invitation.about.version
    client = str(clients[0]) if len(clients) == 1 else counted(len(clients), "client")
    whose = f"client '{client}'" if len(clients) == 1 else client
    version = version if isinstance(version, int) else 0
    if refused is None:
        return Worked(client, version, accepted=True)
    reason, what = refused
    log.warning("a task of %s, version %d, came to nothing (%s): %s", whose, version, reason, what)
    return Worked(client, version, accepted=False, reason=reason)


def _recent(said: Mapping[str, Any], version: int, refresh: int) -> bool:
    """Whether a local part is of this version, or of one shortly before it."""
    return 0 <= version - int(said.get("version", -refresh)) < refresh
