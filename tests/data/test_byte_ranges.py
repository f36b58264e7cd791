"""Which ranges are read: all that is wanted, little else, and close ones together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from partwise.data import byte_ranges
from partwise.data.byte_ranges import CLOSE_BYTES, MOST_BYTES, spans_of

wanted_rows = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 30)), max_size=12)


def spans(ranges, row_bytes):
    starts, counts = np.array(ranges, np.int64).reshape(-1, 2).T
    return spans_of(starts, counts, row_bytes)


@given(wanted_rows, st.sampled_from([(1, 1), (8, 40), (64, 16)]), st.integers(1, 8))
def test_every_row_comes_to_its_place(ranges, limits, row_bytes):
    with_limits = {"CLOSE_BYTES": limits[0], "MOST_BYTES": limits[1]}
    before = {name: getattr(byte_ranges, name) for name in with_limits}
    vars(byte_ranges).update(with_limits)
    try:
        found = spans(ranges, row_bytes)
    finally:
        vars(byte_ranges).update(before)
    slow = [row for start, count in ranges for row in range(start, start + count)]
    result = np.full(len(slow), -1)
    for span in found:
        rows = np.arange(span.first, span.last)
        for first, count, place in span.pieces:
            result[place : place + count] = rows[first - span.first : first - span.first + count]
        assert {span.first, span.last - 1} <= set(slow)
        longest = max(limits[1] // row_bytes, 1)
        assert span.last - span.first <= 2 * longest  # a piece may begin just before the end
    assert result.tolist() == slow


def test_ranges_that_are_close_are_read_as_one():
    apart = CLOSE_BYTES // 4
    assert [(s.first, s.last) for s in spans([(0, 10), (10 + apart, 5)], 4)] == [(0, 15 + apart)]
    assert [(s.first, s.last) for s in spans([(0, 10), (11 + apart, 5)], 4)] == [
        (0, 10),
        (11 + apart, 16 + apart),
    ]


def test_the_same_rows_twice_are_read_once():
    (span,) = spans([(5, 3), (5, 3), (4, 2)], 4)
    assert (span.first, span.last) == (4, 8)
    assert sorted(map(tuple, span.pieces.tolist())) == [(4, 2, 6), (5, 3, 0), (5, 3, 3)]


def test_long_ranges_are_cut_so_that_many_requests_share_them():
    rows = MOST_BYTES // 4
    found = spans([(7, 3 * rows + 1)], 4)
    assert [span.last - span.first for span in found] == [rows, rows, rows, 1]
    assert spans([(3, 0), (9, 0)], 4) == []
