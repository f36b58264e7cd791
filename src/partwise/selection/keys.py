"""Which keys a client asks for, chosen from its own examples before it sees the model.

Runs on the host, vectorised over the clients at hand: what a real client does for itself, done for many.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from partwise.data.store import ClientStore
from partwise.model.partition import Partition
from partwise.types import UserError, unknown


class OwnKeys(NamedTuple):
    """The keys of many clients in one space: client c asks for `keys[starts[c] : starts[c] + counts[c]]`."""

    keys: np.ndarray
    starts: np.ndarray
    counts: np.ndarray


def own_keys(store: ClientStore, partition: Partition) -> tuple[dict[str, OwnKeys], dict[str, np.ndarray]]:
    """Every client's own keys (all that occur in its examples, sorted), and for every key column the
    position of each value among its client's keys. The store must be packed."""
    keys, positions = {}, {}
    client = np.repeat(np.arange(store.num_clients), store.counts)
    for space in partition.spaces:
        names = partition.columns[space]
        columns = [_checked(store, partition, space, name) for name in names]
        num_keys = partition.num_keys(space)
        flat = [
            (client.reshape(-1, *[1] * (c.ndim - 1)) * num_keys + c.astype(np.int64)).ravel() for c in columns
        ]
        unique, inverse = np.unique(np.concatenate(flat), return_inverse=True)
        owner = unique // num_keys
        counts = np.bincount(owner, minlength=store.num_clients)
        starts = np.cumsum(counts) - counts
        keys[space] = OwnKeys((unique % num_keys).astype(np.int32), starts, counts)
        position = (inverse - starts[owner[inverse]]).astype(np.int32)
        for name, part, column in zip(
            names, np.split(position, np.cumsum([c.size for c in columns])[:-1]), columns, strict=True
        ):
            positions[name] = part.reshape(column.shape)
    return keys, positions


def _checked(store: ClientStore, partition: Partition, space: str, name: str) -> np.ndarray:
    if name not in store.columns:
        raise unknown(f"column (it should hold the keys of space '{space}')", name, store.columns)
    column, num_keys = store.columns[name], partition.num_keys(space)
    if not np.issubdtype(column.dtype, np.integer):
        raise UserError(f"column '{name}' holds {column.dtype}, but keys are whole numbers 0..{num_keys - 1}")
    if column.size and (column.min() < 0 or column.max() >= num_keys):
        raise UserError(
            f"column '{name}' holds keys {column.min()}..{column.max()}, "
            f"but key space '{space}' has only 0..{num_keys - 1}"
        )
    return column


def client_numbers(client_ids: np.ndarray) -> np.ndarray:
    """A whole number for every client id, the same wherever the client runs; its randomness hangs on it."""
    if np.issubdtype(client_ids.dtype, np.integer):
        return (client_ids.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)
    return np.array([zlib.crc32(str(name).encode()) for name in client_ids], np.uint32)


def mean_keys(keys: Mapping[str, OwnKeys]) -> dict[str, float]:
    """Keys per client by space, on average."""
    return {space: float(own.counts.mean()) if len(own.counts) else 0.0 for space, own in keys.items()}
