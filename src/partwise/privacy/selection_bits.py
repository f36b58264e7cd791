"""Bits that say which slots a server xors: random by themselves, and different for one slot of every bucket.

There are two ways to tell two servers such bits. The shape of the layout alone says which is used: the one that has
fewer bytes, so all parties come to the same.

STRINGS: The first server gets the 16-byte seed of a key stream, the second one a bit for every slot: the same
         stream with one bit flipped in each bucket (Chor, Goldreich, Kushilevitz and Sudan 1995).
POINTS:  A distributed point function in every bucket, whose leaves are blocks of 128 bits (Boyle, Gilboa and Ishai
         2016, with early termination). Both get the correction words, and each the seed of a key stream of roots.
         It has fewer bytes for buckets of more than about 400 slots: where a client has one key of 200, or less.

What both get of POINTS: a nonce of 16 bytes; for every level of a tree and bucket a seed (16 bytes); for every
level and bucket a byte of two flags; for every bucket a final block. Slot i of a bucket is bit i % 128 of block
i // 128. Bit i of bytes is in byte i // 8 at 1 << i % 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from partwise.privacy.aes import BLOCK, keystream
from partwise.privacy.buckets import BucketLayout, LayoutShape, Random
from partwise.privacy.point_functions import (
    WORDS,
    Hashes,
    block_shares,
    corrections_size,
    depth_of,
    make_block_points,
    make_hashes,
    pack_corrections,
    unpack_corrections,
)

LEAF = 8 * BLOCK  # bits of a leaf


class Told(NamedTuple):
    """What the servers are told: both of them, the first alone, and the second alone."""

    to_both: bytes
    to_first: bytes
    to_second: bytes


class ToldSizes(NamedTuple):
    """Bytes of it."""

    to_both: int
    to_first: int
    to_second: int


class Way(NamedTuple):
    """A way to tell two servers their bits.

    sizes: layout -> how many bytes are told
    tell:  layout, the wanted offset of every bucket, random -> what is told
    bits:  layout, what both are told, what one is told, its number -> its bits, packed
    """

    sizes: Callable[[BucketLayout | LayoutShape], ToldSizes]
    tell: Callable[[BucketLayout, np.ndarray, Random], Told]
    bits: Callable[[BucketLayout, bytes, bytes, int], np.ndarray]


def way_of(layout: BucketLayout | LayoutShape) -> Way:
    """The way with fewer bytes."""
    return min(STRINGS, POINTS, key=lambda way: sum(way.sizes(layout)))


def _string_sizes(layout: BucketLayout | LayoutShape) -> ToldSizes:
    return ToldSizes(0, BLOCK, -(-layout.num_slots // 8))


def _tell_string(layout: BucketLayout, offsets: np.ndarray, random: Random) -> Told:
    seed = random(BLOCK)
    wanted = np.zeros(layout.num_slots, np.uint8)
    wanted[np.arange(layout.num_buckets) * layout.size + offsets] = 1
    flipped = _string_bits(layout, b"", seed, 0) ^ np.packbits(wanted, bitorder="little")
    return Told(b"", seed, flipped.tobytes())


def _string_bits(layout: BucketLayout, to_both: bytes, mine: bytes, party: int) -> np.ndarray:
    if party == 0:
        return keystream(mine, _string_sizes(layout).to_second)
    return np.array(np.frombuffer(mine, np.uint8))  # read-only ones compile anew


def _point_sizes(layout: BucketLayout | LayoutShape) -> ToldSizes:
    depth = depth_of(_num_leaves(layout))
    return ToldSizes(BLOCK + corrections_size(layout.num_buckets, depth, WORDS), BLOCK, BLOCK)


def _tell_points(layout: BucketLayout, offsets: np.ndarray, random: Random) -> Told:
    nonce, seeds = random(BLOCK), (random(BLOCK), random(BLOCK))
    leaves, places = np.divmod(offsets, LEAF)
    blocks = np.zeros((layout.num_buckets, BLOCK), np.uint8)
    blocks[np.arange(layout.num_buckets), places // 8] = 1 << places % 8
    roots = np.stack([_roots(layout, seed) for seed in seeds])
    depth = depth_of(_num_leaves(layout))
    points = make_block_points(leaves, blocks.view(np.uint32), depth, _hashes(layout, nonce), roots)
    return Told(nonce + pack_corrections(points), *seeds)


def _point_bits(layout: BucketLayout, to_both: bytes, mine: bytes, party: int) -> np.ndarray:
    leaves, nonce = _num_leaves(layout), to_both[:BLOCK]
    points = unpack_corrections(to_both[BLOCK:], layout.num_buckets, depth_of(leaves), WORDS)
    shares = block_shares(leaves, points, _roots(layout, mine), _hashes(layout, nonce), party)
    packed = shares.view(np.uint8).reshape(layout.num_buckets, -1)
    return np.packbits(np.unpackbits(packed, axis=1, count=layout.size, bitorder="little"), bitorder="little")


def _num_leaves(layout: BucketLayout | LayoutShape) -> int:
    """Of the tree of a bucket."""
    return -(-layout.size // LEAF)


def _hashes(layout: BucketLayout, nonce: bytes) -> Hashes:
    return make_hashes(layout.seed, nonce)


def _roots(layout: BucketLayout, seed: bytes) -> np.ndarray:
    return keystream(seed, layout.num_buckets * BLOCK).view(np.uint64).reshape(-1, 2)


STRINGS = Way(_string_sizes, _tell_string, _string_bits)
POINTS = Way(_point_sizes, _tell_points, _point_bits)
