"""Buckets that hold every key three times, and a place in them for each of a client's keys.

A client asks every bucket for one row, or writes to one row of every bucket. So the number of its keys, and which
they are, cannot be seen. Three public pseudo-random permutations of the keys are each cut into pieces, and a bucket
is one piece of each: all buckets have exactly the same size. This is a variant of the probabilistic batch codes of
Angel, Chen, Laine and Setty (2018). Keys find their buckets by cuckoo hashing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from hashlib import blake2s
from typing import NamedTuple

import numpy as np

from partwise.privacy.aes import keystream
from partwise.types import UserError

COPIES = 3  # places of a key, in buckets that may be the same
MOST_KICKS = 2000  # for one key, until it is given up
SPARE = 40  # buckets more than keys, where half as many again would be fewer
Random = Callable[[int], bytes]  # so many random bytes: `os.urandom`


class LayoutShape(NamedTuple):
    """How many buckets a layout has, and how many slots each. All sizes of messages follow from it.

    num_buckets: at least one and a half times the most keys of a client, and at least 40 more than it
    size:        slots of a bucket
    """

    num_buckets: int
    size: int

    @property
    def num_slots(self) -> int:
        return self.num_buckets * self.size


class BucketLayout(NamedTuple):
    """Which keys each bucket holds. Public, and the same for both servers and all clients of a round.

    num_keys:    how many keys there are
    most:        the most keys of a client
    seed:        what the permutations follow from
    num_buckets: at least one and a half times `most`, and at least 40 more than it
    size:        slots of a bucket
    positions:   for each permutation and key, its slot (bucket x size + offset)
    slots:       for each slot, its key; -1: none
    """

    num_keys: int
    most: int
    seed: bytes
    num_buckets: int
    size: int
    positions: np.ndarray
    slots: np.ndarray

    @property
    def num_slots(self) -> int:
        return self.num_buckets * self.size


class Placed(NamedTuple):
    """Where a client's keys are. Every bucket has a target; without a key, it is drawn at random.

    keys:    those that found a bucket, in the order in which they were given
    buckets: the bucket of each
    offsets: for every bucket, the slot in it that is asked for
    dropped: keys that found none
    """

    keys: np.ndarray
    buckets: np.ndarray
    offsets: np.ndarray
    dropped: np.ndarray


def layout_shape(num_keys: int, most: int) -> LayoutShape:
    """The shape of `make_layout`, without its permutations."""
    if num_keys < 1 or most < 1:
        raise UserError(
            f"a layout needs keys and a client with some, not {num_keys} keys and {most} a client"
        )
    wanted = max(math.ceil(1.5 * most), most + SPARE)
    piece = max(1, num_keys // wanted)  # rounded down, so that there are never fewer buckets than wanted
    return LayoutShape(max(wanted, math.ceil(num_keys / piece)), COPIES * piece)


@lru_cache(8)
def make_layout(num_keys: int, most: int, seed: bytes) -> BucketLayout:
    """The buckets of a table, for clients with up to `most` keys. The same in every process."""
    num_buckets, size = layout_shape(num_keys, most)
    piece = size // COPIES
    positions = np.empty((COPIES, num_keys), np.int64)
    slots = np.full(num_buckets * size, -1, np.int64)
    for copy, order in enumerate(_permutations(num_buckets * piece, seed)):
        bucket, offset = np.divmod(np.arange(len(order)), piece)
        slot = bucket * size + copy * piece + offset
        slots[slot] = np.where(order < num_keys, order, -1)
        positions[copy, order[order < num_keys]] = slot[order < num_keys]
    for shared in (positions, slots):
        shared.flags.writeable = False  # it is cached
    return BucketLayout(num_keys, most, seed, num_buckets, size, positions, slots)


def _permutations(length: int, seed: bytes) -> Iterator[np.ndarray]:
    """Pseudo-random permutations: the order of random 64-bit numbers, which is the same everywhere."""
    key = blake2s(seed, digest_size=16, person=b"buckets").digest()
    numbers = keystream(key, 8 * COPIES * length).view("<u8").reshape(COPIES, length)
    return (np.argsort(each, kind="stable") for each in numbers)


def place(layout: BucketLayout, keys: np.ndarray, random: Random) -> Placed:
    """A bucket for each key, by a random walk (cuckoo hashing). A key that finds none is dropped, which nobody
    else sees: to try again with other buckets would tell of the keys."""
    keys = _checked(layout, keys)
    buckets_of = (layout.positions[:, keys] // layout.size).T.tolist()
    choices, holder, dropped = _choices(random), {}, []
    for index in range(len(keys)):
        left = _insert(index, buckets_of, holder, choices)
        if left is not None:
            dropped.append(left)
    bucket_of = {index: bucket for bucket, index in holder.items()}
    kept = sorted(bucket_of)
    buckets = np.array([bucket_of[index] for index in kept], np.int64)
    offsets = _below(layout.size, layout.num_buckets, random)
    offsets[buckets] = _offsets(layout, keys[kept], buckets)
    return Placed(keys[kept], buckets, offsets, keys[dropped])


def _checked(layout: BucketLayout, keys: np.ndarray) -> np.ndarray:
    keys = np.asarray(keys, np.int64).reshape(-1)
    if len(keys) > layout.most:
        raise UserError(f"a client has {len(keys):,} keys, and the layout is for at most {layout.most:,}")
    if len(keys) and not 0 <= keys.min() <= keys.max() < layout.num_keys:
        raise UserError(f"keys must be from 0 to {layout.num_keys - 1:,}, not {keys.min()} to {keys.max()}")
    if len(np.unique(keys)) < len(keys):
        raise UserError("a client's keys must be distinct: give each once")
    return keys


def _insert(index: int, buckets_of: list, holder: dict[int, int], choices: Iterator[int]) -> int | None:
    """Put a key into a free bucket of its own, or in another's place, which then moves on. Returns the key
    that is left without a bucket."""
    for _ in range(MOST_KICKS):
        for bucket in buckets_of[index]:
            if bucket not in holder:
                holder[bucket] = index
                return None
        bucket = buckets_of[index][next(choices)]
        holder[bucket], index = index, holder[bucket]
    return index


def _choices(random: Random) -> Iterator[int]:
    """Random numbers below 3, without end."""
    while True:
        yield from (byte % COPIES for byte in random(1024) if byte < 255)


def _below(limit: int, count: int, random: Random) -> np.ndarray:
    """Random numbers below a limit. The bias of the remainder is below 2**-40 for limits that are used."""
    return (np.frombuffer(random(8 * count), "<u8") % np.uint64(limit)).astype(np.int64)


def _offsets(layout: BucketLayout, keys: np.ndarray, buckets: np.ndarray) -> np.ndarray:
    """The slot of each key in its bucket; the first if there are two."""
    slots = layout.positions[:, keys]
    copy = (slots // layout.size == buckets).argmax(0)
    return slots[copy, np.arange(len(keys))] % layout.size
