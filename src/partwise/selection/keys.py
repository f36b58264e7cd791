"""A client's own keys: those that its examples name.

Runs on the host, vectorised over the clients at hand: what a real client does for itself, done for many.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np

from partwise.data.ragged import offsets, owners
from partwise.data.store import ClientStore
from partwise.model.partition import Partition
from partwise.types import UserError, unknown


class OwnKeys(NamedTuple):
    """The keys of many clients in one space: client c has `keys[starts[c] : starts[c] + counts[c]]`, sorted."""

    keys: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    uses: np.ndarray  # how often the client's examples name each


def own_keys(store: ClientStore, partition: Partition) -> tuple[dict[str, OwnKeys], dict[str, np.ndarray]]:
    """Every client's own keys, and for every key column where each id lies among its client's keys: id i of
    key number p is at `p * block + i % block`, and -1 (nothing) stays -1. The store must be packed."""
    keys, positions = {}, {}
    client = owners(store.counts)
    for space in partition.spaces:
        names, num_keys, block = partition.columns[space], partition.num_keys(space), partition.block(space)
        columns = [_checked(store, partition, space, name) for name in names]
        shape = lambda column: (-1, *[1] * (column.ndim - 1))
        flat = [(client.reshape(shape(c)) * num_keys + c // block)[c >= 0] for c in columns]
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
    if not np.issubdtype(column.dtype, np.integer):
        raise UserError(f"column '{name}' holds {column.dtype}, but keys are whole numbers 0..{num_ids - 1}")
    lowest = -1 if column.ndim > 1 else 0  # of several ids an example may leave some out
    if column.size and (column.min() < lowest or column.max() >= num_ids):
        raise UserError(
            f"column '{name}' holds keys {column.min()}..{column.max()}, "
            f"but key space '{space}' has only 0..{num_ids - 1}"
            + (" (and -1 for nothing)" if lowest < 0 else "")
        )
    return column.astype(np.int64)


def client_numbers(client_ids: np.ndarray) -> np.ndarray:
    """A whole number for every client id, the same wherever the client runs; its randomness hangs on it."""
    if np.issubdtype(client_ids.dtype, np.integer):
        return (client_ids.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)
    return np.array([zlib.crc32(str(name).encode()) for name in client_ids], np.uint32)
