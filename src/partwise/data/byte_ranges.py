"""Which byte ranges of a column are read for some clients: as few requests as is sensible, and few bytes.

A request costs as much as some tens of kilobytes, so ranges that are close together are read as one. Long ranges
are cut, so that many requests share the work and none needs much memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partwise.data.ragged import offsets, owners, ranks

CLOSE_BYTES = 1 << 16  # ranges with at most so much between them are read together
MOST_BYTES = 1 << 22  # about the largest range


class Span(NamedTuple):
    """Consecutive rows that are read together, and which of them are wanted.

    first:  the first row
    last:   the row after the last
    pieces: [n, 3] int64: wanted rows as (first row, number of rows, place of the first among all wanted rows)
    """

    first: int
    last: int
    pieces: np.ndarray


def spans_of(starts: np.ndarray, counts: np.ndarray, row_bytes: int) -> list[Span]:
    """The spans that hold rows `starts[k] : starts[k] + counts[k]` for every k. The wanted rows are placed one k
    after the other. Ranges may overlap, and come in any order."""
    most_rows, close_rows = max(MOST_BYTES // row_bytes, 1), CLOSE_BYTES // row_bytes
    pieces = _pieces(starts, counts, most_rows)
    if not len(pieces):
        return []
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    first, ends = pieces[:, 0], np.maximum.accumulate(pieces[:, 0] + pieces[:, 1])
    apart = np.append(True, first[1:] - ends[:-1] > close_rows)
    begin = first[np.flatnonzero(apart)][np.cumsum(apart) - 1]  # of the pieces that are close together
    turn = (first - begin) // most_rows
    cuts = np.flatnonzero(apart | np.append(True, turn[1:] != turn[:-1]))
    groups = np.split(pieces, cuts[1:])
    return [Span(int(each[0, 0]), int((each[:, 0] + each[:, 1]).max()), each) for each in groups]


def _pieces(starts: np.ndarray, counts: np.ndarray, most_rows: int) -> np.ndarray:
    """Ranges of at most `most_rows` rows, as in `Span.pieces`; empty ones are left out."""
    parts = -(-np.asarray(counts) // most_rows)
    owner, skipped = owners(parts), ranks(parts) * most_rows
    rows = np.minimum(counts[owner] - skipped, most_rows)
    return np.stack([starts[owner] + skipped, rows, offsets(counts)[owner] + skipped], axis=1)
