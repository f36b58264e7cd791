"""Sums of rows that clients write to keys, by two servers of which neither learns a client's keys or rows.

A client writes to one slot of every bucket: its row and the number 1, or zeros where it has no key. Every write is
a distributed point function, so each server sees only what looks random. A server adds up the shares of all
clients; the two servers' sums, added, are the sums of the rows and the number of clients of every key. This is the
pattern of Riposte (Corrigan-Gibbs, Boneh and Mazieres 2015), Express (Eskandarian et al. 2021) and PREAMBLE (Asi et
al. 2025). Servers follow the protocol, and clients too: one that does not can spoil the sum. The two servers
together would learn everything.

A write, in little-endian words. Public, for both servers: for every level of a tree and bucket a seed (16 bytes),
for every level and bucket a byte of two flags, for every bucket the final words (4 bytes each). For each server
alone: the roots, 16 bytes a bucket. Sizes depend on the layout and the number of words alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from partwise.privacy.aes import BLOCK
from partwise.privacy.buckets import BucketLayout, LayoutShape, Random, place
from partwise.privacy.point_functions import (
    add_points,
    corrections_size,
    depth_of,
    make_hashes,
    make_points,
    pack_corrections,
    unpack_corrections,
)
from partwise.types import UserError

NONCE = 16  # bytes; random, so that no two clients have the same
COUNT = 1  # words after those of an update: how many clients wrote


class Write(NamedTuple):
    """What a client sends: a part for both servers, and the roots for each alone."""

    public: bytes
    first: bytes
    second: bytes


class WriteSizes(NamedTuple):
    """Bytes of the parts of a write."""

    public: int
    roots: int

    @property
    def total(self) -> int:
        """Of all that a client sends, without the box around the second server's roots."""
        return self.public + 2 * self.roots


def write_sizes(layout: BucketLayout | LayoutShape, num_words: int) -> WriteSizes:
    """What a client sends for updates of so many words a key, whatever its keys."""
    public = corrections_size(layout.num_buckets, depth_of(layout.size), num_words + COUNT)
    return WriteSizes(public, layout.num_buckets * BLOCK)


def make_write(
    layout: BucketLayout,
    keys: np.ndarray,
    words: np.ndarray,
    context: bytes,
    nonce: bytes,
    random: Random = os.urandom,
) -> tuple[Write, np.ndarray]:
    """Write the words [key, word] to the keys, and the keys that found a bucket. The context names the round, and
    the nonce is 16 random bytes for this write alone. Numbers are mod 2**32: -1 is 2**32 - 1."""
    if words.ndim != 2 or len(words) != np.size(keys) or words.dtype != np.uint32:
        raise UserError(
            f"words must be uint32 [{np.size(keys)}, words], not {words.dtype} of shape {words.shape}"
        )
    placed = place(layout, keys, random)
    payloads = np.zeros((layout.num_buckets, words.shape[1] + COUNT), np.uint32)
    row_of = {int(key): row for row, key in enumerate(np.reshape(keys, -1))}
    payloads[placed.buckets, :-COUNT] = words[[row_of[int(key)] for key in placed.keys]]
    payloads[placed.buckets, -COUNT:] = 1
    hashes = make_hashes(context, _checked_nonce(nonce))
    points, roots = make_points(placed.offsets, payloads, depth_of(layout.size), hashes, random)
    return Write(pack_corrections(points), roots[0].tobytes(), roots[1].tobytes()), placed.keys


def accumulate(
    layout: BucketLayout,
    num_words: int,
    context: bytes,
    writes: Iterable[tuple[bytes, bytes, bytes]],
    party: int,
) -> np.ndarray:
    """One server's share of the sum of writes (nonce, public, roots): uint32 [key, num_words + 1], the last word
    the count. Both servers must take the same writes (`common`). Party 0 has the first roots, 1 the second."""
    if party not in (0, 1):
        raise UserError(f"a party is 0 or 1, not {party}")
    sums = np.zeros((layout.num_slots, num_words + COUNT), np.uint32)
    seen: set[bytes] = set()
    for nonce, public, roots in writes:
        check_write(layout, num_words, nonce, public, roots)
        if nonce in seen:
            raise UserError(f"the write {nonce.hex()} comes twice: count each once, with `common`")
        seen.add(nonce)
        points = unpack_corrections(public, layout.num_buckets, depth_of(layout.size), num_words + COUNT)
        seeds = np.frombuffer(roots, np.uint64).reshape(-1, 2)
        add_points(sums, layout.size, points, seeds, make_hashes(context, nonce), party)
    return _folded(layout, sums)


def common(first: Iterable[bytes], second: Iterable[bytes]) -> list[bytes]:
    """The nonces of the writes that both servers have, each once, in an order that is the same for both."""
    return sorted(set(first) & set(second))


def opened(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The sum, mod 2**32, of the two servers' shares."""
    if first.shape != second.shape:
        raise UserError(f"the shares have shapes {first.shape} and {second.shape}, and must have the same")
    return first + second


def check_write(layout: BucketLayout, num_words: int, nonce: bytes, public: bytes, roots: bytes) -> None:
    """Raise `UserError` if a write is not of this layout. A server does so before it takes one."""
    _checked_nonce(nonce)
    for what, message, size in zip(
        ("public part", "roots"), (public, roots), write_sizes(layout, num_words), strict=True
    ):
        if len(message) != size:
            raise UserError(
                f"a write's {what} has {len(message):,} bytes, and must have {size:,}: it is of another layout or "
                f"other updates"
            )


def _checked_nonce(nonce: bytes) -> bytes:
    if len(nonce) != NONCE:
        raise UserError(f"a write's nonce has {len(nonce)} bytes, and must have {NONCE} random ones")
    return nonce


def _folded(layout: BucketLayout, sums: np.ndarray) -> np.ndarray:
    """The sums of keys: each is that of the key's three slots."""
    first, *others = layout.positions
    folded = sums[first]
    for positions in others:
        folded += sums[positions]
    return folded
