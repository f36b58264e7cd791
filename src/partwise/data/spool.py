"""Columns that grow on disk while their length is not yet known."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.types import UserError

CHUNK_BYTES = 1 << 23


class Layout(NamedTuple):
    """The type of one column: numpy dtype and the shape of one row."""

    dtype: np.dtype
    shape: tuple[int, ...]


class Spool:
    """Columns that grow on disk, one raw file each, until their length is known."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.layouts: dict[str, Layout] = {}
        self.num_rows = 0
        self._files: dict[str, Any] = {}

    def append(self, columns: Mapping[str, np.ndarray]) -> None:
        layouts = {name: Layout(values.dtype, values.shape[1:]) for name, values in columns.items()}
        if not self._files:
            self.layouts = layouts
            self._files = {name: self._path(k).open("wb") for k, name in enumerate(layouts)}
        if layouts != self.layouts:
            raise UserError(
                f"the rows from {self.num_rows} on have columns {_words(layouts)}, those before "
                f"{_words(self.layouts)}: give every batch the same columns and types"
            )
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
        dtype, shape = self.layouts[name]
        width = int(np.prod(shape, dtype=np.int64))
        place, count = first * width * dtype.itemsize, (last - first) * width
        return np.fromfile(self._flushed(name), dtype, count, offset=place).reshape(-1, *shape)

    def copy(self, name: str, path: Path, place: int) -> None:
        """Write the whole column into an existing file from byte `place` on, without holding it in memory."""
        with self._flushed(name).open("rb") as source, path.open("r+b") as target:
            target.seek(place)
            shutil.copyfileobj(source, target, CHUNK_BYTES)

    def _flushed(self, name: str) -> Path:
        self._files[name].flush()
        return self._path(list(self.layouts).index(name))

    def _path(self, index: int) -> Path:
        return self.folder / f"spool-{index}.raw"


def _words(layouts: Mapping[str, Layout]) -> str:
    return ", ".join(f"{name} {layout.dtype}{list(layout.shape) or ''}" for name, layout in layouts.items())
