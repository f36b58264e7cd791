"""Several runs in one compiled call: other learning rates, other seeds, the same program.

Rates are values, and runs are one more axis. So a grid costs little more than its arithmetic: the loops run
once for all runs. Each run equals the run that `Simulation` makes with its rates and seed, except for the last
digits: its clients are added up in another order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partwise.algorithm import Algorithm, Build, init_server
from partwise.data.ragged import offsets, pad
from partwise.data.store import ClientStore
from partwise.metrics import to_host
from partwise.randomness import INIT_ROUND, round_rng
from partwise.selection.serving import Served, check_way
from partwise.server.cohort import Cohort, Recruiting, recruit
from partwise.server.record import Record, costs, diverged, told_of
from partwise.server.step import ServerState
from partwise.simulation import stage
from partwise.simulation.backend import costs_of
from partwise.simulation.clock import compile_seconds
from partwise.simulation.compiled import Outcome, compile_rounds
from partwise.simulation.mesh import AXIS, RUNS, everywhere, make_runs_mesh
from partwise.simulation.processes import check_alone
from partwise.simulation.seen import seen
from partwise.types import UserError

CPU_LANES, ACCELERATOR_LANES = 32, 4096  # of all runs together, on a device


def why_alone(algorithm: Algorithm) -> str:
    """Why runs of an algorithm cannot be side by side; empty if they can."""
    if algorithm.optimizer.rows == "asked":
        return (
            "a sweep works on whole tables, and a lazy server optimizer on the rows that a cohort asks for: "
            "run its rates one by one, or use adam or yogi"
        )
    if algorithm.keeps:
        return "a sweep has no room for what clients keep from round to round: run them one by one"
    return ""


class _Drawn(NamedTuple):
    """The cohorts of a seed in a call."""

    cohorts: list[Cohort]
    missed: np.ndarray
    served: list[dict[str, Served]]


class Sweep:
    """Runs side by side: one for every pair of rates and seed. The population and the tables must fit into
    memory."""

    def __init__(
        self,
        build: Build,
        rates: Sequence[Mapping[str, float]],
        seeds: Sequence[int],
        store: ClientStore,
        recruiting: Recruiting,
        *,
        lanes: int | None = None,
        rounds_per_call: int = 25,
        serving: str = "on_demand",
    ):
        check_alone("runs side by side are", "train them one by one, or sweep in one process")
        if len(rates) != len(seeds) or not rates:
            raise UserError(
                f"a sweep needs one seed for every set of rates, not {len(rates)} and {len(seeds)}"
            )
        self.algorithm = build(dict(rates[0]))
        if why := why_alone(self.algorithm):
            raise UserError(why)
        self.partition = self.algorithm.partition
        self.recruiting = recruiting.check(store.num_clients)
        self.mesh = make_runs_mesh(len(rates))
        self._apart, self._devices = self.mesh.shape[RUNS], self.mesh.shape[AXIS]
        self.rounds_per_call = rounds_per_call
        most = CPU_LANES if jax.default_backend() == "cpu" else ACCELERATOR_LANES
        self.lanes = lanes or max(1, min(most * self._apart // len(rates), recruiting.size // self._devices))
        self.serving, self._sizes = check_way(serving), costs_of(self.algorithm)
        self._population = stage.populate(store, self.partition, self.algorithm.choose)
        self._shelf = jax.device_put(stage.shelve(self._population), everywhere(self.mesh))
        self._rooms = stage.rooms_of(store, self.partition, self.algorithm.choose, self._population)
        self._rounds = compile_rounds(build, self.mesh, self._rooms, sweep=True)
        self._room = {"cohort": recruiting.room(store.num_clients)}
        self.restart(rates, seeds)

    def restart(self, rates: Sequence[Mapping[str, float]], seeds: Sequence[int]) -> None:
        """Start again with as many other runs, in the same compiled program."""
        self.rates, self.seeds, self.round = [dict(each) for each in rates], list(seeds), 0
        self.errors: dict[int, UserError] = {}  # run -> why its results are useless
        states = [init_server(self.algorithm, round_rng(seed, INIT_ROUND)) for seed in self.seeds]
        self.partition.check_there(states[0].params)
        self.state = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *states)

    def params(self, run: int) -> dict[str, jax.Array]:
        """The server's leaves of one run."""
        return {path: leaf[run] for path, leaf in self.state.params.items()}

    def put(self, run: int, state: ServerState) -> None:
        """Replace the state of one run."""
        self.state = jax.tree_util.tree_map(lambda all, one: all.at[run].set(one), self.state, state)

    def run(self, num_rounds: int) -> Iterator[list[list[Record]]]:
        """Run this many rounds of every run. Yields the records of every call, by run.

        A run whose parameters are no longer finite continues, but its results are useless. `errors` tells of it.
        """
        last = self.round + num_rounds
        while self.round < last:
            yield self.call(min(self.rounds_per_call, last - self.round))

    def call(self, count: int) -> list[list[Record]]:
        """Run the next `count` rounds of every run, at most `rounds_per_call`. Seconds are shared among runs."""
        self.state = jax.device_put(self.state, NamedSharding(self.mesh, P(RUNS)))
        rates = {name: np.array([each[name] for each in self.rates], np.float32) for name in self.rates[0]}
        rngs = jnp.stack([jax.random.key(seed) for seed in self.seeds])
        shelf, plan, drawn = self._stage(count)
        began, compiling = time.perf_counter(), compile_seconds()
        self.state, outcome = self._rounds(
            rates, self.state, shelf, plan, rngs, np.uint32(self.round), np.int32(count)
        )
        outcome = jax.tree_util.tree_map(lambda x: x[:, :count], to_host(outcome))
        seconds = max(time.perf_counter() - began - (compile_seconds() - compiling), 0)
        first, self.round = self.round, self.round + count
        share = seconds / count / len(self.seeds)
        here = lambda tree, *place: jax.tree_util.tree_map(lambda x: x[place], tree)
        records = [
            [
                self._record(
                    first + i, share, drawn[seed], i, plan.slots.client[run, i], here(outcome, run, i)
                )
                for i in range(count)
            ]
            for run, seed in enumerate(self.seeds)
        ]
        for run in np.flatnonzero(~outcome.finite.all(axis=1)).tolist():
            i = int(np.argmin(outcome.finite[run]))
            self.errors.setdefault(run, self._diverged(records[run][i], drawn[self.seeds[run]].cohorts[i]))
        return records

    def _diverged(self, record: Record, cohort: Cohort) -> UserError:
        clients = [] if self.algorithm.aggregator.private else cohort.clients
        return diverged(record, self._population.store.client_ids[clients].tolist())

    def _record(
        self, number: int, seconds: float, drawn: _Drawn, i: int, clients: np.ndarray, outcome: Outcome
    ) -> Record:
        told = costs(self._sizes, drawn.served[i], self.serving)
        record = seen(
            number + 1,
            seconds,
            drawn.cohorts[i],
            clients,
            outcome,
            self._population.store,
            missed=int(drawn.missed[i]),
            **told,
        )
        return told_of(record, self.algorithm.aggregator.private)

    def _stage(self, count: int) -> tuple[stage.Shelf, stage.Plan, dict[int, _Drawn]]:
        """The cohorts of each seed. The loops of a chunk run as often as the largest client of any run needs."""
        asked: dict[int, stage.Requests] = {}
        draw = lambda seed, i: recruit(self.recruiting, self._population.store.counts, seed, self.round + i)
        cohorts = {seed: [draw(seed, i) for i in range(count)] for seed in self.seeds}
        largest = max(len(cohort.clients) for each in cohorts.values() for cohort in each)
        room, choose = stage.grown(self._room, "cohort", largest), self.algorithm.choose
        drawn = {}
        for seed, each in cohorts.items():
            beside = stage.beside([cohort.clients for cohort in each], self.rounds_per_call, room)
            counts = self._population.store.counts
            plan = stage.plan(self._population, stage.lay_out(counts, beside, self._devices, self.lanes))
            asked[seed] = stage.ask(self._population, self.partition, choose, plan, seed, self.round)
            served = stage.account(self._sizes, choose, self._population, asked[seed], {}, count)
            drawn[seed] = _Drawn(each, asked[seed].missed, served)
        keys, places = self._joined(asked)
        slots: Any = jax.tree_util.tree_map(
            lambda *a: np.stack(a), *(asked[seed].plan.slots for seed in self.seeds)
        )
        limits = [(each.plan.longest, each.plan.most_keys) for each in asked.values()]
        longest, most_keys = jax.tree_util.tree_map(lambda *a: np.max(a, axis=0), *limits)
        shelf = self._shelf._replace(keys=self._shelf.keys | keys, places=places)
        return shelf, stage.by_room(stage.Plan(slots, longest, most_keys, {}), self._rooms), drawn

    def _joined(self, asked: dict[int, stage.Requests]) -> tuple[dict, dict]:
        """What the seeds ask for, one after the other. Their slots are changed to point to the new positions."""
        keys, places = {}, {}
        for space in next(iter(asked.values())).keys:
            for name, into, field in (("keys", keys, "key_start"), ("places", places, "place_start")):
                parts = [getattr(each, name)[space] for each in asked.values()]
                for (seed, each), begin in zip(
                    asked.items(), offsets(np.array(list(map(len, parts)))), strict=True
                ):
                    slots = each.plan.slots
                    moved = {**getattr(slots, field), space: getattr(slots, field)[space] + np.int32(begin)}
                    plan = each.plan._replace(slots=slots._replace(**{field: moved}))
                    asked[seed] = each._replace(plan=plan)
                room = stage.grown(self._room, f"{name} {space}", sum(map(len, parts)))
                into[space] = pad(np.concatenate(parts), room)
        return keys, places
