"""Rows of a table that two servers hold, fetched without telling either server which.

A client asks every bucket for one row. Each server gets bits for all slots that are random by themselves, and that
differ from the other's in one slot of every bucket (`privacy.selection_bits`). It returns, for every bucket, the
xor of the rows whose bit is set. The xor of both answers is the wanted row (Chor, Goldreich, Kushilevitz and Sudan
1995). The two servers together would learn everything.

Messages: what both servers are told, what each alone is told, and answers, which have a row with its checksum for
every bucket. The sizes of all depend on the layout alone.
"""

from __future__ import annotations

import os
from hashlib import blake2s
from typing import NamedTuple

import numpy as np

from partwise.privacy.aes import BLOCK, framed, keystream
from partwise.privacy.bucket_kernels import kernels
from partwise.privacy.buckets import BucketLayout, LayoutShape, Placed, Random, place
from partwise.privacy.selection_bits import way_of
from partwise.types import UserError

CHECKSUM = 8  # bytes of a row's checksum: it is against mistakes, and not against a server that lies


class Query(NamedTuple):
    """What a client asks.

    to_both:   for both servers
    to_first:  for the first server alone
    to_second: for the second server alone
    placed:    what the client keeps for itself
    """

    to_both: bytes
    to_first: bytes
    to_second: bytes
    placed: Placed


class QuerySizes(NamedTuple):
    """Bytes of messages. What is for both servers is sent once: one of them passes it on."""

    to_both: int
    to_first: int
    to_second: int
    answer: int

    @property
    def asked(self) -> int:
        """Of all that is asked."""
        return self.to_both + self.to_first + self.to_second

    @property
    def total(self) -> int:
        """Of the question and both answers."""
        return self.asked + 2 * self.answer

    @property
    def relayed(self) -> int:
        """Of the question, with a key for the pad, and one answer."""
        return self.asked + BLOCK + self.answer


def query_sizes(layout: BucketLayout | LayoutShape, row_bytes: int) -> QuerySizes:
    """What a client sends and receives, whatever its keys."""
    return QuerySizes(*way_of(layout).sizes(layout), layout.num_buckets * (row_bytes + CHECKSUM))


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
    """Ask for the rows of some keys. A query may be sent once: what it draws must not be used again."""
    placed = place(layout, keys, random)
    return Query(*way_of(layout).tell(layout, placed.offsets, random), placed)


def answer_first(table: np.ndarray, layout: BucketLayout, to_both: bytes, to_first: bytes) -> bytes:
    """The first server's answer."""
    sizes = query_sizes(layout, 0)
    _check_length("a query to both servers", to_both, sizes.to_both)
    _check_length("a query to the first server", to_first, sizes.to_first)
    return _answer(table, layout, way_of(layout).bits(layout, to_both, to_first, 0))


def answer_second(table: np.ndarray, layout: BucketLayout, to_both: bytes, to_second: bytes) -> bytes:
    """The second server's answer."""
    sizes = query_sizes(layout, 0)
    _check_length("a query to both servers", to_both, sizes.to_both)
    _check_length("a query to the second server", to_second, sizes.to_second)
    return _answer(table, layout, way_of(layout).bits(layout, to_both, to_second, 1))


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
