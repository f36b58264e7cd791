"""Columns that grow, on disk or in memory, while their length is not yet known."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.types import UserError

CHUNK_BYTES = 1 << 23
BYTES_AT_ONCE = 1 << 26


class Layout(NamedTuple):
    """The type of one column: numpy dtype and the shape of one row."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


def layouts_of(columns: Mapping[str, np.ndarray]) -> dict[str, Layout]:
    return {name: Layout(values.dtype, values.shape[1:]) for name, values in columns.items()}


def rows_at_once(layouts: Mapping[str, Layout], most: int) -> int:
    """At most `most` rows; fewer if rows are so wide (images) that they would fill the memory."""
    row_bytes = sum(layout.row_bytes for layout in layouts.values())
    return max(1, min(most, BYTES_AT_ONCE // max(row_bytes, 1)))


class Spool:
    """Columns that grow on disk, one raw file each, until their length is known."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.layouts: dict[str, Layout] = {}
        self.num_rows = 0
        self._files: dict[str, Any] = {}

    def append(self, columns: Mapping[str, np.ndarray]) -> None:
        layouts = layouts_of(columns)
        if not self._files:
            self.layouts = layouts
            self._files = {name: self._path(k).open("wb") for k, name in enumerate(layouts)}
        _check_same(layouts, self.layouts, self.num_rows)
        for name, values in columns.items():
            np.ascontiguousarray(values).tofile(self._files[name])
        self.num_rows += len(next(iter(columns.values())))

    def discard(self) -> None:
        self.close()
        for index in range(len(self.layouts)):
            self._path(index).unlink()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def read(self, name: str, first: int, last: int) -> np.ndarray:
        """These rows of a column."""
        layout = self.layouts[name]
        count = (last - first) * layout.row_bytes // layout.dtype.itemsize
        values = np.fromfile(self._flushed(name), layout.dtype, count, offset=first * layout.row_bytes)
        return values.reshape(-1, *layout.shape)

    def copy(self, name: str, path: Path, place: int) -> None:
        """Write the whole column into an existing file, starting at byte `place`, without holding it in
        memory."""
        with self._flushed(name).open("rb") as source, path.open("r+b") as target:
            target.seek(place)
            shutil.copyfileobj(source, target, CHUNK_BYTES)

    def _flushed(self, name: str) -> Path:
        self._files[name].flush()
        return self._path(list(self.layouts).index(name))

    def _path(self, index: int) -> Path:
        return self.folder / f"spool-{index}.raw"


class Pile:
    """Columns that grow in memory. Their bytes grow in place, so that no parts need to be joined at the end."""

    def __init__(self):
        self.layouts: dict[str, Layout] = {}
        self.num_rows = 0
        self._bytes: dict[str, bytearray] = {}

    def append(self, columns: Mapping[str, np.ndarray]) -> None:
        layouts = layouts_of(columns)
        if not self._bytes:
            self.layouts = layouts
            self._bytes = {name: bytearray() for name in layouts}
        _check_same(layouts, self.layouts, self.num_rows)
        for name, values in columns.items():
            self._bytes[name] += np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        self.num_rows += len(next(iter(columns.values())))

    def columns(self) -> dict[str, np.ndarray]:
        """The columns, not copied. After this call, nothing can be appended."""
        return {
            name: np.frombuffer(held, self.layouts[name].dtype).reshape(-1, *self.layouts[name].shape)
            for name, held in self._bytes.items()
        }


def _check_same(layouts: Mapping[str, Layout], before: Mapping[str, Layout], num_rows: int) -> None:
    if layouts != before:
        raise UserError(
            f"the rows from {num_rows} on have columns {_words(layouts)}, those before {_words(before)}: "
            "give every batch the same columns and types"
        )


def _words(layouts: Mapping[str, Layout]) -> str:
    return ", ".join(f"{name} {layout.dtype}{list(layout.shape) or ''}" for name, layout in layouts.items())
