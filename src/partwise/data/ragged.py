"""Arithmetic on ragged rows: client k owns `counts[k]` rows from `starts[k]` on. There is no Python loop over
clients."""

from __future__ import annotations

import numpy as np

from partwise.data.ids import whole_numbers


def offsets(counts: np.ndarray) -> np.ndarray:
    """Where each client's rows start if the clients are stored one after the other, [C] int64."""
    return np.cumsum(counts, dtype=np.int64) - counts


def owners(counts: np.ndarray) -> np.ndarray:
    """The client position of every row, [N] int64."""
    return np.repeat(np.arange(len(counts)), counts)


def ranks(counts: np.ndarray) -> np.ndarray:
    """The number of every row among its client's rows, [N] int64."""
    return np.arange(int(counts.sum())) - np.repeat(offsets(counts), counts)


def row_indices(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The rows of all clients, one client after the other, [sum of counts] int64."""
    return np.arange(int(counts.sum())) + np.repeat(starts - offsets(counts), counts)


def owned_keys(owner: np.ndarray, ids: np.ndarray, num_keys: int, block: int = 1) -> np.ndarray:
    """client * num_keys + key for every id of rows that belong to `owner` [N], [n] int64.

    `ids` is [N] or [N, ...]. Key k has the ids from k * block on. The id -1 is left out.
    """
    mine = owner.reshape(-1, *[1] * (ids.ndim - 1)) * num_keys + ids.astype(np.int64) // block
    return mine[ids >= 0]


def last_of(values: np.ndarray, ends: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    """The last `width` values of each list `values[end - length : end]`, [N, width] int32, padded with -1 at
    the end."""
    kept = np.minimum(lengths, width)
    place = np.arange(width)
    at = np.where(place < kept[:, None], (ends - kept)[:, None] + place, len(values))
    return np.append(values, -1)[at].astype(np.int32)


def row_blocks(counts: np.ndarray, max_rows: int) -> list[slice]:
    """Consecutive clients in blocks of at most `max_rows` rows; a larger client is a block by itself."""
    ends = np.cumsum(counts, dtype=np.int64)
    blocks, first = [], 0
    while first < len(counts):
        before = int(ends[first] - counts[first])
        last = max(int(np.searchsorted(ends, before + max_rows, side="right")), first + 1)
        blocks.append(slice(first, last))
        first = last
    return blocks


def shuffle_order(client_ids: np.ndarray, counts: np.ndarray, seed: int) -> np.ndarray:
    """A random order of each client's own rows, as an index into packed rows, [N].

    It depends on the seed, the client's id and its number of rows, never on the other clients.
    """
    streams = mix(_fingerprints(client_ids) ^ mix(np.array([seed % 2**64], np.uint64)))
    keys = mix(np.repeat(streams, counts) + ranks(counts).astype(np.uint64))
    return np.lexsort((keys, owners(counts)))


def _fingerprints(ids: np.ndarray) -> np.ndarray:
    """A number for every id that depends only on its text: 7 has the same number also among ids that are
    words."""
    if ids.dtype.kind != "U":
        return mix(ids.astype(np.int64).view(np.uint64))
    whole, values = whole_numbers(ids)
    return np.where(whole, mix(values.view(np.uint64)), _text_fingerprints(ids))


def _text_fingerprints(ids: np.ndarray) -> np.ndarray:
    codes = np.ascontiguousarray(ids).view(np.uint32).reshape(len(ids), -1).astype(np.uint64)
    prints = np.zeros(len(ids), np.uint64)
    for column in codes.T:  # one character at a time; the zero padding of shorter ids changes nothing
        prints = np.where(column == 0, prints, mix(prints ^ column))
    return prints


def mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64. The overflow is intended."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def pad(array: np.ndarray, capacity: int, fill: int = 0) -> np.ndarray:
    """The array with its first axis padded to `capacity`, so that its shape is the same in every call."""
    if len(array) == capacity:
        return array
    result = np.full((capacity, *array.shape[1:]), fill, array.dtype)
    result[: len(array)] = array
    return result


def pad_to_power(array: np.ndarray, fill: int = 0) -> np.ndarray:
    """The array padded to the next power of two, so that arrays of similar sizes share a program."""
    return pad(array, 1 << max(len(array) - 1, 0).bit_length(), fill)
