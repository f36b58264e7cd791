"""A sum by two servers of which neither sees a client's part: the first collects, the helper has the other half.

A client sends one message, to the first server. Its dense words go under a mask, the key stream of a seed that only
the helper is told. Its rows go as writes to buckets (`privacy.sparse_sum`). What the helper alone may read is
sealed to its key (`privacy.sealing`) and bound to the task and to the rest of the message. To close a round, the
first server sends the helper the public and the sealed parts of all reports that count. The helper returns its
share of their sum, with noise. Neither share alone tells anything. Both together are the sum of the clients' words,
modulo 2^32.

All sizes follow from the agreement alone, whatever a client has. The two servers together would see everything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from partwise.privacy.aes import BLOCK, framed, keystream
from partwise.privacy.buckets import BucketLayout, make_layout
from partwise.privacy.sealing import OVERHEAD, bound_to, seal, unseal
from partwise.privacy.secret_noise import noise_words
from partwise.privacy.sparse_sum import COUNT, NONCE, accumulate, make_write, write_sizes
from partwise.privacy.sum_words import SumWords
from partwise.types import UserError

Random = Callable[[int], bytes]


class TableForm(NamedTuple):
    """A key space: its keys, the most of them that a client has, and what a row has."""

    num_keys: int
    most: int
    num_words: int  # of an update
    row_bytes: int  # of a slice


class Agreement(NamedTuple):
    """What the clients and both servers of a run must have in common. It is public.

    run:         the run's name
    num_dense:   words of the dense part
    num_sums:    how many of these, the last ones, are counts
    tables:      the key spaces
    noise:       standard deviation of the noise that each server adds to every word
    count_noise: the same for counts
    least:       fewest reports of a sum
    """

    run: str
    num_dense: int
    num_sums: int
    tables: Mapping[str, TableForm]
    noise: float = 0.0
    count_noise: float = 0.0
    least: int = 1

    def layout(self, space: str) -> BucketLayout:
        """The buckets of a key space."""
        form = self.tables[space]
        return make_layout(form.num_keys, form.most, framed(self.run.encode(), space.encode()))

    def context(self, version: int, more: str) -> bytes:
        """What something belongs to: this run, a version of the model, and a key space or a task."""
        return framed(self.run.encode(), str(version).encode(), more.encode())

    def to_json(self) -> str:
        """The agreement as text."""
        return json.dumps(
            self._asdict() | {"tables": {name: each._asdict() for name, each in self.tables.items()}}
        )


def read_agreement(text: str | bytes) -> Agreement:
    """The inverse of `Agreement.to_json`."""
    try:
        found = json.loads(text)
        tables = {str(name): TableForm(**each) for name, each in found.pop("tables").items()}
        read = Agreement(**found, tables=tables)
        numbers = [read.num_dense, read.num_sums, read.least, *(n for each in tables.values() for n in each)]
        good = isinstance(read.run, str) and all(type(n) is int and 0 <= n < 2**40 for n in numbers)
        if not good or not (float(read.noise) >= 0 and float(read.count_noise) >= 0):
            raise ValueError("a value has a wrong type or is out of range")
        return read
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(f"this is no agreement of two servers: {error}") from None


class Parts(NamedTuple):
    """A client's message for a task: what both servers get, what the first one keeps, and the helper's box."""

    task: str
    masked: np.ndarray  # uint32 [num_dense]
    writes: Mapping[str, bytes]  # space -> the public part of its write
    roots: Mapping[str, bytes]  # space -> the first server's roots
    sealed: bytes


class ForHelper(NamedTuple):
    """What the helper is sent of a report: no more than it needs."""

    task: str
    digest: bytes  # of the masked words, which it does not get
    writes: Mapping[str, bytes]
    sealed: bytes


def make_parts(
    agreement: Agreement,
    helper_key: bytes,
    version: int,
    task: str,
    words: SumWords,
    keys: Mapping[str, np.ndarray],
    random: Random = os.urandom,
) -> Parts:
    """A client's message. `words` are its own, its tables with a row for each of its keys."""
    seed, nonce = random(BLOCK), _nonce(task)
    writes, roots, theirs = {}, {}, [seed]
    for space in agreement.tables:
        context = agreement.context(version, space)
        write, _ = make_write(
            agreement.layout(space), keys[space], words.tables[space], context, nonce, random
        )
        writes[space], roots[space] = write.public, write.first
        theirs.append(write.second)
    masked = words.dense + _mask(seed, agreement.num_dense)
    told = _associated(agreement, version, task, _digest(masked), writes)
    return Parts(task, masked, writes, roots, seal(helper_key, b"".join(theirs), told))


def for_helper(parts: Parts) -> ForHelper:
    """What the helper is sent of a report."""
    return ForHelper(parts.task, _digest(parts.masked), parts.writes, parts.sealed)


def first_share(agreement: Agreement, version: int, reports: Sequence[Parts]) -> SumWords:
    """The first server's share of a sum. Its counts of a row's writers are not part of it."""
    dense = np.zeros(agreement.num_dense, np.uint32)
    for parts in reports:
        dense += parts.masked
    writes = lambda space: [
        (_nonce(parts.task), parts.writes[space], parts.roots[space]) for parts in reports
    ]
    return SumWords(dense, _tables(agreement, version, writes, 0))


def helper_share(
    agreement: Agreement, private_key: bytes, version: int, reports: Iterable[ForHelper]
) -> tuple[SumWords, list[int]]:
    """The helper's share of a sum, and the places of the reports that it cannot read, which nobody counts."""
    dense, roots, good, refused = np.zeros(agreement.num_dense, np.uint32), [], [], []
    for place, report in enumerate(reports):
        try:
            seed, *theirs = _opened(agreement, private_key, version, report)
        except UserError:
            refused.append(place)
            continue
        dense -= _mask(seed, agreement.num_dense)
        roots.append(dict(zip(agreement.tables, theirs, strict=True)))
        good.append(report)
    writes = lambda space: [
        (_nonce(report.task), report.writes[space], mine[space])
        for report, mine in zip(good, roots, strict=True)
    ]
    return SumWords(dense, _tables(agreement, version, writes, 1)), refused


def with_noise(agreement: Agreement, share: SumWords, random: Random = os.urandom) -> SumWords:
    """A share with this server's noise in every word: in rows that nobody wrote to as well."""
    counts = agreement.num_sums
    dense = share.dense + np.concatenate(
        [
            noise_words((agreement.num_dense - counts,), agreement.noise, random),
            noise_words((counts,), agreement.count_noise, random),
        ]
    )
    tables = {
        space: rows + noise_words(rows.shape, agreement.noise, random) for space, rows in share.tables.items()
    }
    return SumWords(dense, tables)


def sealed_size(agreement: Agreement) -> int:
    """Bytes of the helper's box."""
    return OVERHEAD + BLOCK + sum(_sizes(agreement, space).roots for space in agreement.tables)


def _tables(
    agreement: Agreement, version: int, writes: Callable[[str], Any], party: int
) -> dict[str, np.ndarray]:
    """The shares of all tables, without the counts of writers: those have no noise, so they stay unopened."""
    tables = {}
    for space, form in agreement.tables.items():
        context = agreement.context(version, space)
        share = accumulate(agreement.layout(space), form.num_words, context, writes(space), party)
        tables[space] = np.ascontiguousarray(share[:, :-COUNT])
    return tables


def _opened(agreement: Agreement, private_key: bytes, version: int, report: ForHelper) -> list[bytes]:
    """The seed, and the roots of every space."""
    for space in agreement.tables:
        if len(report.writes[space]) != _sizes(agreement, space).public:
            raise UserError(f"a write to '{space}' has {len(report.writes[space]):,} bytes")
    told = _associated(agreement, version, report.task, report.digest, report.writes)
    box = unseal(private_key, report.sealed, told)
    ends = np.cumsum([BLOCK, *(_sizes(agreement, space).roots for space in agreement.tables)])
    if len(box) != ends[-1]:
        raise UserError(f"a box has {len(box):,} bytes in it, and must have {ends[-1]:,}")
    return [box[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _sizes(agreement: Agreement, space: str) -> Any:
    return write_sizes(agreement.layout(space), agreement.tables[space].num_words)


def _associated(
    agreement: Agreement, version: int, task: str, digest: bytes, writes: Mapping[str, bytes]
) -> bytes:
    public = framed(digest, *(writes[space] for space in agreement.tables))
    return bound_to(agreement.context(version, task), _nonce(task), public)


def _nonce(task: str) -> bytes:
    """Tasks have names that occur once, so no two writes have the same nonce, whatever a device sends."""
    return blake2b(task.encode(), digest_size=NONCE).digest()


def _digest(masked: np.ndarray) -> bytes:
    return blake2b(masked.tobytes(), digest_size=32).digest()


def _mask(seed: bytes, num_words: int) -> np.ndarray:
    return keystream(seed, 4 * num_words).view("<u4")
