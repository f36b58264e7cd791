"""Parquet files in object stores. pyarrow reads them by range: what describes them, and the columns that are asked
for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from partwise.data.checks import check_memory
from partwise.data.late_arrow import parquet
from partwise.data.object_store import Place, open_address, patiently, telling
from partwise.types import UserError

TRIES = 5  # how often pyarrow tries a request: it makes those of a table by itself
BUILD = "`partwise store TABLE --client COLUMN --out DIR` (DIR may be an address too)"


def remote_tables(url: str) -> list[Place]:
    """The Parquet file at an address, or those under it, sorted."""
    from pyarrow import fs

    place = open_address(url, TRIES)
    with telling(place.shown):
        found = patiently(lambda: place.system.get_file_info(place.path))
        if found.is_file:
            files = [place]
        else:
            selector = fs.FileSelector(place.path, recursive=True, allow_not_found=True)
            there = patiently(lambda: place.system.get_file_info(selector))
            names = sorted(each.path.removeprefix(f"{place.path}/") for each in there if each.is_file)
            files = [place.of(name) for name in names if name.endswith(".parquet")]
    if not files:
        raise UserError(f"{place.shown} holds no Parquet file, and no client store: check the address")
    if not files[0].name.endswith(".parquet"):
        raise UserError(
            f"{place.shown} is no Parquet file, and other tables are not read from object stores: copy it to this "
            f"machine, and build a store from it with {BUILD}"
        )
    return files


def open_table(place: Place) -> Any:
    """A Parquet file, open for reading."""
    return parquet.ParquetFile(patiently(lambda: place.system.open_input_file(place.path)), pre_buffer=True)


def check_room(files: Sequence[Place], names: Sequence[str]) -> None:
    """Raise `UserError` if these columns of all files do not fit into memory."""
    size = 0
    for file in files:
        with open_table(file) as table:
            about = table.metadata
            groups = (about.row_group(number) for number in range(about.num_row_groups))
            chunks = (group.column(number) for group in groups for number in range(group.num_columns))
            wanted = (each for each in chunks if each.path_in_schema.split(".")[0] in names)
            size += sum(each.total_uncompressed_size for each in wanted)
    check_memory(size, "this table", f"build a store of it, which is read client by client: {BUILD}")
