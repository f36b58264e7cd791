"""From a client store to arrays for the devices: who runs when, in which lane, on which rows.

Two ways, one shape. *Resident*: the whole population's columns stay on the devices and a call brings only
indices. *Staged*: a call brings the rows of its own clients, and of the tables only the rows of their keys,
so that neither the population nor a table needs to fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from partwise.data.ragged import offsets, row_indices
from partwise.data.store import ClientStore
from partwise.model.partition import Partition
from partwise.selection.keys import OwnKeys, client_numbers, own_keys

KEY_BLOCK = 64  # rows of clients' updates are added to a table so many at a time


class Shelf(NamedTuple):
    """Examples and keys of many clients, packed; the same for all lanes."""

    columns: dict[str, Any]  # but those that hold keys
    positions: dict[str, Any]  # of those: the key's number among its client's keys
    keys: dict[str, Any]  # space -> table rows of all clients' keys


class Slots(NamedTuple):
    """One entry per lane: which client of the shelf runs there. Padding is client -1, with no examples."""

    client: Any
    number: Any  # uint32, for its randomness
    start: Any
    count: Any
    key_start: Mapping[str, Any]
    key_count: Mapping[str, Any]


class Plan(NamedTuple):
    """Slots [rounds, devices, chunks, lanes]; per chunk [rounds, devices, chunks] the most examples and keys of
    any lane, which is how often loops turn."""

    slots: Slots
    longest: Any
    most_keys: Mapping[str, Any]
    tables: Mapping[
        str, Any
    ]  # key space -> rows of the round's cut tables [rounds, rows]; none: whole tables


class Population(NamedTuple):
    """The clients at hand with their keys, on the host."""

    store: ClientStore  # packed
    numbers: np.ndarray
    keys: Mapping[str, OwnKeys]
    positions: Mapping[str, np.ndarray]


def key_capacity(most: int) -> int:
    """Room for so many keys: whole blocks, if there is more than one."""
    most = max(int(most), 1)
    return most if most <= KEY_BLOCK else -(-most // KEY_BLOCK) * KEY_BLOCK


def capacities_of(store: ClientStore, partition: Partition) -> dict[str, int]:
    """Room for the keys of any client of a store, by space, without a look at its rows."""
    longest = int(store.counts.max(initial=1))
    return {
        space: key_capacity(min(longest * values, partition.num_keys(space)))
        for space, values in values_per_example(store, partition).items()
    }


def values_per_example(store: ClientStore, partition: Partition) -> dict[str, int]:
    """How many keys an example may name, by space."""
    size = lambda name: int(np.prod(store.columns[name].shape[1:])) if name in store.columns else 1
    return {space: sum(map(size, partition.columns[space])) for space in partition.spaces}


def populate(store: ClientStore, partition: Partition) -> Population:
    """Pack some clients and let each choose its keys."""
    packed = store if store.packed() else store.gather(np.arange(store.num_clients))
    keys, positions = own_keys(packed, partition)
    return Population(packed, client_numbers(packed.client_ids), keys, positions)


def shelve(population: Population) -> Shelf:
    """The population as arrays, for whole tables: a key is its own row."""
    columns = {
        name: _narrow(column)
        for name, column in population.store.columns.items()
        if name not in population.positions
    }
    return Shelf(
        columns, dict(population.positions), {space: own.keys for space, own in population.keys.items()}
    )


def cut(population: Population, plan: Plan) -> tuple[Plan, dict, dict]:
    """A plan for tables cut to the rows that each round needs; its keys (for the shelf) as rows of those cut
    tables; and the rows themselves, sorted, round by round."""
    starts, all_keys, tables = {}, {}, {}
    for space, own in population.keys.items():
        counts = plan.slots.key_count[space]
        held = own.keys[row_indices(plan.slots.key_start[space].ravel(), counts.ravel())]
        rounds = np.split(held, np.cumsum(counts.sum(axis=(1, 2, 3)))[:-1])
        parts = [np.unique(keys, return_inverse=True) for keys in rounds]
        tables[space] = [rows for rows, _ in parts]
        all_keys[space] = np.concatenate([row for _, row in parts]).astype(np.int32)
        starts[space] = offsets(counts.ravel()).reshape(counts.shape).astype(np.int32)
    return plan._replace(slots=plan.slots._replace(key_start=starts)), all_keys, tables


def plan(population: Population, cohorts: np.ndarray, devices: int, lanes: int) -> Plan:
    """Lay out cohorts [rounds, clients] (positions in the population, -1 for nobody).

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
    real = client >= 0

    def at(values: np.ndarray, dtype: Any) -> np.ndarray:
        return (
            np.where(real, values[client], 0).astype(dtype) if len(values) else np.zeros(client.shape, dtype)
        )

    count = at(population.store.counts, np.int32)
    key_counts = {space: at(own.counts, np.int32) for space, own in population.keys.items()}
    return Plan(
        Slots(
            client.astype(np.int32),
            at(population.numbers, np.uint32),
            at(population.store.starts, np.int32),
            count,
            {space: at(own.starts, np.int32) for space, own in population.keys.items()},
            key_counts,
        ),
        count.max(axis=-1),
        {space: counts.max(axis=-1) for space, counts in key_counts.items()},
        {},
    )


def _narrow(column: np.ndarray) -> np.ndarray:
    """64-bit columns as 32-bit ones, which is what devices compute with."""
    narrow = {np.dtype(np.int64): np.int32, np.dtype(np.float64): np.float32}.get(column.dtype)
    return column.astype(narrow) if narrow else np.asarray(column)


def pad(array: np.ndarray, capacity: int, fill: int = 0) -> np.ndarray:
    """The array with its first axis filled up, so that its shape stays the same from call to call."""
    if len(array) == capacity:
        return array
    result = np.full((capacity, *array.shape[1:]), fill, array.dtype)
    result[: len(array)] = array
    return result


def pad_shelf(shelf: Shelf, num_rows: int, num_keys: Mapping[str, int]) -> Shelf:
    """The shelf with room for so many examples and keys."""
    fill = lambda arrays: {name: pad(array, num_rows) for name, array in arrays.items()}
    keys = {space: pad(rows, num_keys[space]) for space, rows in shelf.keys.items()}
    return Shelf(fill(shelf.columns), fill(shelf.positions), keys)
