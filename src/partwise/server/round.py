"""A round as the server sees it, without any I/O: invite clients, serve their slices, accept reports, close.

The plain backend runs it with clients in the same process. The coordinator of a network runs it with remote
clients. The compiled cohort gives the same result. The sum and the step are compiled. Only those rows of a
table are touched that a client asks for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from partwise.data.ragged import pad_to_power
from partwise.metrics import Sums
from partwise.model.partition import Partition
from partwise.optimizers import ServerOptimizer
from partwise.programs import jit
from partwise.randomness import child
from partwise.selection.serving import Demand
from partwise.server.messages import About, Invitation, about, send, write_invitation
from partwise.server.refusals import Refused, norm_of, wrong_keys, wrong_place, wrong_values
from partwise.server.report_form import ReportForm
from partwise.server.step import ServerState, is_finite, put_rows, step, take_rows
from partwise.server.total import PUBLIC, Aggregator, Carried, Contribution, Total, add, zero_total
from partwise.types import UserError


class ServerSide(Protocol):
    """The parts of an algorithm that a server needs."""

    @property
    def partition(self) -> Partition: ...
    @property
    def aggregator(self) -> Aggregator: ...
    @property
    def optimizer(self) -> ServerOptimizer: ...


def sees_all_rows(algorithm: ServerSide) -> bool:
    """Whether a round must work on whole tables. If not, it works on a set of rows that includes all rows
    clients asked for."""
    return algorithm.aggregator.all_rows or algorithm.optimizer.rows == "all"


def check_rows(algorithm: ServerSide) -> None:
    """Raise `UserError` if the aggregator moves rows that the optimizer would not change."""
    if algorithm.aggregator.all_rows and algorithm.optimizer.rows == "asked":
        raise UserError(
            "this aggregator moves every row of a table, and a lazy server optimizer steps only on the rows that a "
            "cohort asked for: use sgd, adagrad, adam or yogi"
        )


def finish(
    algorithm: ServerSide, state: ServerState, total: Total, rng: jax.Array, has_noise: bool = False
) -> tuple[ServerState, Total]:
    """The end of a round: decode the total and give the mean update to the optimizer.

    State and total may be cut to the same rows of their tables, unless `sees_all_rows`. Nothing changes if no
    client took part. `has_noise` says that the noise of a private sum is in the total already.

    Returns:
        The new state, and the total in ordinary numbers.
    """
    aggregator = algorithm.aggregator
    noise_rng = None if has_noise else child(rng, "reveal")
    total, carried = aggregator.reveal(total, state.aggregator, noise_rng)
    mean, carried = aggregator.decode(algorithm.partition, total, carried, child(rng, "decode"))
    return step(state._replace(aggregator=carried), algorithm.optimizer, mean, total.weight > 0), total


class Accepted(NamedTuple):
    """A report that was added, or a report which says that it is not finite (`valid` is False)."""

    client: Any
    valid: bool


class Reported(NamedTuple):
    """A report that was read and is in order, the keys of its rows, and how large its update is."""

    sent: Contribution
    keys: Mapping[str, np.ndarray]
    norm: float | None = None  # for a weight of 1; None if its numbers are encoded


_NOTHING = np.float32(0)
SEALED = Reported(  # of a report that this server cannot read
    Contribution({}, _NOTHING, _NOTHING, Sums(_NOTHING, _NOTHING), np.asarray(True)),  # pyright: ignore
    {},
)


class SealedReports(Protocol):
    """The form of reports that a server cannot read."""

    @property
    def largest(self) -> int: ...
    def read(self, report: bytes, task: str) -> Any: ...


class Size(NamedTuple):
    """How large a report was that was used."""

    client: Any
    task: str
    norm: float  # of its update, for a weight of 1
    weight: float


class Closed(NamedTuple):
    """The next version of the model, and what the server knows about the round."""

    state: ServerState
    total: Total  # in ordinary numbers, without `update` and `held`
    demands: Mapping[str, Demand]
    bytes_down: int  # of slices
    bytes_up: int  # of reports that were accepted
    empty: int  # clients that had nothing to contribute, or that a site left out of its sum
    broken: tuple[Any, ...]  # clients whose update was not finite
    sizes: tuple[Size, ...]  # of the reports that were used; empty if they cannot be read
    finite: bool  # whether the next version is
    missing: int  # clients that were invited and did not report
    outliers: tuple[Any, ...] = ()  # clients whose report was left out because of its size


class Server:
    """The server side of an algorithm: the compiled functions that all rounds of a run share. `precision` says how
    clients write their updates (see `server.report_form`). If `sealed` is given, reports are such that this server
    cannot read (`server.sealed_form`): they are checked for their form, and `Round.include_sum` is given their
    sum. `noise` adds noise to a sum that nobody can compute anew, and changes what the aggregator carries as
    correlated noise needs it; without it, that of simulations is added, if the sum is private."""

    def __init__(
        self,
        algorithm: ServerSide,
        run: str = "",
        precision: str = "float32",
        sealed: SealedReports | None = None,
        noise: Callable[[Total, Carried], tuple[Total, Carried]] | None = None,
    ):
        check_rows(algorithm)
        self.algorithm, self.run, self.sealed, self.noise = algorithm, run, sealed, noise
        self.form = ReportForm(algorithm.aggregator, algorithm.partition, precision)
        partition, aggregator = algorithm.partition, algorithm.aggregator
        self.zero = jit(lambda params: zero_total(aggregator, partition, params))
        self.add = jit(lambda total, sent, rows: add(partition, total, sent, rows), donate_argnums=0)
        self.finish = jit(self._finish)

    @property
    def largest(self) -> int:
        """The most bytes that a report may have."""
        return (self.sealed or self.form).largest

    def begin(
        self, state: ServerState, number: int, rng: jax.Array, seed: int = 0, attempt: int = 0
    ) -> Round:
        """Begin the round after `number` earlier rounds. Clients choose their keys with `seed` and `number`.
        A round that is repeated has another `attempt`, and other tasks."""
        return Round(self, state, number, rng, seed, attempt)

    def about(self, number: int, client: Any, attempt: int = 0, kind: str = "train") -> About:
        """Identify the task of a client in a round. The result depends on the arguments and the run alone."""
        which = (f".{attempt}" if attempt else "") + ("" if kind == "train" else f".{kind}")
        name = f"{self.run}/{number}{which}/{client}"  # the client last: its name may have any characters
        task = hashlib.sha256(name.encode()).hexdigest()[:32]
        return About(self.run, number, task, self.algorithm.partition.digest)

    def read(
        self, here: About, keys: Mapping[str, np.ndarray] | None, report: bytes, clients: int = 1
    ) -> Reported | Refused:
        """Read a report for the task `here`. Changes nothing.

        Args:
            here: The task.
            keys: Those that its client asked for; None if it has not asked. Then the report must name them.
            report: The bytes that came.
            clients: How many clients the report may be the sum of.
        """
        try:
            refused = wrong_place(about(report), here)
            if refused:
                return refused
            if self.sealed:
                self.sealed.read(report, here.task)
                return SEALED
            sent, asked = self.form.read(report, keys, clients)
        except UserError as error:
            return Refused("malformed", str(error))
        refused = wrong_keys(self.algorithm.partition, asked) if keys is None else None
        norm = norm_of(sent)
        refused = refused or (wrong_values(sent, norm, clients) if sent.valid else None)
        return refused or Reported(sent, asked, norm)

    def _finish(
        self, state: ServerState, total: Total, rows: Mapping[str, Any], rng: jax.Array
    ) -> tuple[ServerState, Total, jax.Array]:
        partition, optimizer = self.algorithm.partition, self.algorithm.optimizer
        if not rows:
            has_noise = bool(self.noise or self.sealed)
            state, total = finish(self.algorithm, state, total, rng, has_noise)
            finite = is_finite(state)
        else:
            cut, part = take_rows(partition, optimizer, state, rows), _total_rows(partition, total, rows)
            cut, total = finish(self.algorithm, cut, part, rng)
            finite = is_finite(cut)
            state = put_rows(partition, optimizer, state, rows, cut)
        return state, total._replace(update={}, held={}), finite


class _Member(NamedTuple):
    """An invited client (or a site of several), and the keys that it asked for."""

    client: Any
    about: About
    keys: Mapping[str, np.ndarray] | None = None
    clients: int = 1  # of how many clients its report may be the sum


class Round:
    """One round. Each task belongs to one client, or to a site of several. Its report is accepted once."""

    def __init__(
        self, server: Server, state: ServerState, number: int, rng: jax.Array, seed: int, attempt: int
    ):
        self._server, self._state, self._rng = server, state, rng
        self._number, self._seed, self._attempt = number, seed, attempt
        self._open: dict[str, _Member] = {}
        self._served: list[Mapping[str, np.ndarray]] = []
        self._done: dict[str, Any] = {}
        self._broken: list[Any] = []
        self._sizes: list[Size] = []
        self._down = self._up = self._members = 0
        self._closed = False
        self._total = server.zero(state.params)

    def invite(self, cohort: Iterable[Any], sizes: Mapping[Any, int] | None = None) -> list[bytes]:
        """Return one invitation message for every client of the cohort. Each contains its own task. `sizes` says
        for a site how many clients its report may be the sum of."""
        self._check_open()
        sizes = sizes or {}
        tasks = []
        for client in cohort:
            here = self._server.about(self._number, client, self._attempt)
            if here.task in self._open or here.task in self._done:
                raise UserError(f"client {client!r} was invited to this round already")
            self._open[here.task] = _Member(client, here, clients=_size(client, sizes.get(client, 1)))
            tasks.append(write_invitation(Invitation(here, str(client), self._seed, self._number)))
        return tasks

    def grant(self, task: str, keys: Mapping[str, np.ndarray]) -> About | Refused:
        """Record the keys of a task. They cannot change later. Returns what the task's messages belong to."""
        member = self._open.get(task)
        if self._closed:
            return Refused("closed", "the round is closed")
        if member is None:
            return self._unknown(task)
        refused = wrong_keys(self._server.algorithm.partition, keys, member.keys)
        if refused:
            return refused
        if member.keys is None:
            self._open[task] = member._replace(keys=dict(keys))
            self._served.append(keys)
        return member.about

    def serve(self, task: str, keys: Mapping[str, np.ndarray]) -> bytes | Refused:
        """The slices of a task's keys. A client may ask again, for the same keys."""
        here = self.grant(task, keys)
        if isinstance(here, Refused):
            return here
        public, partition = self._state.aggregator.get(PUBLIC), self._server.algorithm.partition
        message = send(partition, self._state.params, keys, self._rng, here, public)
        self._down += len(message)
        return message

    def accept(self, report: bytes) -> Accepted | Refused:
        """Add a report to the sum, or return why it was refused."""
        try:
            belongs = about(report)
        except UserError as error:
            return Refused("malformed", str(error))
        member = self._open.get(belongs.task)
        if member is None:
            here = self._server.about(self._number, "")._replace(task=belongs.task)
            return wrong_place(belongs, here) or self._unknown(belongs.task)
        if self._closed:
            return Refused("closed", f"task {belongs.task} came too late: the round is closed")
        found = self._server.read(member.about, member.keys, report, member.clients)
        if isinstance(found, Refused):
            return found
        del self._open[belongs.task]
        if member.keys is None:
            self._served.append(found.keys)
        self._done[belongs.task] = member.client
        self._count(member.client, belongs.task, found, len(report), member.clients)
        return Accepted(member.client, bool(found.sent.valid))

    def include(
        self,
        client: Any,
        about: About,
        found: Reported,
        num_bytes: int,
        factor: float = 1.0,
        clients: int = 1,
    ) -> None:
        """Add what `Server.read` found in the report of a task for so many `clients`, without an invitation. Its
        update is multiplied by `factor`, and its weight is not (FedBuff's staleness)."""
        self._check_open()
        self._served.append(found.keys)
        self._done[about.task] = client
        if factor != 1.0 and found.sent.valid:
            update = {path: leaf * np.float32(factor) for path, leaf in found.sent.update.items()}
            found = found._replace(sent=found.sent._replace(update=update))
        self._count(client, about.task, found, num_bytes, clients)

    def include_sum(self, total: Total, clients: int, num_bytes: int) -> None:
        """Take the sum of sealed reports of so many clients, in place of reports."""
        self._check_open()
        self._total, self._members, self._up = total, clients, num_bytes

    def _count(self, client: Any, task: str, found: Reported, num_bytes: int, clients: int) -> None:
        self._up += num_bytes
        if found.sent.valid:
            self._members += clients
            if found.sent.clients > 0 and found.norm is not None:
                self._sizes.append(Size(client, task, found.norm, float(found.sent.weight)))
            self._add(found.sent, found.keys)
        else:
            self._broken.append(client)

    def close(self) -> Closed:
        """End the round. Returns the next version of the model, made from the accepted reports."""
        self._check_open()
        self._closed = True
        algorithm, keyed = self._server.algorithm, self._server.algorithm.partition.spaces
        asked = {space: [keys[space] for keys in self._served] for space in keyed}
        rows = {space: np.unique(np.concatenate(each)) for space, each in asked.items() if each}
        cut = (
            {}
            if sees_all_rows(algorithm)
            else {space: self._rows(space, each) for space, each in rows.items()}
        )
        state, added_up = self._state, self._total
        if self._server.noise:
            added_up, carried = self._server.noise(added_up, state.aggregator)
            state = state._replace(aggregator=carried)
        state, total, finite = self._server.finish(state, added_up, cut, self._rng)
        counts = lambda space: np.array([len(keys) for keys in asked[space]], int)
        return Closed(
            state=state,
            total=total,
            demands={space: Demand(len(rows.get(space, ())), counts(space)) for space in keyed},
            bytes_down=self._down,
            bytes_up=self._up,
            empty=self._members - int(total.clients),
            broken=tuple(self._broken),
            sizes=tuple(self._sizes),
            finite=bool(finite),
            missing=len(self._open),
        )

    def _add(self, sent: Contribution, keys: Mapping[str, np.ndarray]) -> None:
        """Add a contribution, padded to a few common sizes, so that the sum is compiled only for these."""
        keyed, partition = self._server.algorithm.partition.of("keyed"), self._server.algorithm.partition
        update = {
            path: pad_to_power(np.asarray(change)) if path in keyed else change
            for path, change in sent.update.items()
        }
        held = {space: pad_to_power(np.asarray(weights)) for space, weights in sent.held.items()}
        rows = {space: self._rows(space, keys[space]) for space in partition.spaces}
        jax.block_until_ready(self._total)  # reports whose sums are still under way would wait in memory
        self._total = self._server.add(self._total, sent._replace(update=update, held=held), rows)

    def _rows(self, space: str, keys: np.ndarray) -> np.ndarray:
        """Keys as row numbers, padded with a row number that does not exist."""
        return pad_to_power(keys.astype(np.int32), self._server.algorithm.partition.num_keys(space))

    def _check_open(self) -> None:
        if self._closed:
            raise UserError(f"round {self._number} is closed already: begin the next one with `Server.begin`")

    def _unknown(self, task: str) -> Refused:
        if task in self._done:
            return Refused("duplicate", f"task {task} has reported already")
        return Refused("task", f"there is no task {task} in this round")


def _size(client: Any, clients: int) -> int:
    if clients < 1:
        raise UserError(
            f"{client!r} is invited for {clients} clients: a report is of one client or of several"
        )
    return clients


def _total_rows(partition: Partition, total: Total, rows: Mapping[str, Any]) -> Total:
    """The total cut to these rows, as `take_rows` cuts a state."""
    space_of = lambda path: partition.roles[path].space if path in partition.roles else ""
    take = lambda leaf, space: leaf.at[rows[space]].get(mode="clip") if space in rows else leaf
    return total._replace(
        update={path: take(leaf, space_of(path)) for path, leaf in total.update.items()},
        held={space: take(leaf, space) for space, leaf in total.held.items()},
    )
