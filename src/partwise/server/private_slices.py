"""Slices that two servers send together, so that neither learns of which keys (`privacy.retrieval`).

    private  client -> first server    #both:SPACE what both servers are told, #first:SPACE what the first one is,
                                       #sealed what only the helper can open
    slices   first server -> client    leaves that are not keyed, and #joined:SPACE both servers' answers, joined

The first server passes on what is for both, to which the box is bound. The helper's answer passes the first server
under a pad that the client chose. The sizes of all messages follow from the agreement alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from partwise.model.partition import Partition
from partwise.privacy.aes import BLOCK, framed
from partwise.privacy.retrieval import (
    Query,
    answer_first,
    answer_second,
    bucket_table,
    joined,
    make_query,
    padded,
    query_sizes,
    read_joined,
)
from partwise.privacy.sealing import OVERHEAD, seal, unseal
from partwise.privacy.two_servers import Agreement
from partwise.server.messages import (
    LARGEST_HEADER,
    About,
    Shapes,
    Slices,
    check_arrays,
    decode_rows,
    encode_rows,
    key_data,
    open_message,
    read_slices_header,
    rows_shapes,
    write_message,
)
from partwise.types import UserError

BOTH, FIRST, SEALED, JOINED = "#both:", "#first:", "#sealed", "#joined:"


class PrivateQuestion(NamedTuple):
    """What a client asks, and what it needs to read the answer."""

    message: bytes
    queries: Mapping[str, Query]
    pads: Mapping[str, bytes]


class SlicesAsked(NamedTuple):
    """A question as the first server reads it.

    to_both:  space -> what both servers are told
    to_first: space -> what the first one is told
    sealed:   the helper's box
    """

    to_both: Mapping[str, bytes]
    to_first: Mapping[str, bytes]
    sealed: bytes

    @property
    def public(self) -> bytes:
        """What the helper is sent beside the box."""
        return b"".join(self.to_both.values())


Tables = Mapping[str, np.ndarray]  # space -> its rows in buckets


def row_bytes(partition: Partition, space: str) -> int:
    """Bytes of a key's slice."""
    parts = (rows_shapes(partition, path, 1) for path in partition.spaces[space])
    return sum(each.size * each.dtype.itemsize for shapes in parts for each in shapes.values())


def plain_rows(partition: Partition, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The slices of all keys as bytes: space -> uint8 [keys, bytes]."""
    rows = {}
    for space, paths in partition.spaces.items():
        every = np.arange(partition.num_keys(space))
        parts = [
            np.ascontiguousarray(part).reshape(len(every), -1).view(np.uint8)
            for path in paths
            for part in encode_rows(partition, path, params[path], every).values()
        ]
        rows[space] = np.concatenate(parts, axis=1)
    return rows


def bucketed(agreement: Agreement, version: int, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows of a version, in buckets. Both servers make the same of the same rows."""
    return {
        space: bucket_table(agreement.layout(space), each, agreement.context(version, space))
        for space, each in rows.items()
    }


def ask_privately(
    agreement: Agreement, helper_key: bytes, belongs: About, keys: Mapping[str, np.ndarray]
) -> PrivateQuestion:
    """Ask for the slices of keys. Every message has randomness of its own, and may be sent once."""
    queries = {space: make_query(agreement.layout(space), keys[space]) for space in agreement.tables}
    pads = {space: os.urandom(BLOCK) for space in queries}
    box = b"".join(pads[space] + query.to_second for space, query in queries.items())
    public = b"".join(query.to_both for query in queries.values())
    arrays = {BOTH + space: np.frombuffer(query.to_both, np.uint8) for space, query in queries.items()}
    arrays |= {FIRST + space: np.frombuffer(query.to_first, np.uint8) for space, query in queries.items()}
    sealed = seal(helper_key, box, _bound(agreement, belongs.version, belongs.task, public))
    arrays[SEALED] = np.frombuffer(sealed, np.uint8)
    return PrivateQuestion(write_message("private", belongs, arrays, {}), queries, pads)


def largest_question(agreement: Agreement) -> int:
    """The most bytes that such a message has."""
    return LARGEST_HEADER + sum(each.size for each in _asked_shapes(agreement).values())


def read_question(agreement: Agreement, message: bytes) -> SlicesAsked:
    """A client's question."""
    if len(message) > largest_question(agreement):
        raise UserError(f"a question of {len(message):,} bytes is too large")
    arrays, _ = open_message("private", message)
    check_arrays("question", arrays, _asked_shapes(agreement))
    told = lambda kind: {space: arrays[kind + space].tobytes() for space in agreement.tables}
    return SlicesAsked(told(BOTH), told(FIRST), arrays[SEALED].tobytes())


def helper_answer(
    agreement: Agreement,
    private_key: bytes,
    tables: Tables,
    version: int,
    task: str,
    public: bytes,
    sealed: bytes,
) -> bytes:
    """The helper's answers of all spaces, one after the other, each under its pad."""
    box = unseal(private_key, sealed, _bound(agreement, version, task, public))
    sizes = {space: query_sizes(agreement.layout(space), 0) for space in agreement.tables}
    told = _cut(public, [each.to_both for each in sizes.values()])
    mine = _cut(box, [BLOCK + each.to_second for each in sizes.values()])
    answers = []
    for space, to_both, secret in zip(sizes, told, mine, strict=True):
        answer = answer_second(tables[space], agreement.layout(space), to_both, secret[BLOCK:])
        answers.append(padded(answer, secret[:BLOCK]))
    return b"".join(answers)


def _cut(message: bytes, lengths: Sequence[int]) -> list[bytes]:
    """The parts of a message, which have these lengths."""
    ends = [sum(lengths[: place + 1]) for place in range(len(lengths))]
    if len(message) != sum(lengths):
        raise UserError(f"a question has a part of {len(message):,} bytes, and must have {sum(lengths):,}")
    return [message[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def write_joined(
    agreement: Agreement,
    partition: Partition,
    params: Mapping[str, Any],
    tables: Tables,
    asked: SlicesAsked,
    theirs: bytes,
    rng: Any,
    belongs: About,
) -> bytes:
    """The first server's message: its own answers joined with the helper's, and all leaves that are not keyed."""
    unsent, at = (*partition.of("keyed"), *partition.there), 0
    arrays = {path: np.asarray(leaf) for path, leaf in params.items() if path not in unsent}
    for space, to_first in asked.to_first.items():
        mine = answer_first(tables[space], agreement.layout(space), asked.to_both[space], to_first)
        arrays[JOINED + space] = np.frombuffer(joined(mine, theirs[at : at + len(mine)]), np.uint8)
        at += len(mine)
    return write_message("slices", belongs, arrays, {"rng": key_data(rng).tolist()})


def read_privately(
    agreement: Agreement,
    partition: Partition,
    belongs: About,
    message: bytes,
    asking: PrivateQuestion,
    keys: Mapping[str, np.ndarray],
) -> Slices:
    """The slices of the keys, from what the first server sent. A key that found no bucket has a row of zeros."""
    shapes = _answered_shapes(agreement, partition)
    if len(message) > LARGEST_HEADER + sum(each.size * each.dtype.itemsize for each in shapes.values()):
        raise UserError(f"slices of {len(message):,} bytes are too large")
    arrays, header = open_message("slices", message)
    told = read_slices_header(partition, header)
    if told.about != belongs:
        raise UserError("the slices are of another task")
    check_arrays("slices", arrays, shapes)
    parts = {path: leaf for path, leaf in arrays.items() if not path.startswith(JOINED)}
    for space, query in asking.queries.items():
        label = agreement.context(belongs.version, space)
        found, rows = read_joined(
            query, agreement.layout(space), label, arrays[JOINED + space].tobytes(), asking.pads[space]
        )
        whole = np.zeros((len(keys[space]), rows.shape[1]), np.uint8)
        whole[np.searchsorted(keys[space], found)] = rows
        parts |= _split(partition, space, whole)
    return told._replace(params=decode_rows(partition, parts))


def _split(partition: Partition, space: str, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of bytes as the arrays that `plain_rows` made them of."""
    parts, at = {}, 0
    for path in partition.spaces[space]:
        for name, like in rows_shapes(partition, path, len(rows)).items():
            width = int(np.prod(like.shape[1:], dtype=int)) * like.dtype.itemsize
            part = np.ascontiguousarray(rows[:, at : at + width])
            parts[name], at = part.view(like.dtype).reshape(like.shape), at + width
    return parts


def _asked_shapes(agreement: Agreement) -> Shapes:
    shapes, sealed = {}, OVERHEAD
    for space in agreement.tables:
        sizes = query_sizes(agreement.layout(space), 0)
        shapes[BOTH + space] = jax.ShapeDtypeStruct((sizes.to_both,), np.uint8)
        shapes[FIRST + space] = jax.ShapeDtypeStruct((sizes.to_first,), np.uint8)
        sealed += BLOCK + sizes.to_second
    return shapes | {SEALED: jax.ShapeDtypeStruct((sealed,), np.uint8)}


def _answered_shapes(agreement: Agreement, partition: Partition) -> Shapes:
    unsent = (*partition.of("keyed"), *partition.there)
    shapes = {path: leaf for path, leaf in partition.server_shapes.items() if path not in unsent}
    for space, form in agreement.tables.items():
        answer = query_sizes(agreement.layout(space), form.row_bytes).answer
        shapes[JOINED + space] = jax.ShapeDtypeStruct((answer,), np.uint8)
    return shapes


def _bound(agreement: Agreement, version: int, task: str, public: bytes) -> bytes:
    """What a box is bound to."""
    return framed(agreement.context(version, f"slices of {task}"), public)
