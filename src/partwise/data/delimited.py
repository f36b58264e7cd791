"""CSV and TSV files, also gzipped, streamed as Arrow batches. Ids are text, exactly as written."""

from __future__ import annotations

import codecs
import contextlib
import csv
import datetime
import gzip
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

from partwise.data.late_arrow import csv as arrow_csv
from partwise.data.late_arrow import pa
from partwise.data.reading import limited, read_errors
from partwise.types import UserError

DELIMITERS = {".csv": ",", ".tsv": "\t"}
BLOCK_BYTES = 1 << 23
UTF8 = "utf-8"
AS_UTF8 = "Save the file as UTF-8"


class Dialect(NamedTuple):
    """How the text of a file is written."""

    delimiter: str
    encoding: str


def dialect_of(kind: str, delimiter: str | None, encoding: str) -> Dialect:
    """The dialect of a .csv or .tsv file. A byte order mark (BOM) is not part of the text."""
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n\0' or ord(delimiter) > 127):
        raise UserError(f"delimiter is {delimiter!r}: give one character of ASCII, such as ';'")
    try:
        name = codecs.lookup(encoding).name
    except (LookupError, ValueError) as error:
        raise UserError(
            f"encoding is {encoding!r}, which Python does not know: give 'latin-1', say"
        ) from error
    return Dialect(delimiter or DELIMITERS[kind], UTF8 if name in ("utf-8-sig", "ascii") else name)


def read_header(file: Path, dialect: Dialect) -> list[str]:
    """The names of the columns."""
    with _open_text(file, dialect) as text:
        names = next(csv.reader(text, delimiter=dialect.delimiter), [])
    if not names or len(set(names)) < len(names):
        raise UserError(
            f"{file}, line 1: {','.join(names)[:300]!r}; expected a header with one distinct name per column"
        )
    other = next((mark for mark in ";\t|," if len(names) == 1 and mark in names[0]), None)
    if other:
        raise UserError(
            f"{file}, line 1: {names[0][:300]!r} is a single name, with {other!r} in it. Between columns there is "
            f"{dialect.delimiter!r}: say otherwise with delimiter={other!r} (of the task 'ratings': --set "
            f'"data.delimiter={other}"), or write it with {dialect.delimiter!r}'
        )
    return names


def stream_delimited(
    file: Path, dialect: Dialect, names: Sequence[str], ids: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Read a file in two passes. The first pass finds types that are right for every line, not only for the
    first block."""
    types: dict[str, pa.DataType] = {name: pa.string() for name in ids}
    header = read_header(file, dialect)
    while True:
        try:
            for _ in _stream(file, dialect, names, types):
                pass
            break
        except pa.ArrowInvalid as error:
            column = re.match(r"In CSV column #(\d+)", str(error))
            name = header[int(column[1])] if column else None
            if name is None or name in types:
                raise
            types[name] = pa.float64()
    yield from _stream(file, dialect, names, types)


def _stream(
    file: Path, dialect: Dialect, names: Sequence[str], types: dict[str, pa.DataType]
) -> Iterator[pa.RecordBatch]:
    options = arrow_csv.ConvertOptions(include_columns=list(names), column_types=types)
    parse = arrow_csv.ParseOptions(delimiter=dialect.delimiter, newlines_in_values=True)
    read = arrow_csv.ReadOptions(block_size=BLOCK_BYTES, encoding=dialect.encoding.replace(UTF8, "utf8"))
    # Arrow reads ahead in threads of its own. With a file of Python's, one that still reads when the program ends
    # with an error would abort it.
    opened = _open(file) if file.suffix.lower() == ".gz" else pa.OSFile(str(file))
    with (
        opened as source,
        arrow_csv.open_csv(source, read_options=read, parse_options=parse, convert_options=options) as reader,
    ):
        yield from reader


def find_bad_cell(
    file: Path, dialect: Dialect, names: Sequence[str], ids: Sequence[str], skips: bool = False
) -> UserError | None:
    """Read line by line to find the first bad cell. Returns the error that names it, or None. With `skips`, an
    empty cell is not bad."""

    def check(where: str, name: str, cell: str) -> UserError | None:
        if skips and not cell:
            return None
        if name in ids and not _is_text(cell):
            other = "encoding='latin-1', and of the task 'ratings' --set data.encoding=latin-1"
            return _not_text(where, cell, f"{AS_UTF8}, or say what it is in: {other}")
        good = cell if name in ids else is_number(cell)
        return None if good else _bad_cell(where, name, cell, name in ids)

    return _find(file, dialect, names, check)


def find_not_text(file: Path, dialect: Dialect, names: Sequence[str]) -> UserError | None:
    """The same for readers that take any text, in UTF-8 alone."""
    check = lambda where, name, cell: None if _is_text(cell) else _not_text(where, cell, AS_UTF8)
    return _find(file, dialect, names, check)


def _find(
    file: Path, dialect: Dialect, names: Sequence[str], check: Callable[[str, str, str], UserError | None]
) -> UserError | None:
    """What `check` says of the first bad cell, or of a line with more or fewer cells than the header."""
    with contextlib.suppress(*read_errors()), _open_text(file, dialect, "surrogateescape") as text:
        reader = csv.reader(text, delimiter=dialect.delimiter)
        header = next(reader, [])  # none in a file that was emptied since
        odd = next((name for name in header if not _is_text(name)), None)
        if odd is not None and not set(names) <= set(header):
            return _not_text(f"{file}, line 1", odd, AS_UTF8)
        for cells in filter(None, reader):
            where = f"{file}, line {reader.line_num}"
            if len(cells) != len(header):
                return UserError(
                    f"{where}: {len(cells)} fields, expected {len(header)} ({', '.join(header)[:300]}). Mend or "
                    f"remove the line (a field with {dialect.delimiter!r} in it is written in double quotes)"
                )
            for name in names:
                error = check(f"{where}, column '{name}'", name, cells[header.index(name)])
                if error:
                    return error
    return None


def _bad_cell(where: str, name: str, cell: str, is_id: bool) -> UserError:
    remedy = f"in Python, ids=('{name}',) reads the column as ids, and columns= leaves it out"
    expected = "an id" if is_id else "a finite number"
    return UserError(f"{where}: {cell[:300]!r}; expected {expected}. Mend or remove the line ({remedy})")


def _not_text(where: str, cell: str, remedy: str) -> UserError:
    data = cell.encode("utf-8", "surrogateescape")
    return UserError(f"{where}: {str(data[:300])[1:]}; expected text in UTF-8. {remedy}")


def _is_text(cell: str) -> bool:
    """Whether the cell was read without escaped bytes."""
    try:
        cell.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def is_number(cell: str) -> bool:
    """Whether a text is a finite number or a date."""
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


def _open(file: Path) -> IO[bytes]:
    """The bytes of a file, uncompressed."""
    if file.suffix.lower() != ".gz":
        return file.open("rb")
    return limited(cast(IO[bytes], gzip.open(file, "rb")), file.stat().st_size, file)


def _open_text(file: Path, dialect: Dialect, errors: str = "replace") -> io.TextIOWrapper:
    encoding = "utf-8-sig" if dialect.encoding == UTF8 else dialect.encoding
    return io.TextIOWrapper(_open(file), encoding, errors, newline="")
