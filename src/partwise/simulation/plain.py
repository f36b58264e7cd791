"""The plain loop: one client at a time, bytes in and bytes out, nothing vectorised.

It is the reference for the compiled rounds, and names the client that fails. With `eager`, a client's own part is
not compiled either: loops run in Python, so that a model's functions can print numbers and a debugger can stop in
them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from partwise.algorithm import Build, init_server, kept_shape
from partwise.data.store import ClientStore
from partwise.device import Device
from partwise.metrics import Pairs, Sums
from partwise.model.spec import Pooled
from partwise.randomness import EVALUATION_ROUND, INIT_ROUND, round_rng
from partwise.selection.serving import check_way, serve
from partwise.server.cohort import Recruiting, recruit
from partwise.server.messages import read_invitation, send
from partwise.server.record import Record, costs, diverged, told_of
from partwise.server.round import Closed, Refused, Server
from partwise.server.step import ServerState
from partwise.server.update_sizes import outlying, spread_of
from partwise.simulation.backend import copied, costs_of, owned
from partwise.simulation.evaluator import Evaluator, KeptOf
from partwise.types import UserError

Answer = TypeVar("Answer")


class Watched(NamedTuple):
    """A round as the server closed it, and what only its clients know."""

    closed: Closed
    missed: int  # ids of the clients' examples that are not among the keys they asked for


def plain_round(
    server: Server,
    device: Device,
    state: ServerState,
    store: ClientStore,
    clients: Sequence[int],
    rng: jax.Array,
    seed: int = 0,
    round_number: int = 0,
    kept: dict[int, dict[str, np.ndarray]] | None = None,
    eager: bool = False,
) -> Watched:
    """One round with the clients at these positions of the store. Their choice of keys depends on `seed` and
    `round_number`. `kept` holds what clients keep from round to round, by position; it is updated. With `eager`,
    clients run step by step."""
    kept = {} if kept is None else kept
    names = [store.client_ids[position].item() for position in clients]
    now, missed = server.begin(state, round_number, rng, seed), 0
    for position, name, data in zip(clients, names, now.invite(names), strict=True):
        examples, task = store.gather([position]), read_invitation(data)
        try:
            asked = device.ask(examples, task.seed, task.round)
            message = _given(now.serve(task.about.task, asked.keys))
            with jax.disable_jit(eager):
                report, keep = device.report_and_keep(message, examples, asked, kept.get(position))
            _given(now.accept(report))
        except Exception as error:
            raise UserError(f"client {name!r} failed: {error}") from error
        missed += asked.missed
        if keep:
            kept[position] = keep
    return Watched(now.close(), missed)


def _given(answer: Answer | Refused) -> Answer:
    """Return the server's answer. Raises `UserError` if it is a refusal, which should not happen in the same
    process."""
    if isinstance(answer, Refused):
        raise UserError(f"the server refused ({answer.reason}): {answer.what}")
    return answer


class PlainSimulation:
    """Like `Simulation`, but as a plain loop."""

    lanes = 1
    capacity: Mapping[str, int] = {}

    def __init__(
        self,
        build: Build,
        rates: Mapping[str, float],
        store: ClientStore,
        recruiting: Recruiting,
        *,
        seed: int = 0,
        serving: str = "on_demand",
        eager: bool = False,
    ):
        self._eager = eager
        self.store, self.recruiting = store, recruiting.check(store.num_clients)
        self._build, self._rates = build, dict(rates)
        self.restart(seed)
        self.serving = check_way(serving)
        self._sizes = costs_of(self.algorithm)

    def restart(self, seed: int, rates: Mapping[str, float] | None = None) -> None:
        """Like `Simulation.restart`."""
        self._rates |= dict(rates or {})
        self.algorithm = self._build(self._rates)
        self.seed, self.round = seed, 0
        self.state = init_server(self.algorithm, round_rng(seed, INIT_ROUND))
        self.algorithm.partition.check_there(self.state.params)
        self.kept: dict[int, dict[str, np.ndarray]] = {}
        self._device, self._server = Device(self.algorithm), Server(self.algorithm)

    def current(self) -> Any:
        """Like `Simulation.current`. What clients keep is not saved, so algorithms with `keeps` are refused."""
        if self.algorithm.keeps:
            raise UserError(
                "the plain backend saves no run whose clients keep something: use the compiled one"
            )
        return self.state, {}

    def snapshot(self) -> Any:
        """Like `Simulation.snapshot`."""
        return copied(self.current())

    def resume(self, saved: Any, round_number: int, capacity: Mapping[str, int] = {}) -> None:
        """Continue from a snapshot that was taken after this many rounds."""
        (self.state, _), self.round = owned(saved), round_number

    def kept_of(self, client_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Like `Simulation.kept_of`."""
        shapes = {path: kept_shape(self.algorithm, path) for path in self.algorithm.judged_with}
        nothing = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in shapes.items()}
        each = [self.kept.get(place, nothing) for place in self.store.places(client_ids).tolist()]
        return {path: np.stack([one[path] for one in each]) for path in shapes}

    def run(self, num_rounds: int, ends: Collection[int] = ()) -> Generator[list[Record], None, None]:
        """Run this many rounds. Yields one record at a time."""
        for _ in range(num_rounds):
            began = time.perf_counter()
            cohort = recruit(self.recruiting, self.store.counts, self.seed, self.round)
            rng = round_rng(self.seed, self.round)
            done = plain_round(
                self._server,
                self._device,
                self.state,
                self.store,
                cohort.clients.tolist(),
                rng,
                self.seed,
                self.round,
                self.kept,
                self._eager,
            )
            closed = done.closed
            self.state, self.round = closed.state, self.round + 1
            loss, norms = closed.total.loss, np.array([size.norm for size in closed.sizes])
            served = serve(self._sizes, len(cohort.clients), closed.demands)
            record = Record(
                round=self.round,
                seconds=time.perf_counter() - began,
                clients=int(closed.total.clients),
                examples=int(self.store.counts[cohort.clients].sum()),
                loss=float(loss.value / loss.weight) if loss.weight > 0 else float("nan"),
                missed=done.missed,
                empty=closed.empty,
                dropped=cohort.dropped,
                too_small=cohort.too_small,
                spare=cohort.spare,
                broken=closed.broken,
                norms=spread_of(norms),
                outliers=tuple(s.client for s, far in zip(closed.sizes, outlying(norms), strict=True) if far),
                **costs(self._sizes, served, self.serving),
            )
            private = self.algorithm.aggregator.private
            if not closed.finite:
                clients = [] if private else self.store.client_ids[cohort.clients].tolist()
                raise diverged(told_of(record, private), clients, self.state.params)
            yield [told_of(record, private)]


class EagerEvaluator(Evaluator):
    """Like `Evaluator`, one client after the other and step by step."""

    def measure(
        self,
        params: Mapping[str, Any],
        rates: Mapping[str, float] | None = None,
        kept: KeptOf | None = None,
    ) -> tuple[dict[str, Sums], dict[str, Pairs]]:
        """Like `Evaluator.measure`."""
        device, partition = Device(self.build({**self.rates, **(rates or {})})), self.algorithm.partition
        needed, rng = partition.server_leaves(params), round_rng(self.seed, EVALUATION_ROUND)
        found = []
        for position, name in enumerate(self.store.client_ids.tolist()):
            examples = self.store.gather([position])
            asked = device.ask_whole(examples)
            message = send(partition, needed, asked.keys, rng)
            mine = {path: each[0] for path, each in kept(examples.client_ids).items()} if kept else None
            try:
                with jax.disable_jit():
                    measured = device.evaluate(message, examples, asked, mine)
            except Exception as error:
                raise UserError(f"client {name!r} failed: {error}") from error
            found.append(jax.tree_util.tree_map(np.asarray, measured))
        sums, pairs = {}, {}
        for name, metric in {"loss": None, **self.algorithm.model.metrics}.items():
            each = [measured[name] for measured in found]
            if isinstance(metric, Pooled):
                pairs[name] = Pairs(
                    *(np.concatenate([part[p.held] for p in each for part in [p[i]]]) for i in range(3))
                )
            else:
                sums[name] = Sums(*(np.array([float(one[i]) for one in each]) for i in range(2)))
        return sums, pairs
