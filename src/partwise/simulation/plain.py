"""The plain loop: one client at a time, bytes in and bytes out, nothing vectorised.

The oracle for the compiled rounds, and the debugger that names the client that fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from partwise import tree
from partwise.algorithm import Algorithm, Build, init_server, kept_shape
from partwise.data.store import ClientStore
from partwise.device import Device, read_report, send
from partwise.randomness import INIT_ROUND, round_rng
from partwise.selection.serving import Demand, check_way, serve, sizes_of
from partwise.server.cohort import Recruiting, recruit
from partwise.server.mean import weight_of
from partwise.server.record import Record, costs, diverged
from partwise.server.step import ServerState, is_finite, step, step_rows, trainable
from partwise.server.total import Total, add_report, zero_total
from partwise.types import UserError


class PlainRound(NamedTuple):
    """A round's new state, and what the server saw of it."""

    state: ServerState
    total: Total
    bytes_down: int  # of the messages themselves
    bytes_up: int
    demands: Mapping[str, Demand]
    missed: int
    empty: int
    broken: tuple[Any, ...]


def plain_round(
    algorithm: Algorithm,
    device: Device,
    state: ServerState,
    store: ClientStore,
    clients: Sequence[int],
    rng: jax.Array,
    seed: int = 0,
    round_number: int = 0,
    kept: dict[int, dict[str, np.ndarray]] | None = None,
) -> PlainRound:
    """One round with the clients at these positions of the store; their choice of keys depends on seed and
    round. What they keep from round to round is in `kept`, by position."""
    kept = {} if kept is None else kept
    partition = algorithm.partition
    total = zero_total(partition, state.params, trainable(partition, state.params), algorithm.aggregator.held)
    down, up, missed, empty, broken = 0, 0, 0, 0, []
    keys: dict[str, list[np.ndarray]] = {space: [] for space in partition.spaces}
    for position in clients:
        examples, name = store.gather([position]), store.client_ids[position].item()
        try:
            asked = device.ask(examples, seed, round_number)
            message = send(partition, state.params, asked.keys, rng)
            answer, keep = device.report_and_keep(message, examples, asked, kept.get(position))
        except Exception as error:
            raise UserError(f"client {name!r} failed: {error}") from error
        keys = {space: [*each, asked.keys[space]] for space, each in keys.items()}
        report = read_report(answer)
        down, up, missed = down + len(message), up + len(answer), missed + asked.missed
        if not tree.all_finite((report.update, report.weight)):
            broken.append(name)
            continue
        weight = weight_of(algorithm.aggregator, report)
        empty += int(weight == 0)
        if keep and weight > 0:
            kept[position] = keep
        total = add_report(partition, total, report, weight, asked.keys)
    mean, carried = algorithm.aggregator.decode(partition, total, state.aggregator)
    state = _step(algorithm, state._replace(aggregator=carried), mean, total.weight > 0, keys)
    demands = {
        space: Demand(
            len(set().union(*(each.tolist() for each in asked_for))), np.array(list(map(len, asked_for)), int)
        )
        for space, asked_for in keys.items()
    }
    return PlainRound(state, total, down, up, demands, missed, empty, tuple(broken))


def _step(
    algorithm: Algorithm, state: ServerState, mean: Mapping[str, Any], active: Any, keys: Mapping[str, list]
) -> ServerState:
    """The server's step; on the rows that clients asked for, if its optimizer is defined on those alone."""
    if algorithm.optimizer.rows != "asked":
        return step(state, algorithm.optimizer, mean, active)
    rows = {space: jnp.asarray(np.unique(np.concatenate(each))) for space, each in keys.items() if each}
    return step_rows(algorithm.partition, algorithm.optimizer, state, rows, mean, active)


class PlainSimulation:
    """`Simulation` as a plain loop."""

    lanes = 1

    def __init__(
        self,
        build: Build,
        rates: Mapping[str, float],
        store: ClientStore,
        recruiting: Recruiting,
        *,
        seed: int = 0,
        serving: str = "on_demand",
    ):
        self.store, self.recruiting = store, recruiting.check(store.num_clients)
        self._build, self._rates = build, dict(rates)
        self.restart(seed)
        self.serving, self._sizes = check_way(serving), sizes_of(self.algorithm.partition)

    def restart(self, seed: int, rates: Mapping[str, float] | None = None) -> None:
        """As `Simulation.restart`."""
        self._rates |= dict(rates or {})
        self.algorithm = self._build(self._rates)
        self.seed, self.round = seed, 0
        self.state = init_server(self.algorithm, round_rng(seed, INIT_ROUND))
        self.kept: dict[int, dict[str, np.ndarray]] = {}
        self._device = Device(self.algorithm)

    def snapshot(self) -> Any:
        """As `Simulation.snapshot`; what clients keep is not saved, so it must be nothing."""
        if self.algorithm.keeps:
            raise UserError(
                "the plain backend saves no run whose clients keep something: use the compiled one"
            )
        return self.state, {}

    def resume(self, saved: Any, round_number: int) -> None:
        """Go on from a snapshot taken after that many rounds."""
        (self.state, _), self.round = saved, round_number

    def kept_of(self, client_ids: np.ndarray) -> dict[str, np.ndarray]:
        """As `Simulation.kept_of`."""
        shapes = {path: kept_shape(self.algorithm, path) for path in self.algorithm.judged_with}
        nothing = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in shapes.items()}
        each = [self.kept.get(place, nothing) for place in self.store.places(client_ids).tolist()]
        return {path: np.stack([one[path] for one in each]) for path in shapes}

    def run(self, num_rounds: int) -> Iterator[list[Record]]:
        """Run that many rounds, one record at a time."""
        for _ in range(num_rounds):
            began = time.perf_counter()
            cohort = recruit(self.recruiting, self.store.counts, self.seed, self.round)
            rng = round_rng(self.seed, self.round)
            done = plain_round(
                self.algorithm,
                self._device,
                self.state,
                self.store,
                cohort.clients.tolist(),
                rng,
                self.seed,
                self.round,
                self.kept,
            )
            self.state, self.round = done.state, self.round + 1
            loss = done.total.loss
            served = serve(self._sizes, len(cohort.clients), done.demands)
            record = Record(
                round=self.round,
                seconds=time.perf_counter() - began,
                clients=int(done.total.clients),
                examples=int(self.store.counts[cohort.clients].sum()),
                loss=float(loss.value / loss.weight) if loss.weight > 0 else float("nan"),
                missed=done.missed,
                empty=done.empty,
                dropped=cohort.dropped,
                too_small=cohort.too_small,
                spare=cohort.spare,
                broken=done.broken,
                **costs(self._sizes, served, self.serving),
            )
            if not is_finite(self.state):
                raise diverged(record, self.store.client_ids[cohort.clients].tolist())
            yield [record]
