"""Evaluation of many clients at once: the compiled twin of one client's `evaluate`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from partwise import tree
from partwise.algorithms.base import Algorithm, Build, whole_model
from partwise.data.store import ClientStore
from partwise.metrics import Sums, over_clients, over_examples, to_host
from partwise.model.spec import Model
from partwise.selection.choose import Choice
from partwise.selection.slices import receive
from partwise.simulation import stage
from partwise.simulation.loop import round_rng
from partwise.simulation.mesh import AXIS, compiler_options, everywhere, fills_a_core, make_mesh
from partwise.simulation.round import lane_client, over_lanes

EVALUATION_ROUND = 0xFFFFFFFF  # the "round" whose randomness evaluation uses
LANES = 32
CLIENTS_PER_CALL = 8192


class Evaluator:
    """Evaluates a store's clients; keeps the data and the compiled program for the next time.

    `others` are stores that will be evaluated too, through `of`: one program is made that fits them all.
    """

    def __init__(
        self,
        build: Build,
        rates: Mapping[str, float],
        store: ClientStore,
        *,
        seed: int = 0,
        others: Sequence[ClientStore] = (),
    ):
        self.build, self.rates, self.store, self.seed = build, dict(rates), store, seed
        self.algorithm: Algorithm = build(self.rates)
        self.mesh = make_mesh()
        stores = (store, *others)
        self._choose = whole_model(self.algorithm.partition)
        capacities = [stage.capacities_of(each, self.algorithm.partition, self._choose) for each in stores]
        self._capacities = {space: max(each[space] for each in capacities) for space in capacities[0]}
        self._size = max(min(CLIENTS_PER_CALL, each.num_clients) for each in stores)
        self._num_rows = max(_largest_block(each, self._size) for each in stores)
        self._program = _compile(build, self.mesh, self._capacities, self._choose)
        self._staged: tuple[Any, stage.Plan] | None = None

    def of(self, store: ClientStore) -> Evaluator:
        """The same evaluation of other clients, with the same program if they were among `others`."""
        other = copy.copy(self)
        other.store, other._staged = store, None
        other._num_rows = max(self._num_rows, _largest_block(store, self._size))
        return other

    def sums(self, params: Mapping[str, Any], rates: Mapping[str, float] | None = None) -> dict[str, Sums]:
        """Every metric of every client, as sums [clients], in the store's order.

        `params` may have leaves that are not needed; `rates` replace those that were given before.
        """
        values = {name: np.float32(rate) for name, rate in {**self.rates, **(rates or {})}.items()}
        needed = jax.device_put(self.algorithm.partition.server_leaves(params), everywhere(self.mesh))
        rng = round_rng(self.seed, EVALUATION_ROUND)
        empty = lambda: np.zeros(self.store.num_clients)
        parts = {name: Sums(empty(), empty()) for name in (*self.algorithm.model.metrics, "loss")}
        for first in range(0, self.store.num_clients, max(self._size, 1)):
            shelf, plan = self._stage(first)
            result = to_host(self._program(values, needed, shelf, plan, rng))
            order = plan.slots.client[0]
            for name, sums in result.items():
                for target, found in zip(parts[name], sums, strict=True):
                    target[first + order[order >= 0]] = found[order >= 0]
        return parts

    def __call__(self, params: Mapping[str, Any], rates: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Metrics pooled over examples, and mean and percentiles over clients."""
        return summarize(self.algorithm.model, self.sums(params, rates))

    def _model_bytes(self) -> int:
        """What a client works on, about: all but the tables of which it reads single rows."""
        partition = self.algorithm.partition
        looked_up = {
            path for s, paths in partition.spaces.items() if not partition.is_whole(s) for path in paths
        }
        shapes = (leaf for path, leaf in partition.shapes.items() if path not in looked_up)
        return 4 * sum(tree.num_bytes(leaf.shape, leaf.dtype) for leaf in shapes)

    def _stage(self, first: int) -> tuple[Any, stage.Plan]:
        """A block of clients, in arrays of the same shape for every block."""
        if self._staged and self.store.num_clients <= self._size:
            return self._staged
        size, num_rows = self._size, self._num_rows
        positions = np.arange(first, min(first + size, self.store.num_clients))
        partition = self.algorithm.partition
        population = stage.populate(self.store.gather(positions), partition, self._choose)
        cohort = np.full((1, size), -1)
        cohort[0, : len(positions)] = np.arange(len(positions))
        lanes = 1 if fills_a_core(self._model_bytes()) else min(LANES, -(-size // self.mesh.size))
        plan = stage.plan(population, cohort, self.mesh.size, lanes)
        plan = stage.ask(population, partition, self._choose, plan, self.seed, 0).plan
        values = stage.values_per_example(self.store, partition)
        room = {
            space: self._capacities[space]
            if self._choose[space].name == "all"
            else min(num_rows * values[space], size * self._capacities[space])
            for space in values
        }
        shelf = stage.pad_shelf(stage.shelve(population), num_rows, room)
        self._staged = (jax.device_put(shelf, everywhere(self.mesh)), plan)
        return self._staged


def _largest_block(store: ClientStore, size: int) -> int:
    """The most examples of any block of so many clients."""
    if not store.num_clients:
        return 1
    return max(int(np.add.reduceat(store.counts, np.arange(0, store.num_clients, size)).max()), 1)


def _compile(build: Build, mesh: Any, capacities: Mapping[str, int], choose: Mapping[str, Choice]) -> Any:
    def on_device(
        rates: Mapping, params: Mapping, shelf: stage.Shelf, plan: stage.Plan, rng: jax.Array
    ) -> Any:
        algorithm = build(rates)
        received = receive(algorithm.partition, params)
        plan = jax.tree_util.tree_map(lambda x: x[0, 0], plan)

        def chunk(carry: None, share: stage.Plan) -> tuple[None, Any]:
            lane = lambda slot: algorithm.evaluate(
                lane_client(algorithm, received, shelf, slot, share.longest, rng, capacities, choose)
            )
            return carry, over_lanes(lane, share.slots)

        _, sums = jax.lax.scan(chunk, None, plan)
        return jax.tree_util.tree_map(lambda x: x[None], sums)

    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=(P(), P(), P(), P(None, AXIS), P()), out_specs=P(AXIS), check_vma=False
    )
    return jax.jit(mapped, compiler_options=compiler_options())


def summarize(model: Model, sums: Mapping[str, Sums]) -> dict[str, Any]:
    """What is told of an evaluation."""
    finish = {name: metric.finish for name, metric in model.metrics.items()}
    sums = {name: sums[name] for name in (*model.metrics, "loss")}
    held = next(iter(sums.values())).weight > 0
    return {
        **over_examples(sums, finish),
        "clients": int(held.sum()),
        "clients_without_examples": int((~held).sum()),
        "over_clients": over_clients(sums, finish),
    }
