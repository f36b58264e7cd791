"""CSV, Parquet and Arrow tables as stores, streamed."""

from __future__ import annotations

import csv
import datetime
import gzip
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from partwise.data.batches import to_columns
from partwise.data.checks import check_known, clean_columns
from partwise.data.rows import gather_batches
from partwise.data.store import ClientStore
from partwise.types import UserError

DELIMITERS = {".csv": ",", ".tsv": "\t"}
ARROW = (".arrow", ".feather")  # Arrow's file format (Feather version 2 is that), or its streaming format
BLOCK_BYTES = 1 << 23


def read_table(
    path: str | Path,
    client: str | None,
    columns: Sequence[str] | None = None,
    ids: Sequence[str] = (),
    out: str | Path | None = None,
    order_by: str | None = None,
) -> ClientStore:
    """Read a .csv or .tsv (also .gz), a .parquet, .arrow or .feather file, or a folder of .parquet files: into
    memory, or into folder `out`.

    Rows may be in any order; with `client` None they are all one client's. `columns` are those to keep (all, if
    not given); those in `ids` become keys.
    Dates become whole numbers in their own unit.
    """
    path = Path(path)
    files = _files(path)
    names = _names(files[0])
    kept = [name for name in (columns if columns is not None else names) if name != client]
    kept += [name for name in (*ids, order_by) if name and name not in kept]
    check_known([*([client] if client else []), *kept], names)
    kind = _kind(files[0])
    read = _read_csv if kind in DELIMITERS else _read_arrow if kind in ARROW else _read_parquet
    batches = (batch for file in files for batch in _checked(read, file, client, kept, tuple(ids)))
    info = {"source": str(path)}
    return gather_batches(batches, client, ids, out, order_by, info)


def _kind(file: Path) -> str:
    return Path(file.name.lower().removesuffix(".gz")).suffix


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(
            f"{path} does not exist: give a .csv, .tsv, .parquet, .arrow or .feather file, or a folder of .parquet "
            f"files"
        )
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise UserError(
            f"the folder {path} holds no .parquet file: give a folder of Parquet files, or one .csv file"
        )
    if _kind(files[0]) not in (*DELIMITERS, *ARROW, ".parquet"):
        raise UserError(
            f"{path} is neither .csv, .tsv, .parquet, .arrow nor .feather: convert it, or give its rows to "
            f"read_rows"
        )
    return files


def _names(file: Path) -> list[str]:
    try:
        if _kind(file) == ".parquet":
            return pyarrow.parquet.read_schema(file).names
        if _kind(file) in ARROW:
            with _open_arrow(file) as reader:
                return reader.schema.names
        with _open_text(file) as text:
            names = next(csv.reader(text, delimiter=DELIMITERS[_kind(file)]), [])
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error}): is it a whole {_kind(file)} file?") from error
    if not names or len(set(names)) < len(names):
        raise UserError(
            f"{file}, line 1: {','.join(names)!r}; expected a header with one distinct name per column"
        )
    other = next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), None)
    if other:
        raise UserError(
            f"{file}, line 1: {names[0]!r} is a single name, with {other!r} in it. A .csv file has commas between "
            f"its columns, a .tsv file tabs: write it with commas, or rename it"
        )
    return names


def _checked(
    read: Callable[[Path, list[str], tuple[str, ...]], Iterator[pa.RecordBatch]],
    file: Path,
    client: str | None,
    kept: list[str],
    ids: tuple[str, ...],
) -> Iterator[dict[str, np.ndarray]]:
    """The file's batches; whatever is wrong with one is said with the file's name and, for text, the line."""
    first_row, names = 0, [*([client] if client else []), *kept]
    ids_and_client = (client, *ids) if client else ids
    try:
        for batch in read(file, names, ids_and_client):
            columns = to_columns(batch, first_row)
            owner = columns[client] if client else np.zeros(batch.num_rows, np.int64)
            clean_columns(owner, {name: columns[name] for name in kept}, ids, first_row)
            yield columns
            first_row += batch.num_rows
    except (UserError, pa.ArrowException, OSError) as error:
        found = _bad_cell(file, names, ids_and_client) if _kind(file) in DELIMITERS else None
        raise found or UserError(f"{file}: {error}") from error


def _read_parquet(file: Path, names: list[str], ids: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    with pyarrow.parquet.ParquetFile(file) as source:
        check_known(names, source.schema_arrow.names)
        yield from source.iter_batches(columns=names)


def _open_arrow(file: Path) -> pyarrow.ipc.RecordBatchFileReader | pyarrow.ipc.RecordBatchStreamReader:
    source = pa.memory_map(str(file))
    try:
        return pyarrow.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        return pyarrow.ipc.open_stream(source)


def _read_arrow(file: Path, names: list[str], ids: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    with _open_arrow(file) as reader:
        if isinstance(reader, pyarrow.ipc.RecordBatchStreamReader):
            yield from (batch.select(names) for batch in reader)
        else:
            yield from (reader.get_batch(i).select(names) for i in range(reader.num_record_batches))


def _read_csv(file: Path, names: list[str], ids: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """Two passes: the first finds types that hold for every line, not only for the first block."""
    types: dict[str, pa.DataType] = {}
    while True:
        try:
            for _ in _stream_csv(file, names, types):
                pass
            break
        except pa.ArrowInvalid as error:
            column = re.match(r"In CSV column #(\d+)", str(error))
            name = _names(file)[int(column[1])] if column else None
            if name is None or name in types:
                raise
            types[name] = pa.string() if name in ids else pa.float64()
    yield from _stream_csv(file, names, types)


def _stream_csv(file: Path, names: list[str], types: dict[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
    options = pyarrow.csv.ConvertOptions(include_columns=names, column_types=types)
    parse = pyarrow.csv.ParseOptions(delimiter=DELIMITERS[_kind(file)], newlines_in_values=True)
    read = pyarrow.csv.ReadOptions(block_size=BLOCK_BYTES)
    with pyarrow.csv.open_csv(
        file, read_options=read, parse_options=parse, convert_options=options
    ) as reader:
        yield from reader


def _bad_cell(file: Path, names: list[str], ids: tuple[str, ...]) -> UserError | None:
    """Read line by line, only to say what is wrong where."""
    with _open_text(file, "surrogateescape") as text:
        reader = csv.reader(text, delimiter=DELIMITERS[_kind(file)])
        header = next(reader)
        for cells in filter(None, reader):
            where = f"{file}, line {reader.line_num}"
            if len(cells) != len(header):
                return UserError(
                    f"{where}: {len(cells)} fields, expected {len(header)} ({', '.join(header)})"
                )
            for name in names:
                cell = cells[header.index(name)]
                if not (cell and _is_utf8(cell) if name in ids else _is_number(cell)):
                    number = f"a finite number (or name it in ids=('{name}',))"
                    expected = number if name not in ids else "text in UTF-8" if cell else "an id"
                    return UserError(
                        f"{where}, column '{name}': {cell!r}; expected {expected}. "
                        "Mend or remove the line, or leave the column out with columns="
                    )
    return None


def _is_utf8(cell: str) -> bool:
    """Whether nothing of the cell had to be escaped when it was read."""
    try:
        cell.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return _is_date(cell)


def _is_date(cell: str) -> bool:
    try:
        datetime.datetime.fromisoformat(cell)
    except ValueError:
        return False
    return True


def _open_text(file: Path, errors: str = "replace") -> TextIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", newline="", encoding="utf-8-sig", errors=errors)
    return file.open(newline="", encoding="utf-8-sig", errors=errors)
