"""Where the tables of a simulation are: a copy on every device, their rows spread over the devices, or on the host.

A round reads and writes the rows that its clients ask for (`server.step.take_rows`), so only these must be where it
is computed. All three places give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partwise.algorithm import Algorithm, init_params, init_server
from partwise.data.ragged import pad, pad_to_power
from partwise.randomness import AXIS
from partwise.server.round import sees_all_rows
from partwise.server.step import ServerState, map_tables, trainable
from partwise.simulation.exchange import put_everywhere
from partwise.simulation.host_rows import read_rows, write_rows
from partwise.simulation.processes import num_processes
from partwise.simulation.rows_drawn import leaf_of, rows_of
from partwise.simulation.spread import CHUNK_BYTES, WHOLE, Rowwise, SpreadTable, put_spread, take_spread
from partwise.simulation.stage import Plan, grown
from partwise.tree import num_bytes
from partwise.types import UserError, unknown

COPIES, SHARDS, HOST, AUTO = "copies", "shards", "host", "auto"
PLACES = (AUTO, COPIES, SHARDS, HOST)
LARGE_BYTES = 1 << 26  # a table that is not made whole where some rows will do
SMALL_BYTES = 1 << 30  # tables with their optimizer state, of which every device may have a copy


class Tables(NamedTuple):
    """Where the tables of a run are, as functions of its state.

    init:    randomness -> the state before the first round
    place:   a state with any kind of arrays -> the state as calls expect it
    show:    the state -> what others may see of it: tables of the right size, which `numpy.asarray` reads
    call:    (program, rates, state, shelf, plan, ...) -> (new state, outcome)
    trial:   the same, but the state that is returned is the old one
    rowwise: how a compiled round reads and writes rows
    rooms:   how many rows a call's tables may have, by space, where they are not those of a round
    """

    init: Callable[[jax.Array], ServerState]
    place: Callable[[ServerState], ServerState]
    show: Callable[[ServerState], ServerState]
    call: Callable[..., tuple[ServerState, Any]]
    trial: Callable[..., tuple[ServerState, Any]]
    rowwise: Rowwise = WHOLE
    rooms: dict[str, int] | None = None


def make_tables(place: str, algorithm: Algorithm, mesh: Mesh) -> Tables:
    """The tables of an algorithm at this place (not `auto`)."""
    spaces = _cut_spaces(algorithm)
    if place == COPIES:
        return _copies(algorithm, mesh)
    return _shards(algorithm, mesh, spaces) if place == SHARDS else _host(algorithm, mesh, spaces)


def choose_place(wanted: str, algorithm: Algorithm, mesh: Mesh, memory: int) -> str:
    """Where tables should be; for `auto`, by their size and by the `memory` of a device, in bytes."""
    if wanted not in PLACES:
        raise unknown("place of tables (simulation.tables)", wanted, PLACES)
    why_not = _why_whole(algorithm)
    if wanted != AUTO:
        if wanted != COPIES and why_not:
            raise UserError(f"simulation.tables = {wanted} is not possible, because {why_not}")
        if wanted == HOST and num_processes() > 1:
            raise UserError(
                "simulation.tables = host keeps whole tables on the host of one process, and here are "
                f"{num_processes()}: use shards, or leave --processes out"
            )
        return wanted
    size = 0 if why_not else _table_bytes(algorithm)
    if size <= SMALL_BYTES or (mesh.size == 1 and size <= memory // 2):
        return COPIES
    if mesh.size > 1 and (size // mesh.size <= memory // 2 or num_processes() > 1):
        return SHARDS
    return HOST


def _why_whole(algorithm: Algorithm) -> str:
    """Why every device must have whole tables; empty if it need not."""
    if not _cut_spaces(algorithm):
        return "there is no table of which clients are sent single rows"
    if sees_all_rows(algorithm):
        return (
            "every round changes all rows of the tables: only sgd without momentum, adagrad, lazy_adam and "
            "lazy_yogi (server.optimizer) leave rows alone that no client asks for; noise for privacy changes all"
        )
    return ""


def _cut_spaces(algorithm: Algorithm) -> tuple[str, ...]:
    """Key spaces of which a round needs some rows."""
    return tuple(s for s in algorithm.partition.spaces if algorithm.choose[s].name != "all")


def _labels(algorithm: Algorithm, spaces: tuple[str, ...]) -> ServerState:
    """For every leaf of the state its key space, if it is (for) a table of one of these; otherwise ''."""
    shapes = jax.eval_shape(partial(init_server, algorithm), jax.random.key(0))
    named = map_tables(algorithm.partition, algorithm.optimizer, lambda leaf, space: _Named(space), shapes)
    label = lambda leaf: leaf.space if isinstance(leaf, _Named) and leaf.space in spaces else ""
    return jax.tree_util.tree_map(label, named, is_leaf=lambda leaf: isinstance(leaf, _Named))


class _Named(NamedTuple):
    space: str


def _table_bytes(algorithm: Algorithm) -> int:
    """The bytes of all tables, with what the optimizer has of them."""
    shapes = jax.eval_shape(partial(init_server, algorithm), jax.random.key(0))
    labels = _labels(algorithm, _cut_spaces(algorithm))
    size = lambda leaf, label: num_bytes(leaf.shape, leaf.dtype) if label else 0
    return sum(jax.tree_util.tree_leaves(jax.tree_util.tree_map(size, shapes, labels)))


# A copy on every device


def _copies(algorithm: Algorithm, mesh: Mesh) -> Tables:
    return Tables(
        init=partial(init_server, algorithm),
        place=lambda state: put_everywhere(state, mesh),
        show=lambda state: state,
        call=_run,
        trial=_trying(algorithm, mesh, WHOLE),
    )


def _trying(algorithm: Algorithm, mesh: Mesh, rowwise: Rowwise) -> Callable[..., tuple[ServerState, Any]]:
    """`Tables.trial` for tables on the devices. The program uses its state up. So the rows that it changes are
    copied before and put back after it, or all of the state if it is not told which they are."""
    given = (algorithm.partition, algorithm.optimizer)
    on_mesh = lambda function, of, out: jax.shard_map(
        partial(function, *given), mesh=mesh, in_specs=of, out_specs=out, check_vma=False
    )
    take = jax.jit(on_mesh(rowwise.take, (rowwise.spec, P()), P()))
    put = jax.jit(on_mesh(rowwise.put, (rowwise.spec, P(), P()), rowwise.spec), donate_argnums=0)

    def trial(program: Any, rates: Any, state: ServerState, shelf: Any, plan: Plan, *rest: Any) -> Any:
        if not plan.tables:
            return state, program(rates, _copied(state), shelf, plan, *rest)[1]
        touched = {space: pad_to_power(np.unique(rows)) for space, rows in plan.tables.items()}
        rows = put_everywhere(touched, mesh)
        before = _copied(take(state, rows))  # the program uses up what it shares with the state
        state, outcome = program(rates, state, shelf, plan, *rest)
        return put(state, rows, before), outcome

    return trial


def _copied(state: ServerState) -> ServerState:
    return jax.tree_util.tree_map(jnp.copy, state)


def _run(program: Any, *call: Any) -> tuple[ServerState, Any]:
    return program(*call)


# Rows spread over the devices


def _shards(algorithm: Algorithm, mesh: Mesh, spaces: tuple[str, ...]) -> Tables:
    partition, optimizer = algorithm.partition, algorithm.optimizer
    labels = _labels(algorithm, spaces)
    spec = jax.tree_util.tree_map(lambda label: P(AXIS) if label else P(), labels)
    is_spec = lambda leaf: isinstance(leaf, P)
    sharding = NamedSharding(mesh, P(AXIS))

    def place_leaf(label: str, leaf: Any) -> jax.Array:
        if not label:
            return put_everywhere(leaf, mesh)
        if isinstance(leaf, SpreadTable):
            return leaf.array
        if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
            return leaf
        return _spread_out(np.asarray(leaf), sharding)

    place = lambda state: jax.tree_util.tree_map(place_leaf, labels, state)

    def show(state: ServerState) -> ServerState:
        table = lambda label, leaf: SpreadTable(leaf, partition.num_keys(label), mesh) if label else leaf
        return jax.tree_util.tree_map(table, labels, state)

    def init(rng: jax.Array) -> ServerState:
        draw = lambda path: _draw_shards(algorithm, rng, path, sharding)
        params = {p: draw(p) if labels.params[p] else _draw(algorithm, rng, p) for p in labels.params}
        moving = {path: params[path] for path in trainable(partition, params)}
        begin = jax.jit(
            optimizer.transform.init,
            out_shardings=jax.tree_util.tree_map(
                partial(NamedSharding, mesh), spec.optimizer, is_leaf=is_spec
            ),
        )
        return place(ServerState(params, begin(moving), algorithm.aggregator.init(partition)))

    rowwise = Rowwise(take_spread, put_spread, spec)
    return Tables(init, place, show, _run, _trying(algorithm, mesh, rowwise), rowwise)


def _spread_out(table: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A table of the host, with padding, on the devices of this process."""
    shape = _padded(table.shape, sharding)

    def part(index: Any) -> np.ndarray:
        begin, end, _ = index[0].indices(shape[0])
        return pad(table[begin : min(end, len(table))], end - begin)

    return jax.make_array_from_callback(shape, sharding, part)


def _padded(shape: tuple[int, ...], sharding: NamedSharding) -> tuple[int, ...]:
    return (-(-shape[0] // sharding.mesh.size) * sharding.mesh.size, *shape[1:])


def _draw(algorithm: Algorithm, rng: jax.Array, path: str) -> jax.Array:
    """A leaf of the server before the first round; no other leaf is made."""
    leaf = leaf_of(lambda rng: init_params(algorithm, rng)[path], rng)
    return jax.lax.convert_element_type(leaf, leaf.dtype)


def _drawing(
    algorithm: Algorithm, rng: jax.Array, path: str, most_bytes: int = CHUNK_BYTES
) -> tuple[int, Callable[..., jax.Array] | None]:
    """How many rows of a table are drawn at a time, and the function that does so, if there is one."""
    leaf = algorithm.partition.server_shapes[path]
    size = max(1, min(most_bytes // max(num_bytes(leaf.shape[1:], leaf.dtype), 1), leaf.shape[0]))
    return size, rows_of(lambda rng: init_params(algorithm, rng)[path], rng, size)


def sketched(algorithm: Algorithm, rng: jax.Array) -> Mapping[str, Any]:
    """The server's leaves before the first round. All rows of a large table are its first one, so that it takes no
    memory."""
    shapes, keyed = algorithm.partition.server_shapes, algorithm.partition.of("keyed")
    large = [path for path in keyed if num_bytes(shapes[path].shape, shapes[path].dtype) > LARGE_BYTES]
    rows = {path: _drawing(algorithm, rng, path, most_bytes=1)[1] for path in large}
    if not large or not all(rows.values()):
        return init_params(algorithm, rng)
    first = lambda path, draw: np.broadcast_to(np.asarray(draw(rng, 0)), shapes[path].shape)
    return {p: first(p, draw) if (draw := rows.get(p)) else _draw(algorithm, rng, p) for p in shapes}


def _draw_shards(algorithm: Algorithm, rng: jax.Array, path: str, sharding: NamedSharding) -> jax.Array:
    """A table before the first round, each device's rows drawn on it, some at a time."""
    leaf = algorithm.partition.server_shapes[path]
    size, rows = _drawing(algorithm, rng, path)
    if rows is None:
        return _spread_out(np.asarray(_draw(algorithm, rng, path)), sharding)
    shape, parts = _padded(leaf.shape, sharding), []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        begin, end, _ = index[0].indices(shape[0]) if index else (0, shape[0], 1)
        with jax.default_device(device):
            part, here = jnp.zeros((end - begin, *leaf.shape[1:]), leaf.dtype), jax.device_put(rng, device)
            for first in range(begin, min(end, leaf.shape[0]), size):
                first = min(first, leaf.shape[0] - size)
                part = _written(part, first - begin, rows(here, first))
        parts.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


@partial(jax.jit, donate_argnums=0)
def _written(table: jax.Array, first: Any, rows: jax.Array) -> jax.Array:
    at = first + jnp.arange(len(rows))
    return table.at[jnp.where(at < 0, len(table), at)].set(rows, mode="drop")


# On the host


def _host(algorithm: Algorithm, mesh: Mesh, spaces: tuple[str, ...]) -> Tables:
    partition, optimizer = algorithm.partition, algorithm.optimizer
    labels, rooms = _labels(algorithm, spaces), dict[str, int]()

    def place(state: ServerState) -> ServerState:
        put = lambda label, leaf: _writable(leaf) if label else put_everywhere(leaf, mesh)
        return jax.tree_util.tree_map(put, labels, state)

    def init(rng: jax.Array) -> ServerState:
        draw = lambda path: _draw_host(algorithm, rng, path)
        params: dict[str, Any] = {
            p: draw(p) if labels.params[p] else _draw(algorithm, rng, p) for p in labels.params
        }
        few = {p: params[p][:1] if labels.params[p] else params[p] for p in trainable(partition, params)}
        carried = algorithm.aggregator.init(partition)
        state = ServerState(params, optimizer.transform.init(few), carried)
        grow = lambda label, leaf: _repeated(leaf, partition.num_keys(label)) if label else leaf
        return place(
            state._replace(optimizer=jax.tree_util.tree_map(grow, labels.optimizer, state.optimizer))
        )

    def brought(state: ServerState, plan: Plan) -> tuple[ServerState, Plan, dict[str, np.ndarray]]:
        """The state and the plan of a call with tables that have the rows of all its rounds."""
        rows, tables = {}, {}
        for space, asked in plan.tables.items():
            num_keys = partition.num_keys(space)
            rows[space] = np.unique(asked[asked < num_keys])
            room = grown(rooms, space, len(rows[space]))
            at = np.searchsorted(rows[space], asked)
            tables[space] = np.where(asked < num_keys, at, room).astype(np.int32)
        take = lambda label, leaf: read_rows(leaf, rows[label], rooms[label]) if label else jnp.copy(leaf)
        part = jax.tree_util.tree_map(take, labels, state)
        return put_everywhere(part, mesh), plan._replace(tables=tables), rows

    def call(program: Any, rates: Any, state: ServerState, shelf: Any, plan: Plan, *rest: Any) -> Any:
        part, plan, rows = brought(state, plan)
        part, outcome = program(rates, part, shelf, plan, *rest)

        def put(label: str, leaf: Any, new: jax.Array) -> Any:
            if label:
                write_rows(leaf, rows[label], np.asarray(new))
            return leaf if label else new

        return jax.tree_util.tree_map(put, labels, state, part), outcome

    def trial(program: Any, rates: Any, state: ServerState, shelf: Any, plan: Plan, *rest: Any) -> Any:
        part, plan, _ = brought(state, plan)
        return state, program(rates, part, shelf, plan, *rest)[1]

    return Tables(init, place, lambda state: state, call, trial, rooms=rooms)


def _writable(table: Any) -> np.ndarray:
    """A table on the host that can be written, not copied if possible."""
    array = np.asarray(table)
    return array if array.flags.writeable else array.copy()


def _repeated(row: Any, num_rows: int) -> np.ndarray:
    """A table of equal rows. Zeros take no memory until they are written."""
    row = np.asarray(row)
    table = np.zeros((num_rows, *row.shape[1:]), row.dtype)
    if row.any():
        table[:] = row
    return table


def _draw_host(algorithm: Algorithm, rng: jax.Array, path: str) -> np.ndarray:
    """A table before the first round, drawn on a device some rows at a time."""
    leaf = algorithm.partition.server_shapes[path]
    size, rows = _drawing(algorithm, rng, path)
    if rows is None:
        return np.array(_draw(algorithm, rng, path))
    table = np.empty(leaf.shape, leaf.dtype)
    for first in range(0, len(table), size):
        first = min(first, len(table) - size)
        table[first : first + size] = rows(rng, first)
    return table
