"""Rows of a table that two servers hold, fetched without telling either server which.

A client asks every bucket for one row. One server gets a random string with a bit for every slot, the other the
same string but for one bit in each bucket; each returns, for every bucket, the xor of the rows whose bit is set
(Chor, Goldreich, Kushilevitz and Sudan 1995). The xor of both answers is the wanted row. The first string is sent
as the 16-byte seed of a key stream. The two servers together would learn everything.

Messages: to the first server a seed of 16 bytes; to the second one bit for every slot, bit i in byte i // 8 at
1 << i % 8; an answer has a row with its checksum for every bucket. All depend on the layout alone.
"""

from __future__ import annotations

import os
from hashlib import blake2s
from typing import NamedTuple

import numpy as np

from partwise.privacy.aes import BLOCK, framed, keystream
from partwise.privacy.bucket_kernels import kernels
from partwise.privacy.buckets import BucketLayout, LayoutShape, Placed, Random, place
from partwise.types import UserError

CHECKSUM = 8  # bytes of a row's checksum: it is against mistakes, and not against a server that lies


class Query(NamedTuple):
    """What a client asks.

    to_first:  the seed, for the first server
    to_second: the bits, for the second server
    placed:    what the client keeps for itself
    """

    to_first: bytes
    to_second: bytes
    placed: Placed


class QuerySizes(NamedTuple):
    """Bytes of messages."""

    to_first: int
    to_second: int
    answer: int

    @property
    def total(self) -> int:
        """Of both questions and both answers."""
        return self.to_first + self.to_second + 2 * self.answer

    @property
    def relayed(self) -> int:
        """Of both questions, with a key for the pad, and one answer."""
        return self.to_first + self.to_second + BLOCK + self.answer


def query_sizes(layout: BucketLayout | LayoutShape, row_bytes: int) -> QuerySizes:
    """What a client sends and receives, whatever its keys."""
    return QuerySizes(BLOCK, -(-layout.num_slots // 8), layout.num_buckets * (row_bytes + CHECKSUM))


def bucket_table(layout: BucketLayout, rows: np.ndarray, label: bytes) -> np.ndarray:
    """The rows [key, byte] with their checksums, in the order of the buckets: [bucket, offset, byte]. Slots without
    a key are zero. The label names the version of the table, and must be the same at both servers."""
    if rows.dtype != np.uint8 or rows.ndim != 2 or len(rows) != layout.num_keys:
        raise UserError(
            f"a table must be uint8 with {layout.num_keys:,} rows, not {rows.dtype} of shape {rows.shape}"
        )
    checked = np.concatenate([rows, _checksums(label, np.arange(len(rows)), rows)], axis=1)
    table = np.empty((layout.num_slots, checked.shape[1]), np.uint8)
    np.take(checked, layout.slots, axis=0, out=table, mode="wrap")  # -1 is a row too, until the next line
    table[layout.slots < 0] = 0
    return table.reshape(layout.num_buckets, layout.size, -1)


def make_query(layout: BucketLayout, keys: np.ndarray, random: Random = os.urandom) -> Query:
    """Ask for the rows of some keys. A query may be sent once: its seed must not be used again."""
    placed = place(layout, keys, random)
    seed = random(BLOCK)
    wanted = np.zeros(layout.num_slots, np.uint8)
    wanted[np.arange(layout.num_buckets) * layout.size + placed.offsets] = 1
    bits = _bits(layout, seed) ^ np.packbits(wanted, bitorder="little")
    return Query(seed, bits.tobytes(), placed)


def answer_first(table: np.ndarray, layout: BucketLayout, to_first: bytes) -> bytes:
    """The first server's answer."""
    _check_length("a query to the first server", to_first, BLOCK)
    return _answer(table, layout, _bits(layout, to_first))


def answer_second(table: np.ndarray, layout: BucketLayout, to_second: bytes) -> bytes:
    """The second server's answer."""
    _check_length("a query to the second server", to_second, query_sizes(layout, 0).to_second)
    return _answer(table, layout, np.array(np.frombuffer(to_second, np.uint8)))  # read-only ones compile anew


def read_rows(
    query: Query, layout: BucketLayout, label: bytes, first: bytes, second: bytes
) -> tuple[np.ndarray, np.ndarray]:
    """The keys that were found, in the order in which they were asked for, and their rows [key, byte]."""
    return _read(query, layout, label, joined(first, second))


def padded(answer: bytes, pad_key: bytes) -> bytes:
    """The second server's answer as the first server may see it: under the key stream of a key that the client
    gave to the second server alone, and that is for this answer alone."""
    return joined(answer, keystream(pad_key, len(answer)).tobytes())


def joined(first: bytes, second: bytes) -> bytes:
    """The xor of two answers. The first server so joins its own to the padded one, and the client gets one."""
    if len(first) != len(second):
        raise UserError(
            f"the two answers have {len(first):,} and {len(second):,} bytes, and must have the same"
        )
    return (np.frombuffer(first, np.uint8) ^ np.frombuffer(second, np.uint8)).tobytes()


def read_joined(
    query: Query, layout: BucketLayout, label: bytes, answer: bytes, pad_key: bytes
) -> tuple[np.ndarray, np.ndarray]:
    """As `read_rows`, from the one answer that the first server joined."""
    return _read(query, layout, label, padded(answer, pad_key))


def _bits(layout: BucketLayout, seed: bytes) -> np.ndarray:
    return keystream(seed, query_sizes(layout, 0).to_second)


def _answer(table: np.ndarray, layout: BucketLayout, bits: np.ndarray) -> bytes:
    if table.shape[:2] != (layout.num_buckets, layout.size):
        raise UserError(
            f"the table has {table.shape[0]} buckets of {table.shape[1]}, and the layout {layout.num_buckets} of "
            f"{layout.size}: make it with bucket_table and this layout"
        )
    out = np.empty((layout.num_buckets, table.shape[2]), np.uint8)
    kernels().scan(table, bits, out)
    return out.tobytes()


def _read(query: Query, layout: BucketLayout, label: bytes, answer: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Every bucket is checked, those without a key of the client too: so whether a client complains says nothing
    about its keys."""
    width, more = divmod(len(answer), layout.num_buckets)
    if more or width < CHECKSUM:
        raise UserError(
            f"an answer has {len(answer):,} bytes, which are not rows for {layout.num_buckets:,} buckets: both "
            f"servers and the client must use the same layout"
        )
    found = np.frombuffer(answer, np.uint8).reshape(layout.num_buckets, width)
    rows, sums = found[:, :-CHECKSUM], found[:, -CHECKSUM:]
    keys = layout.slots[np.arange(layout.num_buckets) * layout.size + query.placed.offsets]
    expected = np.where(keys[:, None] < 0, np.uint8(0), _checksums(label, keys, rows))
    wrong = (expected != sums).any(1)
    if wrong.any():
        raise UserError(
            f"{wrong.sum():,} of {layout.num_buckets:,} rows have a wrong checksum: the two servers have different "
            f"versions of the table, or an answer was damaged. Ask again with a new query"
        )
    return query.placed.keys, rows[query.placed.buckets]


def _checksums(label: bytes, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """BLAKE2s of label, key and row: [row, byte]."""
    base = blake2s(framed(label), digest_size=CHECKSUM)
    numbers = np.asarray(keys, "<i8").reshape(-1, 1).view(np.uint8)
    lines, digests = np.concatenate([numbers, rows], axis=1), []
    for line in lines:
        state = base.copy()
        state.update(line)  # type: ignore[arg-type]  # an array is a buffer
        digests.append(state.digest())
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, CHECKSUM)


def _check_length(what: str, message: bytes, length: int) -> None:
    if len(message) != length:
        raise UserError(
            f"{what} has {len(message):,} bytes, and must have {length:,}: it is of another layout"
        )
