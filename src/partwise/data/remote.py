"""Columns that stay in an object store: the rows of some clients are read by range, by many threads at a time.

A file may not change while it is read. Its mark (size and entity tag) is taken when it is opened, and compared
after every reading, so that no caller gets rows of two versions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from partwise.data.byte_ranges import MOST_BYTES, Span, spans_of
from partwise.data.checks import check_memory
from partwise.data.object_store import CONNECTIONS, Place, patiently, telling
from partwise.types import UserError

Range = tuple[int, int]  # the first byte, and how many
UNCHANGED = "a store must stay as it is while it is used: write a new one under another name"
WHOLE = "the store was not copied completely; copy it again"


class RemoteFile:
    """A file of an object store, open for reading by range."""

    def __init__(self, place: Place, size: int):
        self.place = place
        with telling(place.shown):
            self._file = patiently(self._opened)
        if self._file.size() != size:
            raise UserError(
                f"{place.shown} has {self._file.size():,} bytes, and its store.json says {size:,}: {WHOLE}"
            )
        self._size, self._mark = size, _mark(self._file)
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="partwise-read")

    def read(self, ranges: Sequence[Range], put: Callable[[int, bytes], None]) -> None:
        """Read these ranges, many at a time, and call `put(number of the range, its bytes)` for each, in any
        order and in several threads."""

        def each(number: int) -> None:
            put(number, self._read(*ranges[number]))

        waiting = [self._threads.submit(each, number) for number in range(len(ranges))]
        try:
            with telling(self.place.shown):
                for done in waiting:
                    done.result()
                if waiting:
                    patiently(self._check_same)
        finally:
            for rest in waiting:
                rest.cancel()

    def read_all(self) -> bytearray:
        """The whole file."""
        ranges = [(at, min(MOST_BYTES, self._size - at)) for at in range(0, self._size, MOST_BYTES)]
        result = bytearray(self._size)

        def put(number: int, data: bytes) -> None:
            at, size = ranges[number]
            result[at : at + size] = data

        self.read(ranges, put)
        return result

    def _opened(self) -> Any:
        return self.place.system.open_input_file(self.place.path)

    def _read(self, first: int, size: int) -> bytes:
        def once() -> bytes:
            try:
                data = self._file.read_at(size, first)
            except OSError:
                self._check_same()  # may know better: pyarrow hides why a small range cannot be read
                raise
            if len(data) != size:
                raise OSError(f"{len(data):,} bytes came, and {size:,} were asked for")
            return data

        return patiently(once)

    def _check_same(self) -> None:
        with self._opened() as now:
            if _mark(now) != self._mark:
                raise UserError(f"{self.place.shown} has changed while it was read: {UNCHANGED}")


def _mark(file: Any) -> tuple[int, Any]:
    """What differs between two versions of a file: its size, and its entity tag where there are such."""
    return file.size(), (file.metadata() or {}).get("ETag")


@dataclasses.dataclass(frozen=True, eq=False)
class RemoteColumn:
    """A column in an object store. It has the form of an array; its rows are arrays once they are read."""

    file: RemoteFile
    offset: int  # of its first row in the file
    dtype: np.dtype
    shape: tuple[int, ...]

    # NumPy would otherwise read row after row
    __iter__ = None

    def __array__(self, *args: Any, **options: Any) -> np.ndarray:
        raise UserError(f"a column of {self.file.place.shown} is read only for some clients: gather() them")

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Consecutive rows, read now."""
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise UserError(
                f"of {self.file.place.shown} only consecutive rows are read: gather() clients first"
            )
        first, last, _ = rows.indices(len(self))
        return read_columns({"": self}, np.array([first]), np.array([max(last - first, 0)]))[""]


def read_columns(
    columns: Mapping[str, RemoteColumn], starts: np.ndarray, counts: np.ndarray
) -> dict[str, np.ndarray]:
    """Rows `starts[k] : starts[k] + counts[k]` for every k, one after the other, of columns of one file. All
    requests are made together."""
    num_rows = int(counts.sum())
    size = num_rows * sum(column.row_bytes for column in columns.values())
    check_memory(
        size, f"{num_rows:,} rows", "read fewer clients (--set 'data.order=as is' reads those of a round)"
    )
    results = {name: np.empty((num_rows, *c.shape[1:]), c.dtype) for name, c in columns.items()}
    jobs = [
        (name, span)
        for name, column in columns.items()
        for span in spans_of(starts, counts, column.row_bytes)
    ]

    def put(number: int, data: bytes) -> None:
        name, span = jobs[number]
        column = columns[name]
        _place(results[name], np.frombuffer(data, column.dtype).reshape(-1, *column.shape[1:]), span)

    if jobs:
        next(iter(columns.values())).file.read([_range(columns[name], span) for name, span in jobs], put)
    return results


def _range(column: RemoteColumn, span: Span) -> Range:
    return column.offset + span.first * column.row_bytes, (span.last - span.first) * column.row_bytes


def _place(result: np.ndarray, rows: np.ndarray, span: Span) -> None:
    """Copy the wanted rows of a span to their places."""
    for first, count, place in (span.pieces - [span.first, 0, 0]).tolist():
        result[place : place + count] = rows[first : first + count]
