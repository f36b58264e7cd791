"""Calls of compiled programs, ready to run: the arrays of a population, in sizes that seldom change.

`stage` has the steps; here they are put together, for simulated rounds (`loop`) and for the clients of a site
(`site`). Sizes only grow, so that a program is compiled once and then used for every call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from partwise.algorithm import Algorithm
from partwise.data.ragged import pad
from partwise.data.store import ClientStore
from partwise.simulation import stage
from partwise.simulation.apart import CallClients, of_all_processes
from partwise.simulation.exchange import own_devices, put_everywhere, put_own
from partwise.simulation.processes import num_processes

EXAMPLES = "examples"  # the name of the room for them


class Brought(NamedTuple):
    """Cohorts with their examples and keys, before they are arrays of a call."""

    population: stage.Population  # the clients of `wanted` are positions in it
    places: np.ndarray | None  # where they are in the store; None: at the same positions
    shelf: Any
    wanted: stage.Requests

    def in_store(self, clients: np.ndarray) -> np.ndarray:
        """Clients as positions in the store; -1 means no client."""
        return clients if self.places is None else np.append(self.places, -1)[clients]


class Staged(NamedTuple):
    """Cohorts as the arrays of a call."""

    population: stage.Population  # the plan's clients are positions in it
    shelf: Any
    plan: stage.Plan  # of this process's devices
    wanted: stage.Requests  # of all devices, with keys as they are, also if the plan's tables are cut
    rows: Mapping[str, list[np.ndarray]]  # space -> the rows of every round's table, if it is cut
    clients: np.ndarray  # [rounds, devices, chunks, lanes]: of all devices, as positions in the store
    capacity: Mapping[str, int]  # that of the stager, when these were staged


class Stager:
    """Stages the clients of a store.

    Args:
        algorithm: Says which keys clients choose, and what they keep.
        store: The population.
        mesh: The devices.
        resident: Whether the population stays on the devices. If not, each call brings its own clients.
        most_clients: Room for this many clients in a cohort from the start.
    """

    def __init__(
        self, algorithm: Algorithm, store: ClientStore, mesh: Mesh, resident: bool, most_clients: int
    ):
        self._algorithm, self._store, self._mesh = algorithm, store, mesh
        self.apart = (
            not resident and num_processes() > 1
        )  # each process has read its own devices' clients alone
        self.population = self.populate() if resident else None
        known = self.population
        self._shelf: Any = put_everywhere(stage.shelve(known), mesh) if known else None
        rooms = stage.rooms_of(store, algorithm.partition, algorithm.choose, known)
        self.rooms = rooms[:1] if algorithm.keeps else rooms  # what clients keep is moved in one size
        self.capacity = {"cohort": most_clients}  # of arrays, by name: it only grows

    def populate(self) -> stage.Population:
        """All clients with their keys."""
        return stage.populate(self._store, self._algorithm.partition, self._algorithm.choose)

    def rows_kept(self) -> dict[str, int]:
        """How many rows a client keeps at most, by keyed leaf."""
        partition = self._algorithm.partition
        keyed = [path for path in self._algorithm.keeps if path in partition.of("keyed")]
        return {path: self.rooms[0][partition.roles[path].space] for path in keyed}

    def stage(
        self,
        cohorts: Sequence[np.ndarray],
        num_rounds: int,
        lanes: int,
        seed: int,
        first: int,
        cut_tables: bool,
    ) -> Staged:
        """Cohorts (positions in the store) of the rounds from number `first` on, in a call with room for
        `num_rounds`. With `cut_tables`, keys are row numbers in tables that have only the rows of a round."""
        return self.settle(self.bring(cohorts, num_rounds, lanes, seed, first), cut_tables)

    def bring(
        self,
        cohorts: Sequence[np.ndarray],
        num_rounds: int,
        lanes: int,
        seed: int,
        first: int,
        versions: Sequence[np.ndarray] | None = None,
    ) -> Brought:
        """The first half of `stage`: read the clients, and let them choose their keys. `versions` are those of the
        model that clients begin with (default: the round's)."""
        room = self._room("cohort", max(map(len, cohorts)))
        chosen = stage.beside(cohorts, num_rounds, room)
        slots = lambda values: stage.lay_out(self._store.counts, chosen, self._mesh.size, lanes, values)
        population, places, shelf, here = self._read(slots(chosen))
        begun = None if versions is None else self._mine(slots(stage.beside(versions, num_rounds, room)))
        partition, choose = self._algorithm.partition, self._algorithm.choose
        wanted = stage.ask(population, partition, choose, stage.plan(population, here, begun), seed, first)
        return Brought(population, places, shelf, wanted)

    def settle(self, brought: Brought, cut_tables: bool) -> Staged:
        """The second half of `stage`: the arrays, in their sizes. It is collective if processes are `apart`."""
        population, wanted, choose = brought.population, brought.wanted, self._algorithm.choose
        asked, rows = stage.cut(population, choose, wanted) if cut_tables else (wanted, {})
        plan = stage.by_room(asked.plan, self.rooms)
        clients = brought.in_store(plan.slots.client)
        sizes = _sizes(brought.shelf, asked, self.population is None)
        if self.apart:
            mine = rows if cut_tables else stage.cut(population, choose, wanted)[1]  # for records
            known = of_all_processes(CallClients(clients, plan.slots.key_count, wanted.missed, mine, sizes))
            asked = stage.in_tables(asked, rows, known.rows)
            clients, rows, sizes = known.clients, known.rows, known.sizes
            slots = plan.slots._replace(client=clients, key_count=known.key_count)
            wanted = wanted._replace(plan=plan._replace(slots=slots), missed=known.missed)
        if cut_tables:
            tables = {space: self._stacked(space, each, len(clients)) for space, each in rows.items()}
            plan = plan._replace(tables=tables)
        shelf = self._filled(brought.shelf, asked, sizes)
        return Staged(population, shelf, self._own(plan), wanted, rows, clients, dict(self.capacity))

    def _read(self, clients: np.ndarray) -> tuple[stage.Population, np.ndarray | None, Any, np.ndarray]:
        """The population, its positions in the store, its shelf, and the clients as positions in it."""
        if self.population is not None:
            return self.population, None, self._shelf, clients
        here = self._mine(clients)
        places = here[here >= 0]
        gathered = self._store.gather(places)
        population = stage.populate(gathered, self._algorithm.partition, self._algorithm.choose)
        here[here >= 0] = np.arange(len(places))
        return population, places, stage.shelve(population), here

    def _mine(self, slots: np.ndarray) -> np.ndarray:
        """The slots whose clients this process has at hand: all if the population is resident, those of its own
        devices otherwise."""
        return slots if self.population is not None else slots[:, own_devices(self._mesh)]

    def _own(self, plan: stage.Plan) -> stage.Plan:
        """The part of a plan for this process's devices."""
        if self.apart or num_processes() == 1:
            return plan
        here = own_devices(self._mesh)
        own = jax.tree_util.tree_map(lambda x: x[:, here], plan._replace(tables={}))
        return own._replace(tables=plan.tables)

    def _filled(self, shelf: stage.Shelf, asked: stage.Requests, sizes: Mapping[str, int]) -> stage.Shelf:
        """The shelf with the keys of a call. If processes are `apart`, it has a leading axis of devices."""
        room = {name: self._room(name, size) for name, size in sizes.items()}
        if self.population is None:
            shelf = stage.pad_shelf(
                shelf, room[EXAMPLES], {space: room[f"keys {space}"] for space in shelf.keys}
            )
        keys = {space: pad(each, room[f"keys {space}"]) for space, each in asked.keys.items()}
        places = {space: pad(each, room[f"places {space}"]) for space, each in asked.places.items()}
        shelf = shelf._replace(keys=shelf.keys | keys, places=places)
        return put_own(shelf, self._mesh) if self.apart else shelf

    def _stacked(self, space: str, tables: list[np.ndarray], num_rounds: int) -> np.ndarray:
        """The rows of every round's table [rounds, room], padded with a row number that does not exist."""
        room = self._room(f"rows {space}", max(map(len, tables)))
        result = np.full((num_rounds, room), self._algorithm.partition.num_keys(space), np.int32)
        for row, rows in zip(result, tables, strict=False):
            row[: len(rows)] = rows
        return result

    def _room(self, name: str, size: int) -> int:
        return stage.grown(self.capacity, name, size)


def _sizes(shelf: stage.Shelf, asked: stage.Requests, brings: bool) -> dict[str, int]:
    """How long the arrays of a call must be. `brings` says whether it brings its clients' examples."""
    longest: dict[str, int] = {}
    brought = {**shelf.positions, **shelf.columns} if brings else {}
    named = [(EXAMPLES, rows) for rows in [*brought.values()][:1]]
    named += [(f"keys {space}", rows) for space, rows in shelf.keys.items() if brings]
    named += [(f"keys {space}", rows) for space, rows in asked.keys.items()]
    named += [(f"places {space}", rows) for space, rows in asked.places.items()]
    for name, rows in named:
        longest[name] = max(len(rows), longest.get(name, 0))
    return longest
