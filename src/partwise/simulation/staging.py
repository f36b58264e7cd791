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
from partwise.simulation.mesh import everywhere


class Staged(NamedTuple):
    """Cohorts as the arrays of a call."""

    population: stage.Population  # the plan's clients are positions in it
    shelf: Any
    plan: stage.Plan
    wanted: stage.Requests  # with keys as they are, also if the plan's tables are cut
    rows: Mapping[str, list[np.ndarray]]  # space -> the rows of every round's cut table; empty: whole tables


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
        self.population = self.populate() if resident else None
        known = self.population
        self._shelf: Any = jax.device_put(stage.shelve(known), everywhere(mesh)) if known else None
        rooms = stage.rooms_of(store, algorithm.partition, algorithm.choose, known)
        self.rooms = rooms[:1] if algorithm.keeps else rooms  # what clients keep is moved in one size
        self._capacity = {"cohort": most_clients}

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
        versions: Sequence[np.ndarray] | None = None,
    ) -> Staged:
        """Cohorts (positions in the store) of the rounds from number `first` on, in a call with room for
        `num_rounds`. With `cut_tables`, keys are row numbers in tables that have only the rows of a round.
        `versions` are those of the model that clients begin with (default: the round's)."""
        partition, choose = self._algorithm.partition, self._algorithm.choose
        room = self._room("cohort", max(map(len, cohorts)))
        population, shelf, chosen = self._brought(stage.beside(cohorts, num_rounds, room))
        begun = None if versions is None else stage.beside(versions, num_rounds, room)
        plan = stage.plan(population, chosen, self._mesh.size, lanes, begun)
        asked = wanted = stage.ask(population, partition, choose, plan, seed, first)
        rows: Mapping[str, list[np.ndarray]] = {}
        if cut_tables:
            asked, rows = stage.cut(population, choose, wanted)
            tables = {space: self._stacked(space, each, num_rounds) for space, each in rows.items()}
            asked = asked._replace(plan=asked.plan._replace(tables=tables))
        keys = {space: self._filled(f"keys {space}", each) for space, each in asked.keys.items()}
        places = {space: self._filled(f"places {space}", each) for space, each in asked.places.items()}
        shelf = shelf._replace(keys=shelf.keys | keys, places=places)
        return Staged(population, shelf, stage.by_room(asked.plan, self.rooms), wanted, rows)

    def _brought(self, chosen: np.ndarray) -> tuple[stage.Population, Any, np.ndarray]:
        """The population, its shelf, and the chosen clients as positions in it."""
        if self.population is not None:
            return self.population, self._shelf, chosen
        gathered = self._store.gather(chosen[chosen >= 0])
        population = stage.populate(gathered, self._algorithm.partition, self._algorithm.choose)
        chosen[chosen >= 0] = np.arange(population.store.num_clients)
        return population, self._padded(stage.shelve(population)), chosen

    def _padded(self, shelf: stage.Shelf) -> stage.Shelf:
        num_rows = self._room("examples", len(next(iter({**shelf.positions, **shelf.columns}.values()))))
        return stage.pad_shelf(
            shelf, num_rows, {space: self._room(f"keys {space}", len(k)) for space, k in shelf.keys.items()}
        )

    def _filled(self, name: str, array: np.ndarray) -> np.ndarray:
        return pad(array, self._room(name, len(array)))

    def _stacked(self, space: str, tables: list[np.ndarray], num_rounds: int) -> np.ndarray:
        """The rows of every round's table [rounds, room], padded with a row number that does not exist."""
        room = self._room(f"rows {space}", max(map(len, tables)))
        result = np.full((num_rounds, room), self._algorithm.partition.num_keys(space), np.int32)
        for row, rows in zip(result, tables, strict=False):
            row[: len(rows)] = rows
        return result

    def _room(self, name: str, size: int) -> int:
        return stage.grown(self._capacity, name, size)
