"""CSV, Parquet and Arrow tables as stores, streamed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from partwise.data.arrow import holds_lists
from partwise.data.checks import Column, check_known
from partwise.data.delimited import (
    AS_UTF8,
    DELIMITERS,
    UTF8,
    Dialect,
    dialect_of,
    find_bad_cell,
    find_not_text,
    read_header,
    stream_delimited,
)
from partwise.data.late_arrow import ipc, kinds, pa, parquet
from partwise.data.object_store import Place, is_address, shown_place
from partwise.data.reading import existing, naming, read_errors, reading, regular
from partwise.data.remote_tables import check_room, open_table, remote_tables
from partwise.data.row_batches import Missing, Wanted, cleaned, whole_rows
from partwise.data.rows import IdNames, gather_batches, kept_columns, plan_columns, warn_of_skipped
from partwise.data.store import ClientStore
from partwise.types import UserError, counted

File = Path | Place
ARROW = (".arrow", ".feather")  # Arrow's file format (Feather version 2 is that), or its streaming format
EXPECTED = "give a .csv, .tsv, .parquet, .arrow or .feather file, or a folder of .parquet files"

HEADER = "the first line of the file must name its columns"


def read_table(
    path: str | Path,
    client: str | None,
    columns: Sequence[str] | None = None,
    ids: IdNames = (),
    out: str | Path | None = None,
    order_by: str | None = None,
    lists: Mapping[str, int] | None = None,
    delimiter: str | None = None,
    encoding: str = UTF8,
    missing: Missing = "refuse",
) -> ClientStore:
    """Read a table, in any order of rows, into a store.

    Args:
        path: A .csv or .tsv file (also .gz), a .parquet, .arrow or .feather file, or a folder of .parquet
            files. Parquet may also be in an object store: `s3://BUCKET/PATH?region=REGION`.
        client: The column that names the client of a row; None if all rows belong to one client.
        columns: The columns to keep (default: all).
        ids: Columns whose values are ids. They become keys 0, 1, 2, ... If it is a mapping, columns with the
            same name on the right share their keys: ids={"past": "item", "next": "item"}.
        out: A folder, or an address in an object store, to which the store is written; memory then does not grow
            with the rows. By default the store is in memory.
        order_by: A column by which each client's rows are sorted.
        lists: For lists of ids of different lengths: {"past": 20} keeps the last 20 and pads with -1.
        delimiter: The delimiter of .csv and .tsv files, if it is not comma and tab.
        encoding: The encoding of .csv and .tsv files.
        missing: "skip" leaves out rows with an empty cell in a column that is read, and warns with their number. By
            default they are refused.

    Returns:
        The store. Dates and times in it are whole numbers, in nanoseconds.
    """
    files = _files(path)
    dialect = _dialect(files[0], delimiter, encoding)
    there, place = _names(files[0], dialect), shown_place(path)
    with naming(place):
        plan = plan_columns(there, client, columns, ids, order_by, lists, missing)
        _check_header(plan.names or (), there, dialect)
        remote = [file for file in files if isinstance(file, Place)]
        if remote and out is None:
            check_room(remote, plan.names or ())
        batches = (batch for file in files for batch in _checked(file, dialect, client, plan))
        kept = kept_columns(there, client, columns, ids)
        store = gather_batches(batches, client, ids, out, order_by, {"source": place}, kept)
    warn_of_skipped(plan, f"{place}: ")
    return store


def column_names(path: str | Path, delimiter: str | None = None, encoding: str = UTF8) -> list[str]:
    """The names of a table's columns."""
    file = _files(path)[0]
    return _names(file, _dialect(file, delimiter, encoding))


def list_columns(path: str | Path) -> list[str]:
    """The columns of a table that hold lists. A text file has none."""
    file = _files(path)[0]
    if is_delimited(file):
        return []
    with reading(file, f"is it a whole {_kind(file)} file?"):
        return [field.name for field in _schema(file) if holds_lists(field.type)]


def is_table(path: Path) -> bool:
    """Whether the name of a file is that of a table."""
    return _kind(path) in (*DELIMITERS, *ARROW, ".parquet")


def stream_columns(
    path: str | Path, names: Sequence[str], texts: Sequence[str] = ()
) -> Iterator[pa.RecordBatch]:
    """These columns of a table, as Arrow batches in the order of its rows. Those in `texts` are text, exactly as
    written, if the file is a text file."""
    files = _files(path)
    dialect = _dialect(files[0], None, UTF8)
    _check_header(names, _names(files[0], dialect), dialect)
    for file in files:
        try:
            with reading(file, f"is it a whole {_kind(file)} file?"):
                for batch in _reader(file, dialect)(names, texts):
                    batch.validate(full=True)
                    _check_text(batch, dialect)
                    yield batch
        except UserError as error:
            if dialect is None or isinstance(file, Place):
                raise
            raise find_not_text(file, dialect, names) or error from error.__cause__


def _check_text(batch: pa.RecordBatch, dialect: Dialect | None) -> None:
    """Raise `UserError` if a text file has a column of bytes: Arrow reads text so that is not UTF-8."""
    for field in batch.schema if dialect else ():
        if kinds.is_binary(field.type):
            raise UserError(f"column '{field.name}' is not UTF-8. {AS_UTF8}")


def is_delimited(path: str | File) -> bool:
    """Whether a table is a text file, which has a delimiter and an encoding."""
    return _kind(Path(path) if isinstance(path, str) else path) in DELIMITERS


def _kind(file: File) -> str:
    return Path(file.name.lower().removesuffix(".gz")).suffix


def _files(path: str | Path) -> Sequence[File]:
    if is_address(path):
        return remote_tables(str(path))
    path = existing(path, EXPECTED)
    if not path.is_dir():
        files = [regular(path, EXPECTED)]
    else:
        with reading(path):
            files = [file for file in sorted(path.rglob("*.parquet")) if file.is_file()]
    if not files:
        raise UserError(
            f"the folder {path} holds no .parquet file: give a folder of Parquet files, or one .csv file"
        )
    if not is_table(Path(files[0].name)):
        raise UserError(
            f"{path} is neither .csv, .tsv, .parquet, .arrow nor .feather: convert it, or give its rows to "
            f"read_rows"
        )
    return files


def _dialect(file: File, delimiter: str | None, encoding: str) -> Dialect | None:
    if is_delimited(file):
        return dialect_of(_kind(file), delimiter, encoding)
    if delimiter is not None or encoding != UTF8:
        raise UserError(f"{file} is no .csv or .tsv file: leave out its delimiter and encoding")
    return None


def _names(file: File, dialect: Dialect | None) -> list[str]:
    with reading(file, f"is it a whole {_kind(file)} file?"):
        if dialect is None or isinstance(file, Place):
            return _distinct(_schema(file).names)
        return read_header(file, dialect)


def _schema(file: File) -> pa.Schema:
    """The schema of a Parquet or Arrow file."""
    if isinstance(file, Place):
        with open_table(file) as source:
            return source.schema_arrow
    if _kind(file) == ".parquet":
        return parquet.read_schema(file)
    with _open_arrow(file) as reader:
        return reader.schema


def _distinct(names: list[str]) -> list[str]:
    again = next((name for name in names if names.count(name) > 1), None)
    if again is not None:
        raise UserError(f"two columns are called '{again}': rename one of them")
    return names


def _check_header(names: Sequence[str], there: Sequence[str], dialect: Dialect | None) -> None:
    """Raise `UserError` if a column is not there. A text file may lack the line that names them."""
    try:
        check_known(names, there)
    except UserError as error:
        raise error if dialect is None else UserError(f"{error}; {HEADER}") from None


def _checked(
    file: File, dialect: Dialect | None, client: str | None, plan: Wanted
) -> Iterator[dict[str, Column]]:
    """The file's batches. Errors name the file and, for text files, the line."""
    first_row, names = 0, plan.names or ()
    try:
        with reading(file, f"is it a whole {_kind(file)} file?"):
            for batch in _reader(file, dialect)(names, plan.ids):
                owner, columns = cleaned(batch, client, plan, first_row)
                yield {client: owner, **columns} if client else columns
                first_row += batch.num_rows
    except UserError as error:
        found, skips = error, plan.missing == "skip"
        if dialect is not None and not isinstance(file, Place):
            found = find_bad_cell(file, dialect, names, plan.ids, skips) or error
        told = "" if skips else _tell_empty(file, dialect, plan)
        raise (UserError(f"{found}{told}") if told else found) from error.__cause__


def _tell_empty(file: File, dialect: Dialect | None, plan: Wanted) -> str:
    """How many rows of a file that was refused have an empty cell, in words; empty if none has one."""
    counting = Wanted(plan.names, plan.ids, missing="skip")
    with contextlib.suppress(UserError, *read_errors()):
        for batch in _reader(file, dialect)(plan.names or (), plan.ids):
            whole_rows(batch, counting, counting.read)
    if not counting.skipped:
        return ""
    has = "has" if counting.skipped == 1 else "have"
    return (
        f". {counted(counting.skipped, 'row')} of {counting.read:,} {has} an empty cell in a column that is read, "
        f"the first: row {counting.first_skipped}. To leave out such rows: missing='skip' (of a task: --set "
        f"data.missing=skip)"
    )


def _reader(
    file: File, dialect: Dialect | None
) -> Callable[[Sequence[str], Sequence[str]], Iterator[pa.RecordBatch]]:
    if isinstance(file, Place):
        return functools.partial(_read_parquet, file)
    if dialect is not None:
        return functools.partial(stream_delimited, file, dialect)
    return functools.partial(_read_arrow if _kind(file) in ARROW else _read_parquet, file)


def _read_parquet(file: File, names: Sequence[str], ids: Sequence[str]) -> Iterator[pa.RecordBatch]:
    with open_table(file) if isinstance(file, Place) else parquet.ParquetFile(file) as source:
        check_known(names, _distinct(source.schema_arrow.names))
        yield from source.iter_batches(columns=list(names))


@contextlib.contextmanager
def _open_arrow(
    file: Path,
) -> Iterator[ipc.RecordBatchFileReader | ipc.RecordBatchStreamReader]:
    with pa.memory_map(str(file)) as source:
        try:
            reader = ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            reader = ipc.open_stream(source)
        with reader:
            yield reader


def _read_arrow(file: Path, names: Sequence[str], ids: Sequence[str]) -> Iterator[pa.RecordBatch]:
    with _open_arrow(file) as reader:
        if isinstance(reader, ipc.RecordBatchStreamReader):
            yield from (batch.select(list(names)) for batch in reader)
        else:
            yield from (reader.get_batch(i).select(list(names)) for i in range(reader.num_record_batches))
