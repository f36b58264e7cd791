"""A client's own keys: the keys that its examples name.

This runs on the host, vectorised over many clients. A real client does the same for itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partwise.data.checks import check_keys
from partwise.data.ragged import offsets, owned_keys, owners
from partwise.data.store import ClientStore
from partwise.model.partition import Partition
from partwise.types import unknown


class OwnKeys(NamedTuple):
    """The keys of many clients in one space. Client c has `keys[starts[c] : starts[c] + counts[c]]`, sorted."""

    keys: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    uses: np.ndarray  # how often the client's examples name each key


def own_keys(store: ClientStore, partition: Partition) -> tuple[dict[str, OwnKeys], dict[str, np.ndarray]]:
    """Every client's own keys, and for every key column the position of each id among its client's keys.

    An id i that belongs to key number p has position `p * block + i % block`. The id -1 (nothing) stays -1.
    The store must be packed.
    """
    keys, positions = {}, {}
    client = owners(store.counts)
    for space in partition.spaces:
        names, num_keys, block = partition.columns[space], partition.num_keys(space), partition.block(space)
        columns = [_checked(store, partition, space, name) for name in names]
        flat = [owned_keys(client, column, num_keys, block) for column in columns]
        unique, inverse, uses = np.unique(
            np.concatenate([np.zeros(0, np.int64), *flat]), return_inverse=True, return_counts=True
        )
        owner = unique // num_keys
        counts = np.bincount(owner, minlength=store.num_clients)
        starts = offsets(counts)
        keys[space] = OwnKeys((unique % num_keys).astype(np.int32), starts, counts, uses)
        found = (inverse - starts[owner[inverse]]).astype(np.int32)
        ends = np.cumsum([0, *map(len, flat)])
        for name, column, first, last in zip(names, columns, ends[:-1], ends[1:], strict=True):
            positions[name] = np.full(column.shape, -1, np.int32)
            positions[name][column >= 0] = found[first:last] * block + column[column >= 0] % block
    return keys, positions


def _checked(store: ClientStore, partition: Partition, space: str, name: str) -> np.ndarray:
    if name not in store.columns:
        raise unknown(f"column (it should hold the keys of space '{space}')", name, store.columns)
    column, num_ids = store.columns[name], partition.num_keys(space) * partition.block(space)
    lowest = -1 if column.ndim > 1 else 0  # an example with several ids may leave some of them out
    check_keys(name, column, space, num_ids, lowest)
    return column.astype(np.int64)
