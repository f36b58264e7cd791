"""Rounds on this machine's devices: cohorts are staged, run in compiled calls, and returned as records.

A run depends only on its seed. The cohort depends on (seed, round), and a client's randomness on (seed,
round, client id). Lanes, devices and calls only change the order of additions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import closing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from partwise.algorithm import Algorithm, Build
from partwise.data.spool import layouts_of
from partwise.data.store import ClientStore
from partwise.model.partition import DEFAULT, Partition
from partwise.randomness import INIT_ROUND, round_rng
from partwise.selection.serving import Served, check_way
from partwise.server.cohort import Cohort, Recruiting, recruit
from partwise.server.record import Record, costs, diverged, told_of
from partwise.server.round import check_rows, sees_all_rows
from partwise.server.step import ServerState
from partwise.simulation import stage
from partwise.simulation.ahead import ahead
from partwise.simulation.backend import calls_of, copied, costs_of, owned
from partwise.simulation.clock import compile_seconds
from partwise.simulation.compiled import Outcome, compile_rounds
from partwise.simulation.exchange import own_devices, put_along, put_own, to_host
from partwise.simulation.kept import Kept
from partwise.simulation.mesh import device_memory, make_mesh
from partwise.simulation.processes import num_processes
from partwise.simulation.seen import seen
from partwise.simulation.staging import Brought, Staged, Stager
from partwise.simulation.table_places import COPIES, choose_place, make_tables
from partwise.tree import num_bytes

RESIDENT_BYTES = 1 << 26  # populations up to this size stay on the devices
ON_ACCELERATORS = 1 << 32  # the same for accelerators, if it is no more than an eighth of their memory
STAGED_EXAMPLES = 1 << 22  # limit for all rounds of a call, if the population is not resident
AHEAD_CALLS, AHEAD_BYTES = 4, 1 << 29  # limits for calls that are staged ahead, if rows come over a network
LANES = 8
ON_HOST = "on the host: "  # before the names of rooms for rows that are brought from there


class _Recruited(NamedTuple):
    """The cohorts of a call, read."""

    first: int
    cohorts: list[Cohort]
    brought: Brought


class _Call(NamedTuple):
    """One compiled call with its arrays, ready to run."""

    first: int
    cohorts: list[Cohort]
    staged: Staged
    served: list[dict[str, Served]]


class Simulation:
    """A population, an algorithm and its state on this machine's devices."""

    def __init__(
        self,
        build: Build,
        rates: Mapping[str, float],
        store: ClientStore,
        recruiting: Recruiting,
        *,
        seed: int = 0,
        lanes: int | None = None,
        num_devices: int | None = None,
        rounds_per_call: int = 25,
        serving: str = "on_demand",
        tables: str = COPIES,
    ):
        self.rates = {name: jnp.asarray(rate, jnp.float32) for name, rate in rates.items()}
        self.algorithm: Algorithm = build(dict(rates))
        self.partition = self.algorithm.partition
        check_rows(self.algorithm)
        self.store = store
        self.serving, self._sizes = check_way(serving), costs_of(self.algorithm)
        self.recruiting = recruiting.check(store.num_clients)
        self.mesh = make_mesh(num_devices)
        self.use_lanes(lanes or LANES)
        self.resident = fits(store)
        room = recruiting.room(store.num_clients)
        self._stager = Stager(self.algorithm, store, self.mesh, self.resident, room)
        self._rooms = self._stager.rooms
        self.rounds_per_call = 1 if self.algorithm.keeps else self._affordable(rounds_per_call)
        place = choose_place(tables, self.algorithm, self.mesh, device_memory())
        self._tables = make_tables(place, self.algorithm, self.mesh)
        self._cut_tables = place != COPIES or not self._whole_tables()
        self._capacity: Mapping[str, int] = {}
        self._rounds = compile_rounds(
            build, self.mesh, self._rooms, apart=self._stager.apart, tables=self._tables.rowwise
        )
        self.restart(seed)

    # Where the data lives

    def _new_kept(self) -> Kept | None:
        """Empty storage for what clients keep; None if the algorithm keeps nothing."""
        if not self.algorithm.keeps:
            return None
        return Kept(self.algorithm, self._stager.population or self._stager.populate())

    def _whole_tables(self) -> bool:
        return whole_tables(self.algorithm, self.store, self.recruiting, self._rooms[0])

    def _affordable(self, rounds_per_call: int) -> int:
        """The number of rounds per call. It is smaller if the data is not resident and the cohorts' examples
        would not fit."""
        if self.resident:
            return rounds_per_call
        mean = self.store.num_examples / max(self.store.num_clients, 1)
        return max(1, min(rounds_per_call, int(STAGED_EXAMPLES // max(self.recruiting.size * mean, 1))))

    def _calls_ahead(self) -> int:
        """How many calls are staged ahead: one, or a few if rows come over a network, which is slow at times."""
        if self.resident or not self.store.remote:
            return 1
        rows = self.rounds_per_call * self.recruiting.size * self.store.num_examples / self.store.num_clients
        return int(max(1, min(AHEAD_CALLS, AHEAD_BYTES // max(rows * row_bytes(self.store), 1))))

    def use_lanes(self, lanes: int) -> None:
        """Run so many clients side by side from now on, or all of a device's if there are not so many."""
        self.lanes = min(lanes, -(-self.recruiting.size // self.mesh.size))
        self._has_room = False

    def lane_bytes(self) -> int:
        """An estimate of the memory for one more lane."""
        return lane_bytes(self.partition, self._rooms[0])

    # Running

    def run(self, num_rounds: int, ends: Collection[int] = ()) -> Generator[list[Record], None, None]:
        """Run this many rounds. Yields the records of every compiled call; `state` and `round` are then up to
        date. A call ends at each of the rounds in `ends`."""
        bounds = calls_of(self.round, self.round + num_rounds, self.rounds_per_call, ends)
        stage_call = lambda bound: self._stage(*bound)
        self._place()
        began = time.perf_counter()
        with closing(ahead(stage_call, bounds, self._calls_ahead())) as calls:
            for (_, end), call in zip(bounds, calls, strict=True):
                yield self._execute(call, end, began)
                began = time.perf_counter()

    def restart(self, seed: int, rates: Mapping[str, float] | None = None) -> None:
        """Start again with another seed, and with other rates if they are given, in the same compiled
        program."""
        self.seed, self.round = seed, 0
        self.rates |= {name: jnp.asarray(rate, jnp.float32) for name, rate in (rates or {}).items()}
        self._state = self._tables.init(round_rng(seed, INIT_ROUND))
        self.partition.check_there(self._state.params)
        self.kept = self._new_kept()

    @property
    def state(self) -> ServerState:
        """The server's state. Tables that are spread over the devices are such as `numpy.asarray` reads."""
        return self._tables.show(self._state)

    def current(self) -> Any:
        """Everything that the next round depends on, as it is: the next round may write over it."""
        return self.state, self.kept.arrays if self.kept else {}

    def snapshot(self) -> Any:
        """A copy of everything that the next round depends on, to be kept and given to `resume`."""
        return copied(self.current())

    def resume(self, saved: Any, round_number: int, capacity: Mapping[str, int] = {}) -> None:
        """Continue from a snapshot that was taken after this many rounds, with the `capacity` at that time."""
        (state, arrays), self.round = owned(saved), round_number
        for name, size in capacity.items():
            on_host = name.startswith(ON_HOST)
            rooms = self._tables.rooms if on_host else self._stager.capacity
            if rooms is not None:
                rooms[name.removeprefix(ON_HOST)] = size
        self._state = self._tables.place(state)
        if self.kept:
            writable = lambda array: np.require(array, requirements="W")  # a mapped file is not
            self.kept.arrays = {path: writable(array) for path, array in arrays.items()}

    @property
    def capacity(self) -> Mapping[str, int]:
        """How long arrays of the last call were, by name."""
        return self._capacity

    def kept_of(self, client_ids: np.ndarray) -> dict[str, np.ndarray]:
        """What these clients keep and are evaluated with [clients, ...]; zeros for clients that never took
        part."""
        clients = self.store.places(client_ids)
        return self.kept.take(clients, {}, self.algorithm.judged_with) if self.kept else {}

    def rehearse(self) -> float:
        """Run the first round, restore the state, and return the seconds. What was compiled stays; what was
        learned does not."""
        before = self.round, self.kept
        self.kept = self._new_kept()
        self._place()
        if not self._has_room:  # for a whole call, so that its program is compiled
            self._settled(self._stage(0, self.rounds_per_call))
            self._has_room = True
        try:
            return self._execute(self._stage(0, 1), 1, time.perf_counter(), self._tables.trial)[0].seconds
        finally:
            self.round, self.kept = before

    def _place(self) -> None:
        """Put the state on the devices as calls expect it."""
        self._state = self._tables.place(self._state)

    def _stage(self, first: int, end: int) -> _Call | _Recruited:
        """The call of these rounds, as far as this process can make it without the others."""
        cohorts, versions = self._cohorts(first, end)
        clients = [cohort.clients for cohort in cohorts]
        brought = self._stager.bring(clients, self.rounds_per_call, self.lanes, self.seed, first, versions)
        drawn = _Recruited(first, cohorts, brought)
        return drawn if self._stager.apart else self._settled(drawn)

    def _cohorts(self, first: int, end: int) -> tuple[list[Cohort], list[np.ndarray] | None]:
        """The cohorts of these rounds, and the versions that their clients begin with; None: the current one."""
        return [recruit(self.recruiting, self.store.counts, self.seed, t) for t in range(first, end)], None

    def _settled(self, drawn: _Call | _Recruited) -> _Call:
        if isinstance(drawn, _Call):
            return drawn
        staged = self._stager.settle(drawn.brought, self._cut_tables)
        choose, num_rounds = self.algorithm.choose, len(drawn.cohorts)
        served = stage.account(self._sizes, choose, staged.population, staged.wanted, staged.rows, num_rounds)
        return _Call(drawn.first, drawn.cohorts, staged, served)

    def _execute(
        self, drawn: _Call | _Recruited, end: int, began: float, run: Callable[..., Any] | None = None
    ) -> list[Record]:
        """Run a call. Its seconds are counted from when it was asked for, so that waiting for its rows counts.
        `run` is as in `Tables.call`."""
        call, compiling = self._settled(drawn), compile_seconds()
        rng, first, num_rounds = jax.random.key(self.seed), np.uint32(call.first), np.int32(len(call.cohorts))
        plan, clients = self._placed_plan(call.staged), call.staged.clients
        given = (self.rates, self._state, call.staged.shelf, plan, rng, first, num_rounds)
        self._state, outcome = (run or self._tables.call)(self._rounds, *given)
        self.round = end  # with the state, as the wait below may be interrupted
        of_host = {f"{ON_HOST}{space}": size for space, size in (self._tables.rooms or {}).items()}
        self._capacity = {**call.staged.capacity, **of_host}
        outcome, compiled = to_host((outcome, put_own(np.float32(compile_seconds() - compiling), self.mesh)))
        if self.kept:
            self.kept.put(np.where(outcome.used, clients, -1), outcome.keep)
        # The slowest to compile lets the others wait.
        seconds = time.perf_counter() - began - compiled.max()
        seconds = float(max(seconds, 0)) / len(call.cohorts)
        records = [self._record(call, i, outcome, seconds) for i in range(len(call.cohorts))]
        for i, record in enumerate(records):
            if not outcome.finite[i]:
                cohort = [] if self.algorithm.aggregator.private else call.cohorts[i].clients
                raise diverged(record, self.store.client_ids[cohort].tolist(), self.state.params)
        return records

    def _placed_plan(self, staged: Staged) -> stage.Plan:
        """The plan of this process's devices, with what their clients keep, on the devices."""
        plan = staged.plan
        if self.kept:
            own = staged.clients[:, own_devices(self.mesh)]
            kept = self.kept.take(own, self._stager.rows_kept())
            plan = plan._replace(slots=plan.slots._replace(kept=kept))
        return put_along(plan._replace(tables={}), self.mesh, 1)._replace(tables=plan.tables)

    def _record(self, call: _Call, i: int, outcome: Outcome, seconds: float) -> Record:
        record = seen(
            call.first + i + 1,
            seconds,
            call.cohorts[i],
            call.staged.clients[i],
            jax.tree_util.tree_map(lambda a: a[i], outcome),
            self.store,
            missed=int(call.staged.wanted.missed[i]),
            **costs(self._sizes, call.served[i], self.serving),
        )
        return told_of(record, self.algorithm.aggregator.private)


def whole_tables(
    algorithm: Algorithm, store: ClientStore, recruiting: Recruiting, room: Mapping[str, int]
) -> bool:
    """Whether a round works on whole tables, because they are small or because every row must be seen. `room` is
    that for a client's keys, by space."""
    if sees_all_rows(algorithm):
        return True
    if algorithm.optimizer.rows == "asked":
        return False
    mean = store.num_examples / max(store.num_clients, 1)
    values = stage.values_per_example(store, algorithm.partition)
    asked = lambda space: min(room[space], mean * max(values[space], 1))
    num_keys = algorithm.partition.num_keys
    return all(num_keys(space) <= recruiting.size * asked(space) for space in algorithm.partition.spaces)


def lane_bytes(partition: Partition, room: Mapping[str, int]) -> int:
    """An estimate of the memory for one more lane: its update, its gradient and the values in between."""
    size = 1
    for path in partition.server_paths:
        leaf = partition.shapes[path.removeprefix(DEFAULT)]
        whole = num_bytes(leaf.shape, leaf.dtype)
        space = partition.roles[path].space if path in partition.of("keyed") else None
        size += whole // partition.num_keys(space) * room[space] if space else whole
    return 4 * size


def fits(store: ClientStore) -> bool:
    """Whether a population is small enough to stay on the devices. Rounds of an accelerator are short, and would
    wait for rows that are staged: more of them stay there, unless they come over a network or are read by several
    processes, of which each should read its own clients."""
    limit = RESIDENT_BYTES
    if jax.default_backend() != "cpu" and not store.remote and num_processes() == 1:
        limit = max(limit, min(ON_ACCELERATORS, device_memory() // 8))
    return row_bytes(store) * store.num_examples <= limit


def row_bytes(store: ClientStore) -> int:
    """The bytes of one example."""
    return sum(layout.row_bytes for layout in layouts_of(store.columns).values())
