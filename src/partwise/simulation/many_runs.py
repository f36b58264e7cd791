"""Several runs in one compiled call: other learning rates, other seeds, the same program.

Rates are values, and runs are one more axis. So a grid costs little more than its arithmetic: the loops run
once for all runs. Each run equals the run that `Simulation` makes with its rates and seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partwise.algorithm import Build, init_server
from partwise.data.ragged import offsets, pad
from partwise.data.store import ClientStore
from partwise.metrics import to_host
from partwise.randomness import INIT_ROUND, round_rng
from partwise.server.cohort import Recruiting, recruit
from partwise.simulation import stage
from partwise.simulation.compiled import Outcome, compile_rounds
from partwise.simulation.mesh import everywhere, make_mesh
from partwise.types import UserError

LANES_OF_ALL_RUNS = 12


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
    ):
        if len(rates) != len(seeds) or not rates:
            raise UserError(
                f"a sweep needs one seed for every set of rates, not {len(rates)} and {len(seeds)}"
            )
        self.rates = [dict(each) for each in rates]
        self.seeds = list(seeds)
        self.algorithm = build(self.rates[0])
        if self.algorithm.optimizer.rows == "asked":
            raise UserError(
                "a sweep works on whole tables, and a lazy server optimizer on the rows that a cohort asks for: "
                "run its rates one by one, or use adam or yogi"
            )
        if self.algorithm.keeps:
            raise UserError(
                "a sweep has no room for what clients keep from round to round: run them one by one"
            )
        self.partition = self.algorithm.partition
        self.recruiting = recruiting.check(store.num_clients)
        self.mesh = make_mesh()
        self.round, self.rounds_per_call = 0, rounds_per_call
        self.lanes = lanes or max(1, min(LANES_OF_ALL_RUNS // len(rates), recruiting.size // self.mesh.size))
        self.finite = np.ones(len(rates), bool)
        self._population = stage.populate(store, self.partition, self.algorithm.choose)
        self._shelf = jax.device_put(stage.shelve(self._population), everywhere(self.mesh))
        self._rooms = stage.rooms_of(store, self.partition, self.algorithm.choose, self._population)
        self._rounds = compile_rounds(build, self.mesh, self._rooms, sweep=True)
        self._room = {"cohort": recruiting.room(store.num_clients)}
        states = [init_server(self.algorithm, round_rng(seed, INIT_ROUND)) for seed in self.seeds]
        self.state = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *states)

    def params(self, run: int) -> dict[str, jax.Array]:
        """The server's leaves of one run."""
        return {path: leaf[run] for path, leaf in self.state.params.items()}

    def run(self, num_rounds: int) -> Iterator[Outcome]:
        """Run this many rounds of every run. Yields outcomes with leading axes [runs, rounds].

        A run whose parameters are no longer finite continues, but its results are useless. It is marked in
        `finite`.
        """
        last = self.round + num_rounds
        self.state = jax.device_put(self.state, everywhere(self.mesh))
        rates = {name: np.array([each[name] for each in self.rates], np.float32) for name in self.rates[0]}
        rngs = jnp.stack([jax.random.key(seed) for seed in self.seeds])
        while self.round < last:
            count = min(self.rounds_per_call, last - self.round)
            shelf, plan = self._stage(count)
            self.state, outcome = self._rounds(
                rates, self.state, shelf, plan, rngs, np.uint32(self.round), np.int32(count)
            )
            outcome = jax.tree_util.tree_map(lambda x, n=count: x[:, :n], to_host(outcome))
            self.finite &= outcome.finite.all(axis=1)
            self.round += count
            yield outcome

    def _stage(self, count: int) -> tuple[stage.Shelf, stage.Plan]:
        """The cohorts of each seed. The loops of a chunk run as often as the largest client of any run needs."""
        asked: dict[int, stage.Requests] = {}
        draw = lambda seed, i: recruit(self.recruiting, self._population.store.counts, seed, self.round + i)
        drawn = {seed: [draw(seed, i).clients for i in range(count)] for seed in self.seeds}
        room = stage.grown(
            self._room, "cohort", max(len(clients) for each in drawn.values() for clients in each)
        )
        for seed, each in drawn.items():
            cohorts = stage.beside(each, self.rounds_per_call, room)
            plan = stage.plan(self._population, cohorts, self.mesh.size, self.lanes)
            asked[seed] = stage.ask(
                self._population, self.partition, self.algorithm.choose, plan, seed, self.round
            )
        keys, places = self._joined(asked)
        slots: Any = jax.tree_util.tree_map(
            lambda *a: np.stack(a), *(asked[seed].plan.slots for seed in self.seeds)
        )
        limits = [(each.plan.longest, each.plan.most_keys) for each in asked.values()]
        longest, most_keys = jax.tree_util.tree_map(lambda *a: np.max(a, axis=0), *limits)
        shelf = self._shelf._replace(keys=self._shelf.keys | keys, places=places)
        return shelf, stage.by_room(stage.Plan(slots, longest, most_keys, {}), self._rooms)

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
