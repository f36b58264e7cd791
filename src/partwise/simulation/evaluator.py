"""Evaluation of many clients at once: the compiled counterpart of one client's `evaluate`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from partwise import tree
from partwise.algorithm import Algorithm, Build, kept_shape, whole_model
from partwise.client.evaluate import BATCH, no_pairs
from partwise.data.ragged import pad
from partwise.data.store import ClientStore
from partwise.metrics import Measured, Pairs, Sums, over_clients, over_examples, over_pairs
from partwise.model.spec import Metric, Model, Pooled
from partwise.programs import jit_program
from partwise.randomness import EVALUATION_ROUND, round_rng
from partwise.selection.choose import Choice
from partwise.selection.slices import receive
from partwise.simulation import stage
from partwise.simulation.ahead import ahead
from partwise.simulation.apart import rows_of_all
from partwise.simulation.compiled import Shared, lane_client, over_lanes
from partwise.simulation.exchange import own_devices, put_along, put_everywhere, put_own, to_host
from partwise.simulation.mesh import AXIS, fills_a_core, make_mesh
from partwise.simulation.processes import num_processes
from partwise.simulation.spread import SpreadTable
from partwise.types import UserError

LANES = 32
CLIENTS_PER_CALL = 8192
KEPT_BYTES = 1 << 28  # limit for what all clients of a call keep, together
FAR_BYTES = 1 << 28  # of a larger table on the host, a call brings the rows of its clients
ROWS_BYTES = 1 << 25  # about so many bytes of them

# Client ids -> what these clients keep: `Simulation.kept_of`.
KeptOf = Callable[[np.ndarray], Mapping[str, np.ndarray]]


class Evaluator:
    """Evaluates the clients of a store. It keeps the data and the compiled program for the next evaluation.

    `others` are stores that will be evaluated later, through `of`. The program is made large enough for all
    of them.
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
        self._size = max(min(self._clients_per_call(stores), each.num_clients) for each in stores)
        self._order = _by_rows(store, self._size)
        self._num_rows = max(_largest_block(each, self._size) for each in stores)
        self._most = max(int(each.counts.max(initial=1)) for each in stores)
        self._program = _compile(build, self.mesh, self._capacities, self._choose, self._most)
        self._staged: dict[Any, _Block] = {}  # the only block, if there is one
        self._rooms: dict[str, int] = {}  # for rows of tables that are cut

    def with_rates(self, rates: Mapping[str, float], seed: int) -> Evaluator:
        """An evaluator of the same clients for a run with other rates and another seed. It shares the program and
        the data."""
        other = copy.copy(self)
        other.rates, other.seed = {**self.rates, **rates}, seed
        return other

    def of(self, store: ClientStore) -> Evaluator:
        """An evaluator for other clients. It uses the same program if they fit into it, as the `others` do."""
        if not self._fits(store):
            return type(self)(self.build, self.rates, store, seed=self.seed)
        other = copy.copy(self)
        other.store, other._staged, other._order = store, {}, _by_rows(store, self._size)
        other._num_rows = max(self._num_rows, _largest_block(store, self._size))
        return other

    def _fits(self, store: ClientStore) -> bool:
        """Whether the program has room for the largest of these clients and for its keys."""
        needed = stage.capacities_of(store, self.algorithm.partition, self._choose)
        room = all(needed[space] <= self._capacities[space] for space in needed)
        return room and store.counts.max(initial=1) <= self._most

    def sums(
        self,
        params: Mapping[str, Any],
        rates: Mapping[str, float] | None = None,
        kept: KeptOf | None = None,
    ) -> dict[str, Sums]:
        """The sums [clients] of every metric that is a mean, in the store's order."""
        return self.measure(params, rates, kept)[0]

    def measure(
        self,
        params: Mapping[str, Any],
        rates: Mapping[str, float] | None = None,
        kept: KeptOf | None = None,
    ) -> tuple[dict[str, Sums], dict[str, Pairs]]:
        """Sums [clients] in the store's order, and the pairs [examples] of pooled metrics in no particular
        order.

        Args:
            params: The server's leaves. Leaves that are not needed are ignored.
            rates: Replace the rates that were given before.
            kept: Called with client ids if the algorithm evaluates clients with what they keep.
        """
        values = {name: np.float32(rate) for name, rate in {**self.rates, **(rates or {})}.items()}
        needed = self.algorithm.partition.server_leaves(params)
        far = {path: needed.pop(path) for path in self._far(needed)}
        near = put_everywhere(jax.tree_util.tree_map(_whole, needed), self.mesh)
        rng = round_rng(self.seed, EVALUATION_ROUND)
        empty = lambda: np.zeros(self.store.num_clients)
        pooled = _pooled(self.algorithm.model)
        summed = [name for name in (*self.algorithm.model.metrics, "loss") if name not in pooled]
        sums = {name: Sums(empty(), empty()) for name in summed}
        pairs = {
            name: [jax.tree_util.tree_map(np.asarray, no_pairs(metric, 0))] for name, metric in pooled.items()
        }
        firsts = range(0, self.store.num_clients, max(self._size, 1))
        depth = int(self.store.remote and num_processes() == 1)  # arrays of several processes are put in turn
        stage_block = partial(self._stage, cut=bool(far))
        with closing(ahead(stage_block, firsts, depth=depth)) as staged:
            for first, block in zip(firsts, staged, strict=True):
                plan = put_along(self._with_kept(block, first, kept), self.mesh, 1)
                leaves = near | self._brought(far, block)
                result = to_host(self._program(values, leaves, block.shelf, plan, rng))
                order = block.clients[0]
                for name, total in sums.items():
                    for target, found in zip(total, result[name], strict=True):
                        target[self._order[first + order[order >= 0]]] = found[order >= 0]
                for name, blocks in pairs.items():
                    blocks.append(Pairs(*(part[result[name].held] for part in result[name])))
        return sums, {
            name: Pairs(*map(np.concatenate, zip(*blocks, strict=True))) for name, blocks in pairs.items()
        }

    def __call__(
        self,
        params: Mapping[str, Any],
        rates: Mapping[str, float] | None = None,
        kept: KeptOf | None = None,
    ) -> dict[str, Any]:
        """Metrics pooled over examples, and their mean and percentiles over clients."""
        return summarize(self.algorithm.model, *self.measure(params, rates, kept))

    def _clients_per_call(self, stores: Sequence[ClientStore]) -> int:
        """The number of clients in a call; smaller if what they keep, or their rows of a large table, would not
        fit."""
        shapes = [kept_shape(self.algorithm, path) for path in self.algorithm.judged_with]
        each = sum(tree.num_bytes(leaf.shape, leaf.dtype) for leaf in shapes)
        rows = max(self._row_bytes(store) for store in stores)
        return min(CLIENTS_PER_CALL, max(min(KEPT_BYTES // max(each, 1), ROWS_BYTES // max(rows, 1)), 1))

    def _row_bytes(self, store: ClientStore) -> int:
        """The bytes of a client's rows of large tables, about."""
        partition, values = (
            self.algorithm.partition,
            stage.values_per_example(store, self.algorithm.partition),
        )
        examples = store.num_examples / max(store.num_clients, 1)
        size = lambda path: tree.num_bytes(partition.shapes[path].shape, partition.shapes[path].dtype)
        large = [path for path in self._cut_paths() if size(path) > FAR_BYTES]
        each = lambda path: partition.row_bytes(path) * values[partition.roles[path].space] * examples
        return int(sum(map(each, large)))

    def _far(self, leaves: Mapping[str, Any]) -> list[str]:
        """Tables of which every call brings some rows: all of which some will do, if one of them is spread over the
        devices, or large and on the host."""
        cut = self._cut_paths()
        large = lambda leaf: isinstance(leaf, np.ndarray) and leaf.nbytes > FAR_BYTES
        return cut if any(isinstance(leaves[p], SpreadTable) or large(leaves[p]) for p in cut) else []

    def _cut_paths(self) -> list[str]:
        """Tables of which the clients of a block need some rows."""
        partition = self.algorithm.partition
        return [p for p in partition.of("keyed") if self._choose[partition.roles[p].space].name != "all"]

    def _brought(self, far: Mapping[str, Any], block: _Block) -> dict[str, Any]:
        """The rows that a block needs of tables that are elsewhere, on every device."""
        roles, tables = self.algorithm.partition.roles, {}
        for path, leaf in far.items():
            rows = block.rows[roles[path].space]
            tables[path] = (
                leaf.rows(rows) if isinstance(leaf, SpreadTable) else leaf.take(rows, 0, mode="clip")
            )
        return put_everywhere(tables, self.mesh)

    def _with_kept(self, block: _Block, first: int, kept: KeptOf | None) -> stage.Plan:
        """The plan of a block with what its clients keep, if they are evaluated with it."""
        if not self.algorithm.judged_with:
            return block.plan
        if kept is None:
            raise UserError(
                "these clients are judged with what they keep from round to round: say what that is, as in "
                "evaluate(simulation.state.params, kept=simulation.kept_of)"
            )
        found = kept(self.store.client_ids[self._order[first : first + self._size]])
        own = own_devices(self.mesh)
        nobody = lambda array: np.zeros((1, *array.shape[1:]), array.dtype)  # for client -1
        taken = {
            path: np.concatenate([found[path], nobody(found[path])])[block.clients[:, own]]
            for path in self.algorithm.judged_with
        }
        return block.plan._replace(slots=block.plan.slots._replace(kept=taken))

    def _model_bytes(self) -> int:
        """An estimate of the memory that a client works on: all leaves except tables of which it reads single
        rows."""
        partition = self.algorithm.partition
        looked_up = {
            path for s, paths in partition.spaces.items() if not partition.is_whole(s) for path in paths
        }
        shapes = (leaf for path, leaf in partition.shapes.items() if path not in looked_up)
        return 4 * sum(tree.num_bytes(leaf.shape, leaf.dtype) for leaf in shapes)

    def _stage(self, first: int, cut: bool = False) -> _Block:
        """A block of clients, in arrays of the same shape for every block. A process reads those of its devices.
        With `cut`, keys are row numbers in tables that have the block's rows alone."""
        if (first, cut) in self._staged and self.store.num_clients <= self._size:
            return self._staged[first, cut]
        size, num_rows = self._size, self._num_rows
        positions = self._order[first : first + size]
        counts = self.store.counts[positions]
        partition = self.algorithm.partition
        lanes = 1 if fills_a_core(self._model_bytes()) else min(LANES, -(-size // self.mesh.size))
        if _pooled(self.algorithm.model):  # every lane needs room for the largest client's pairs
            lanes = min(lanes, max(2 * num_rows // self._most, 1))
        clients = stage.lay_out(
            counts, stage.beside([np.arange(len(counts))], 1, size), self.mesh.size, lanes
        )
        own = clients[:, own_devices(self.mesh)]
        places = np.sort(own[own >= 0])
        population = stage.populate(self.store.gather(positions[places]), partition, self._choose)
        plan = stage.plan(population, np.where(own >= 0, np.searchsorted(places, own), -1))
        asked, rows = stage.ask(population, partition, self._choose, plan, self.seed, 0), {}
        if cut:
            asked, mine = stage.cut(population, self._choose, asked)
            every = rows_of_all(mine)
            asked = stage.in_tables(asked, mine, every)
            rows = {space: self._padded(space, each[0]) for space, each in every.items()}
        values = stage.values_per_example(self.store, partition)
        room = {
            space: self._capacities[space]
            if self._choose[space].name == "all"
            else min(num_rows * values[space], size * self._capacities[space])
            for space in values
        }
        shelf = stage.shelve(population)
        shelf = stage.pad_shelf(shelf._replace(keys={**shelf.keys, **asked.keys}), num_rows, room)
        put = put_own if num_processes() > 1 else put_everywhere
        self._staged.clear()
        self._staged[first, cut] = _Block(put(shelf, self.mesh), asked.plan, clients, rows)
        return self._staged[first, cut]

    def _padded(self, space: str, rows: np.ndarray) -> np.ndarray:
        """Rows of a table with room for those of similar blocks."""
        return pad(rows, stage.grown(self._rooms, space, len(rows)))


class _Block(NamedTuple):
    """Some clients of a store, in arrays."""

    shelf: Any
    plan: stage.Plan  # of this process's devices
    clients: np.ndarray  # [1, devices, chunks, lanes]: of all devices, as positions in the block
    rows: Mapping[str, np.ndarray]  # space -> the rows of cut tables, padded


def _whole(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, SpreadTable) else leaf


def _largest_block(store: ClientStore, size: int) -> int:
    """The largest number of examples in any block of `size` clients."""
    if not store.num_clients:
        return 1
    counts = store.counts[_by_rows(store, size)]
    return max(int(np.add.reduceat(counts, np.arange(0, store.num_clients, size)).max()), 1)


def _by_rows(store: ClientStore, size: int) -> np.ndarray:
    """The order in which clients are evaluated. If they are several blocks, it is that of their rows, so that the
    rows of a block are close together and can be read together."""
    every = np.arange(store.num_clients)
    return every if store.num_clients <= size else np.argsort(store.starts, kind="stable")


def _pooled(model: Model) -> dict[str, Pooled]:
    return {name: metric for name, metric in model.metrics.items() if isinstance(metric, Pooled)}


def _compile(
    build: Build, mesh: Any, capacities: Mapping[str, int], choose: Mapping[str, Choice], most: int
) -> Any:
    """Compile the evaluation of a block. `most` is the size of the largest client. Pairs of pooled metrics
    are stored at the positions of their client's rows. If there are several processes, each device has a shelf of
    its own, and the shelf a leading axis of devices."""
    apart = num_processes() > 1

    def on_device(
        rates: Mapping, params: Mapping, shelf: stage.Shelf, plan: stage.Plan, rng: jax.Array
    ) -> Any:
        algorithm = build(rates)
        received = receive(algorithm.partition, params)
        plan = jax.tree_util.tree_map(lambda x: x[0, 0], plan)
        shelf = jax.tree_util.tree_map(lambda x: x[0], shelf) if apart else shelf

        num_rows = next(iter({**shelf.columns, **shelf.positions}.values())).shape[0]
        nothing = {name: no_pairs(metric, num_rows) for name, metric in _pooled(algorithm.model).items()}

        shared = Shared(received, shelf, rng, capacities, choose)

        def lane(slot: stage.Slots, longest: jax.Array) -> Measured:
            client = lane_client(algorithm, shared, slot, longest)
            return algorithm.evaluate(client._replace(examples=client.examples._replace(most=most)))

        def chunk(pairs: dict[str, Pairs], share: stage.Plan) -> tuple[dict[str, Pairs], Any]:
            measured = over_lanes(lane, share.slots, share.longest)
            fresh = {name: measured.pop(name) for name in pairs}
            return {name: _lay_down(pairs[name], fresh[name], share) for name in pairs}, measured

        pairs, sums = jax.lax.scan(chunk, nothing, plan)
        return jax.tree_util.tree_map(lambda x: x[None], {**sums, **pairs})

    specs = (P(), P(), P(AXIS) if apart else P(), P(None, AXIS), P())
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(AXIS), check_vma=False)
    return jit_program(mapped)


def _lay_down(pairs: Pairs, fresh: Pairs, share: stage.Plan) -> Pairs:
    """Write every lane's pairs [lanes, room] to the positions of its client's rows, up to the size of the
    largest client."""

    def block(i: jax.Array, pairs: Pairs) -> Pairs:
        part = Pairs(*(jax.lax.dynamic_slice_in_dim(x, i * BATCH, BATCH, axis=1) for x in fresh))
        rows = share.slots.start[:, None] + i * BATCH + jnp.arange(BATCH)
        rows = jnp.where(part.held, rows, pairs.held.shape[0]).ravel()
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        return Pairs(*(x.at[rows].set(flat(p), mode="drop") for x, p in zip(pairs, part, strict=True)))

    return jax.lax.fori_loop(0, -(-share.longest // BATCH), block, pairs)


def summarize(model: Model, sums: Mapping[str, Sums], pairs: Mapping[str, Pairs]) -> dict[str, Any]:
    """The results of an evaluation. A metric without a value is None, and `undefined` gives the reason."""
    names = (*model.metrics, "loss")
    pooled = _pooled(model)
    finish = {name: metric.finish for name, metric in model.metrics.items() if isinstance(metric, Metric)}
    values, undefined = over_pairs(pairs, {name: metric.finish for name, metric in pooled.items()})
    values |= over_examples(sums, finish)
    held = np.any([total.weight > 0 for total in sums.values()], axis=0)  # by whichever metric
    spread = over_clients(sums, finish) | {name: {"clients": int(held.sum())} for name in pooled}
    return {
        **{name: values[name] for name in names},
        "clients": int(held.sum()),
        "clients_without_examples": int((~held).sum()),
        "over_clients": {name: spread[name] for name in names},
        **({"undefined": undefined} if undefined else {}),
    }
