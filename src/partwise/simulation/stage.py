"""From a client store to arrays for the devices: which client runs when, in which lane, on which rows.

There are two modes with the same arrays. *Resident*: the columns of the whole population stay on the devices,
and a call brings only indices. *Staged*: a call brings the rows of its own clients, so that the population
need not fit. In both modes, a call may also bring the rows of the tables that each of its rounds needs. Keys
are then row numbers in these cut tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from partwise.data.checks import narrow
from partwise.data.ragged import offsets, owners, pad, row_indices
from partwise.data.store import ClientStore
from partwise.model.partition import Partition
from partwise.randomness import Words, client_numbers, words
from partwise.selection.choose import Asking, Choice, Chosen, placed, streams
from partwise.selection.keys import OwnKeys, own_keys
from partwise.selection.serving import Demand, Served, Sizes, num_distinct, serve

Choices = Mapping[str, Choice]
KEY_BLOCK = 64  # how many rows of clients' updates are added to a table at a time
MARKED = 100  # keys of a space for each key that is asked for, up to which these are marked and not sorted
SMALL_SLICE = 1 << 18  # bytes; smaller slices do not need a program for each size


class Shelf(NamedTuple):
    """Examples and keys of many clients, packed. It is the same for all lanes."""

    columns: dict[str, Any]  # except columns that hold keys
    positions: dict[str, Any]  # key columns: the id's position among its client's keys, -1 for nothing
    keys: dict[str, Any]  # space -> table rows of all clients' keys
    places: dict[str, Any]  # space whose choice changes every round -> own key to asked key, of all clients


class Slots(NamedTuple):
    """One entry per lane: which client of the shelf runs there. Padding is client -1, with no examples."""

    client: Any
    number: Words  # for its randomness
    start: Any
    count: Any
    key_start: Mapping[str, Any]
    key_count: Mapping[str, Any]
    place_start: Mapping[str, Any]
    kept: Mapping[str, Any] = {}  # what the client kept from its last round, by path
    version: Any = None  # of the model that it begins with; None: the current one


class Plan(NamedTuple):
    """Slots [rounds, devices, chunks, lanes]. `longest` and `most_keys` [rounds, devices, chunks] are the
    largest numbers of examples and of keys of any lane in a chunk. They set how often loops run."""

    slots: Slots
    longest: Any
    most_keys: Mapping[str, Any]
    tables: Mapping[str, Any]  # space -> rows of each round's cut table [rounds, rows]; empty: whole tables
    ends: Any = ()  # [rounds, devices, rooms]: the chunk after the last one of every room (see `by_room`)


class Population(NamedTuple):
    """Some clients with their keys, on the host."""

    store: ClientStore  # packed
    numbers: np.ndarray
    own: Mapping[str, OwnKeys]
    chosen: Mapping[str, Chosen]  # spaces whose choice is the same in every round
    missed: Mapping[str, np.ndarray]  # for these: ids of a client's examples outside its slice [clients]
    positions: Mapping[str, np.ndarray]  # for these: among the chosen keys; otherwise among the own keys


class Requests(NamedTuple):
    """What the clients of a plan ask for, in the spaces whose keys are not on the shelf already."""

    plan: Plan
    keys: Mapping[str, np.ndarray]
    places: Mapping[str, np.ndarray]
    missed: np.ndarray  # [rounds]: how many ids of the clients' examples are outside their slices


def key_capacity(most: int, partition: Partition, space: str) -> int:
    """Room for this many keys. It is rounded up to whole blocks, unless one block is enough or steps work on
    the values of the slice and pass over all of it."""
    most = max(int(most), 1)
    whole = most <= KEY_BLOCK or partition.is_whole(space) or partition.is_summed(space)
    return most if whole else -(-most // KEY_BLOCK) * KEY_BLOCK


def capacities_of(
    store: ClientStore,
    partition: Partition,
    choices: Choices,
    population: Population | None = None,
    share: float = 1.0,
) -> dict[str, int]:
    """Room for the keys of any client, by space; with `share`, for this share of the clients. A client's own
    keys are counted if `population` is given. Otherwise their number is bounded by the number of its
    examples."""
    capacities = {}
    for space, values in values_per_example(store, partition).items():
        own = np.minimum(store.counts * values, partition.num_keys(space))
        if population is not None:
            own = population.own[space].counts
        most = int(np.quantile(own, share, method="higher")) if len(own) else 1
        most = choices[space].most(max(most, 1), partition.num_keys(space))
        capacities[space] = key_capacity(most, partition, space)
    return capacities


def rooms_of(
    store: ClientStore, partition: Partition, choices: Choices, population: Population | None = None
) -> list[dict[str, int]]:
    """The sizes of slices with which lanes work, the largest first.

    A few clients with many keys should not make all others work as much. But every size must be compiled. So
    there are at most three sizes. Each is a quarter of the one before and holds at least half of the clients.
    """
    rooms = [capacities_of(store, partition, choices, population)]
    most = capacities_of(store, partition, choices, population, share=0.5)
    slice_bytes = sum(
        rooms[0][space] * partition.row_bytes(path)
        for space, paths in partition.spaces.items()
        for path in paths
    )
    while len(rooms) < 3 and slice_bytes > SMALL_SLICE:
        room = {
            s: key_capacity(-(-c // 4), partition, s) if 4 * most[s] <= c else c for s, c in rooms[-1].items()
        }
        if room == rooms[-1]:
            break
        rooms.append(room)
    return rooms


def values_per_example(store: ClientStore, partition: Partition) -> dict[str, int]:
    """How many keys an example may name, by space."""
    size = lambda name: int(np.prod(store.columns[name].shape[1:])) if name in store.columns else 1
    return {space: sum(map(size, partition.columns[space])) for space in partition.spaces}


def populate(store: ClientStore, partition: Partition, choices: Choices) -> Population:
    """Pack some clients. Each chooses its keys, in the spaces where the choice is made only once."""
    packed = store if store.packed() else store.gather(np.arange(store.num_clients))
    numbers = client_numbers(packed.client_ids)
    own, positions = own_keys(packed, partition)
    chosen, missed, nothing = {}, {}, np.zeros(len(numbers), np.uint64)
    for space, keys in own.items():
        if choices[space].every_round:
            continue
        asking = Asking(keys, partition.num_keys(space), numbers, nothing, nothing)
        chosen[space] = choices[space].choose(asking)
        left_out = keys.uses * (chosen[space].place < 0)
        missed[space] = np.bincount(owners(keys.counts), left_out, len(keys.counts))
        for name in partition.columns[space] if choices[space].name != "own" else ():
            positions[name] = placed(
                positions[name], packed.counts, keys, chosen[space], partition.block(space)
            )
    return Population(packed, numbers, own, chosen, missed, positions)


def shelve(population: Population) -> Shelf:
    """The population as arrays, for whole tables: a key is the number of its row."""
    columns = {
        name: narrow(name, column)
        for name, column in population.store.columns.items()
        if name not in population.positions
    }
    keys = {space: chosen.keys for space, chosen in population.chosen.items()}
    return Shelf(columns, dict(population.positions), keys, {})


def beside(cohorts: Sequence[np.ndarray], num_rounds: int, room: int) -> np.ndarray:
    """Cohorts, one per round, as an array [num_rounds, room]; -1 means no client."""
    rows = np.full((num_rounds, room), -1)
    for row, clients in zip(rows, cohorts, strict=False):
        row[: len(clients)] = clients
    return rows


def lay_out(
    counts: np.ndarray, cohorts: np.ndarray, devices: int, lanes: int, values: np.ndarray | None = None
) -> np.ndarray:
    """Arrange cohorts [rounds, clients] (positions in `counts`, -1 for no client) in slots
    [rounds, devices, chunks, lanes]. With `values` of the clients, these are arranged in their place.

    Clients are sorted by size, so that clients that run side by side finish together. They are given to the
    devices in turns.
    """
    rounds, size = cohorts.shape
    chunks = max(-(-size // (devices * lanes)), 1)
    slots = np.full((rounds, chunks * devices * lanes), -1)
    held = np.append(counts, -1)[cohorts]
    order = np.argsort(-held, axis=1, kind="stable")
    slots[:, :size] = np.take_along_axis(cohorts if values is None else values, order, 1)
    slots = slots.reshape(rounds, chunks, devices, lanes)
    slots[:, 1::2] = slots[:, 1::2, ::-1]  # reverse every other turn: no device always has the larger clients
    return slots.transpose(0, 2, 1, 3)


def plan(population: Population, client: np.ndarray, version: np.ndarray | None = None) -> Plan:
    """The plan of clients (positions in the population, -1 for no client) in slots, and of the versions of the
    model that they begin with, if not with the current one. `ask` adds the keys."""
    count = _at(population.store.counts, client, np.int32)
    number = words(_at(population.numbers, client, np.uint64))
    start = _at(population.store.starts, client, np.int32)
    version = None if version is None else np.maximum(version, 0).astype(np.int32)
    slots = Slots(client.astype(np.int32), number, start, count, {}, {}, {}, version=version)
    return Plan(slots, count.max(axis=-1), {}, {})


def _at(values: np.ndarray, client: np.ndarray, dtype: Any) -> np.ndarray:
    """The clients' values; 0 where there is no client."""
    if not len(values):
        return np.zeros(client.shape, dtype)
    return np.where(client >= 0, values[client], 0).astype(dtype)


def ask(
    population: Population, partition: Partition, choices: Choices, plan: Plan, seed: int, first: int
) -> Requests:
    """Let the clients of a plan choose their keys. `first` is the number of the plan's first round."""
    client = plan.slots.client
    starts, counts, place_starts, keys, places = {}, {}, {}, {}, {}
    missed = np.zeros(len(client), int)
    place = np.arange(len(client)).repeat(client[0].size)
    rounds = first + place if plan.slots.version is None else plan.slots.version.ravel()
    numbers = _at(population.numbers, client, np.uint64).ravel()
    for space, own in population.own.items():
        if space in population.chosen:
            chosen = population.chosen[space]
            starts[space] = _at(chosen.starts, client, np.int32)
            counts[space] = _at(chosen.counts, client, np.int32)
            missed += _at(population.missed[space], client, int).sum(axis=(1, 2, 3))
            continue
        held = _at(own.counts, client, int).ravel()
        rows = row_indices(_at(own.starts, client, int).ravel(), held)
        mine = OwnKeys(own.keys[rows], offsets(held), held, own.uses[rows])
        drawn = streams(space, seed, rounds, numbers)
        asking = Asking(mine, partition.num_keys(space), numbers, *drawn)
        chosen = choices[space].choose(asking)
        starts[space] = chosen.starts.reshape(client.shape).astype(np.int32)
        counts[space] = np.where(client >= 0, chosen.counts.reshape(client.shape), 0).astype(np.int32)
        place_starts[space] = mine.starts.reshape(client.shape).astype(np.int32)
        keys[space], places[space] = chosen.keys, chosen.place
        lost = np.bincount(place[owners(held)], mine.uses * (chosen.place < 0), len(client))
        missed += lost.astype(int)
    slots = plan.slots._replace(key_start=starts, key_count=counts, place_start=place_starts)
    most = {space: count.max(axis=-1) for space, count in counts.items()}
    return Requests(plan._replace(slots=slots, most_keys=most), keys, places, missed)


def by_room(plan: Plan, rooms: Sequence[Mapping[str, int]]) -> Plan:
    """The plan with its chunks sorted by room: for each chunk, the smallest of the `rooms` that its clients'
    keys fit."""
    fits = [[plan.most_keys[space] <= size for space, size in room.items()] for room in rooms]
    number = sum((np.all(each, axis=0) for each in fits[1:]), np.zeros(plan.longest.shape, int))
    order = np.argsort(number, axis=-1, kind="stable")
    sort = lambda chunks: np.take_along_axis(chunks, order, -1)
    lanes = lambda slots: np.take_along_axis(
        slots, order.reshape(*[1] * (slots.ndim - order.ndim - 1), *order.shape, 1), -2
    )
    ends = np.cumsum(number[..., None] == np.arange(len(rooms)), axis=-2)[..., -1, :]
    longest, most_keys = jax.tree_util.tree_map(sort, (plan.longest, plan.most_keys))
    slots = jax.tree_util.tree_map(lanes, plan.slots)
    return Plan(slots, longest, most_keys, plan.tables, np.cumsum(ends, axis=-1).astype(np.int32))


def _keys_of_round(population: Population, asked: Requests, space: str, i: int) -> np.ndarray:
    """The keys of all clients of a round, one client after the other."""
    slots = asked.plan.slots
    held = asked.keys[space] if space in asked.keys else population.chosen[space].keys
    return held.take(row_indices(slots.key_start[space][i].ravel(), slots.key_count[space][i].ravel()))


def cut(
    population: Population, choices: Choices, asked: Requests
) -> tuple[Requests, dict[str, list[np.ndarray]]]:
    """The requests for tables that are cut to the rows each round needs. Keys become row numbers in the cut
    tables. Also returns the rows themselves, sorted, for every round. Spaces in which all clients ask for all
    keys are not cut."""
    starts, rows, tables = dict(asked.plan.slots.key_start), dict(asked.keys), {}
    for space, counts in asked.plan.slots.key_count.items():
        if choices[space].name == "all":
            continue
        of_round = (_keys_of_round(population, asked, space, i) for i in range(len(counts)))
        parts = list(map(_distinct, of_round))
        tables[space] = [table for table, _ in parts]
        rows[space] = np.concatenate([row for _, row in parts]).astype(np.int32)
        starts[space] = offsets(counts.ravel()).reshape(counts.shape).astype(np.int32)
    plan = asked.plan._replace(slots=asked.plan.slots._replace(key_start=starts))
    return asked._replace(plan=plan, keys=rows), tables


def _distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`np.unique(keys, return_inverse=True)`. Marking keys in a list of all is faster than sorting them, unless
    they are few of very many."""
    last = int(keys.max(initial=0))
    if last > MARKED * len(keys):
        return np.unique(keys, return_inverse=True)
    held, place = np.zeros(last + 1, bool), np.empty(last + 1, np.int32)
    held[keys] = True
    rows = np.flatnonzero(held)
    place[rows] = np.arange(len(rows), dtype=np.int32)
    return rows.astype(keys.dtype), place[keys]


def in_tables(
    asked: Requests, tables: Mapping[str, list[np.ndarray]], others: Mapping[str, list[np.ndarray]]
) -> Requests:
    """Requests that are cut to `tables`, as requests for `others`, which have all their rows and more."""
    rows = dict(asked.keys)
    for space, of_round in tables.items():
        moved = [np.searchsorted(large, table) for table, large in zip(of_round, others[space], strict=True)]
        ends = np.cumsum(asked.plan.slots.key_count[space].sum(axis=(1, 2, 3)))
        parts = np.split(rows[space], ends[:-1])
        found = [at[part] for at, part in zip(moved, parts, strict=True)]
        rows[space] = np.concatenate(found).astype(np.int32)
    return asked._replace(keys=rows)


def account(
    sizes: Sizes,
    choices: Choices,
    population: Population,
    asked: Requests,
    tables: Mapping[str, list[np.ndarray]],
    num_rounds: int,
) -> list[dict[str, Served]]:
    """What serving the first rounds of a plan costs. `tables` are the rows of the tables that were cut."""
    slots = asked.plan.slots
    clients = (slots.client >= 0).sum(axis=(1, 2, 3)).tolist()

    def distinct(space: str, i: int) -> int:
        if space in tables:
            return len(tables[space][i])
        if choices[space].name == "all":
            return sizes.num_keys[space] if clients[i] else 0
        return num_distinct(_keys_of_round(population, asked, space, i), sizes.num_keys[space])

    demand = lambda space, i: Demand(distinct(space, i), slots.key_count[space][i].ravel())
    return [
        serve(sizes, clients[i], {space: demand(space, i) for space in slots.key_count})
        for i in range(num_rounds)
    ]


def grown(rooms: dict[str, int], name: str, size: int) -> int:
    """The room for an array with this name. It only grows, with an eighth in reserve, so that programs are
    reused."""
    if size > rooms.get(name, -1):
        rooms[name] = size + size // 8 + 16
    return rooms[name]


def pad_shelf(shelf: Shelf, num_rows: int, num_keys: Mapping[str, int]) -> Shelf:
    """The shelf with room for this many examples and keys."""
    fill = lambda arrays: {name: pad(array, num_rows) for name, array in arrays.items()}
    keys = {space: pad(rows, num_keys[space]) for space, rows in shelf.keys.items()}
    return shelf._replace(columns=fill(shelf.columns), positions=fill(shelf.positions), keys=keys)
