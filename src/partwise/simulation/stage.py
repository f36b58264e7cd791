"""From a client store to arrays for the devices: who runs when, in which lane, on which rows.

Two ways, one shape. *Resident*: the whole population's columns stay on the devices and a call brings only
indices. *Staged*: a call brings the rows of its own clients, so that the population need not fit. In both, a
call may also bring the rows of the tables that each of its rounds needs, and keys as rows of those.
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
KEY_BLOCK = 64  # rows of clients' updates are added to a table so many at a time
SMALL_SLICE = 1 << 18  # bytes; smaller slices are not worth a program for each size


class Shelf(NamedTuple):
    """Examples and keys of many clients, packed; the same for all lanes."""

    columns: dict[str, Any]  # but those that hold keys
    positions: dict[str, Any]  # of those: where the id lies among its client's keys, -1 for nothing
    keys: dict[str, Any]  # space -> table rows of all clients' keys
    places: dict[str, Any]  # space that is chosen anew every round -> own key to asked key, of all clients


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


class Plan(NamedTuple):
    """Slots [rounds, devices, chunks, lanes]; per chunk [rounds, devices, chunks] the most examples and keys of
    any lane, which is how often loops turn."""

    slots: Slots
    longest: Any
    most_keys: Mapping[str, Any]
    tables: Mapping[str, Any]  # space -> rows of each round's cut table [rounds, rows]; none: whole tables
    ends: Any = ()  # [rounds, devices, rooms]: the chunk after the last of every room (see `by_room`)


class Population(NamedTuple):
    """The clients at hand with their keys, on the host."""

    store: ClientStore  # packed
    numbers: np.ndarray
    own: Mapping[str, OwnKeys]
    chosen: Mapping[str, Chosen]  # where the choice is the same in every round
    missed: Mapping[str, np.ndarray]  # there: ids of a client's examples outside its slice [clients]
    positions: Mapping[str, np.ndarray]  # among the chosen keys there, among the own keys elsewhere


class Requests(NamedTuple):
    """What the clients of a plan ask for, in the spaces where that is not on the shelf already."""

    plan: Plan
    keys: Mapping[str, np.ndarray]
    places: Mapping[str, np.ndarray]
    missed: np.ndarray  # [rounds]: how many ids of the clients' examples are outside their slices


def key_capacity(most: int, partition: Partition, space: str) -> int:
    """Room for so many keys: whole blocks, if there is more than one and steps do not work on the slice."""
    most = max(int(most), 1)
    whole = most <= KEY_BLOCK or partition.is_whole(space)
    return most if whole else -(-most // KEY_BLOCK) * KEY_BLOCK


def capacities_of(
    store: ClientStore,
    partition: Partition,
    choices: Choices,
    population: Population | None = None,
    share: float = 1.0,
) -> dict[str, int]:
    """Room for the keys of any client, or of this share of the clients, by space: what the population has, or
    without a look at its rows."""
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
    """The sizes of slices that lanes work on, the largest first. A few clients with many keys must not make all
    work as much as they do; but every size has to be compiled, so there are at most three, each for at least
    half of the clients and a quarter of the one before."""
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
    """Pack some clients and let each choose its keys, where the choice is made once."""
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
    """The population as arrays, for whole tables: a key is its own row."""
    columns = {
        name: narrow(name, column)
        for name, column in population.store.columns.items()
        if name not in population.positions
    }
    keys = {space: chosen.keys for space, chosen in population.chosen.items()}
    return Shelf(columns, dict(population.positions), keys, {})


def beside(cohorts: Sequence[np.ndarray], num_rounds: int, room: int) -> np.ndarray:
    """Cohorts, one a round, as an array [num_rounds, room], with -1 for nobody."""
    rows = np.full((num_rounds, room), -1)
    for row, clients in zip(rows, cohorts, strict=False):
        row[: len(clients)] = clients
    return rows


def plan(population: Population, cohorts: np.ndarray, devices: int, lanes: int) -> Plan:
    """Lay out cohorts [rounds, clients] (positions in the population, -1 for nobody); keys come with `ask`.

    Clients are sorted by size, so that those who run side by side finish together, and dealt to the devices
    in turns.
    """
    rounds, size = cohorts.shape
    chunks = max(-(-size // (devices * lanes)), 1)
    slots = np.full((rounds, chunks * devices * lanes), -1)
    held = np.append(population.store.counts, -1)[cohorts]
    order = np.argsort(-held, axis=1, kind="stable")
    slots[:, :size] = np.take_along_axis(cohorts, order, 1)
    slots = slots.reshape(rounds, chunks, devices, lanes)
    slots[:, 1::2] = slots[:, 1::2, ::-1]  # there and back, so that no device always has the larger ones
    client = slots.transpose(0, 2, 1, 3)
    count = _at(population.store.counts, client, np.int32)
    number = words(_at(population.numbers, client, np.uint64))
    start = _at(population.store.starts, client, np.int32)
    slots = Slots(client.astype(np.int32), number, start, count, {}, {}, {})
    return Plan(slots, count.max(axis=-1), {}, {})


def _at(values: np.ndarray, client: np.ndarray, dtype: Any) -> np.ndarray:
    """The clients' values, 0 where there is nobody."""
    if not len(values):
        return np.zeros(client.shape, dtype)
    return np.where(client >= 0, values[client], 0).astype(dtype)


def ask(
    population: Population, partition: Partition, choices: Choices, plan: Plan, seed: int, first: int
) -> Requests:
    """Let the clients of a plan, whose first round has that number, choose their keys."""
    client = plan.slots.client
    starts, counts, place_starts, keys, places = {}, {}, {}, {}, {}
    missed = np.zeros(len(client), int)
    rounds = first + np.arange(len(client)).repeat(client[0].size)
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
        lost = np.bincount(rounds[owners(held)] - first, mine.uses * (chosen.place < 0), len(client))
        missed += lost.astype(int)
    slots = plan.slots._replace(key_start=starts, key_count=counts, place_start=place_starts)
    most = {space: count.max(axis=-1) for space, count in counts.items()}
    return Requests(plan._replace(slots=slots, most_keys=most), keys, places, missed)


def by_room(plan: Plan, rooms: Sequence[Mapping[str, int]]) -> Plan:
    """The plan with its chunks sorted by the smallest of the `rooms` that their clients' keys fit."""
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
    """The keys of all clients of a round, one after the other."""
    slots = asked.plan.slots
    held = asked.keys[space] if space in asked.keys else population.chosen[space].keys
    return held.take(row_indices(slots.key_start[space][i].ravel(), slots.key_count[space][i].ravel()))


def cut(
    population: Population, choices: Choices, asked: Requests
) -> tuple[Requests, dict[str, list[np.ndarray]]]:
    """The same for tables cut to the rows that each round needs: keys become rows of those; and the rows
    themselves, sorted, round by round. Where everyone asks for all keys there is nothing to cut."""
    starts, rows, tables = dict(asked.plan.slots.key_start), dict(asked.keys), {}
    for space, counts in asked.plan.slots.key_count.items():
        if choices[space].name == "all":
            continue
        of_round = (_keys_of_round(population, asked, space, i) for i in range(len(counts)))
        parts = [np.unique(keys, return_inverse=True) for keys in of_round]
        tables[space] = [table for table, _ in parts]
        rows[space] = np.concatenate([row for _, row in parts]).astype(np.int32)
        starts[space] = offsets(counts.ravel()).reshape(counts.shape).astype(np.int32)
    plan = asked.plan._replace(slots=asked.plan.slots._replace(key_start=starts))
    return asked._replace(plan=plan, keys=rows), tables


def account(
    sizes: Sizes,
    choices: Choices,
    population: Population,
    asked: Requests,
    tables: Mapping[str, list[np.ndarray]],
    num_rounds: int,
) -> list[dict[str, Served]]:
    """What serving the first rounds of a plan costs; `tables` are the rows of those that were cut."""
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
    """Room for so much under a name: it only grows, by an eighth at a time, so that programs are reused."""
    if size > rooms.get(name, -1):
        rooms[name] = size + size // 8 + 16
    return rooms[name]


def pad_shelf(shelf: Shelf, num_rows: int, num_keys: Mapping[str, int]) -> Shelf:
    """The shelf with room for so many examples and keys."""
    fill = lambda arrays: {name: pad(array, num_rows) for name, array in arrays.items()}
    keys = {space: pad(rows, num_keys[space]) for space, rows in shelf.keys.items()}
    return shelf._replace(columns=fill(shelf.columns), positions=fill(shelf.positions), keys=keys)
