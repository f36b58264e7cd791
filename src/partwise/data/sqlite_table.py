"""Tables in SQLite files, read only: `sqlite:PATH?table=NAME`, or `sqlite:PATH?query=SELECT ...`.

What comes after `table=` or `query=` is taken as it is written; nothing in it is decoded.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from partwise.data.checks import check_known
from partwise.data.reading import reading, regular
from partwise.data.row_batches import Missing
from partwise.data.rows import read_rows
from partwise.data.store import ClientStore
from partwise.types import UserError, unknown

PREFIX = "sqlite:"
FORM = "sqlite:PATH?table=NAME or sqlite:PATH?query=SELECT ..."
WAIT = 5.0  # seconds for a file that another program has locked
ONE = "\0one"  # the column of the only client, to which all rows belong; no column of a table has this name
_PLACE = re.compile(r"sqlite:(?P<file>.+?)\?(?P<kind>table|query)=(?P<what>.+)", re.S)


class SqlitePlace(NamedTuple):
    """A table or a query of a SQLite file."""

    file: Path
    table: str  # empty if it is a query
    query: str  # empty if it is a table

    def __str__(self) -> str:
        return f"{PREFIX}{self.file}?" + (f"table={self.table}" if self.table else f"query={self.query}")


def sqlite_place(text: str | Path) -> SqlitePlace | None:
    """What a text that begins with `sqlite:` names; None for other texts, which are paths."""
    if not str(text).startswith(PREFIX):
        return None
    found = _PLACE.fullmatch(str(text))
    if found is None:
        raise UserError(f"'{text}' does not say what to read: give {FORM}")
    table, what = found["kind"] == "table", found["what"]
    return SqlitePlace(Path(found["file"]), what if table else "", "" if table else what)


def sqlite_names(place: SqlitePlace) -> list[str]:
    """The names of the columns."""
    with _opened(place) as connection:
        names = _names(_execute(connection, place, "*"))
    again = next((name for name in names if names.count(name) > 1), None)
    if again is not None:
        raise UserError(f"{place}: two columns are called '{again}': rename one of them with AS")
    return names


def read_sqlite(
    place: SqlitePlace,
    columns: Sequence[str],
    ids: Sequence[str],
    lists: Mapping[str, int] | None = None,
    missing: Missing = "refuse",
) -> ClientStore:
    """These columns of all rows, in their order, as rows of one client. `lists` and `missing` are as in
    `read_rows`."""
    there = sqlite_names(place)
    with _opened(place) as connection:
        check_known(columns, there)
        found = _execute(connection, place, ", ".join(_quoted(name) for name in dict.fromkeys(columns)))
        rows = ({ONE: 0, **dict(zip(_names(found), row, strict=True))} for row in found)
        first = list(itertools.islice(rows, 1))
        if not first:
            raise UserError(f"{place} has no rows: give at least one client with one example")
        return read_rows(
            itertools.chain(first, rows), ONE, list(columns), list(ids), lists=lists, missing=missing
        )


@contextlib.contextmanager
def _opened(place: SqlitePlace) -> Iterator[sqlite3.Connection]:
    """A connection that cannot write. Errors name the place."""
    file = regular(place.file, f"give {FORM}")
    with reading(
        place, "is it a whole SQLite file that no other program has locked, and is the query right?"
    ):
        address = f"file:{quote(str(file.absolute()))}?mode=ro"
        connection = sqlite3.connect(address, uri=True, timeout=WAIT)
        try:
            yield connection
        finally:
            connection.close()


def _execute(connection: sqlite3.Connection, place: SqlitePlace, columns: str) -> sqlite3.Cursor:
    """The rows of a table with these columns, or those of the query with all of its columns."""
    if place.query:
        found = connection.execute(place.query)
        if found.description is None:
            raise UserError(f"{place} is a query that gives no rows: give one that begins with SELECT")
        return found
    known = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type != 'index'")]
    if place.table not in known:
        raise unknown("table", place.table, known)
    return connection.execute(f"SELECT {columns} FROM {_quoted(place.table)}")


def _names(found: sqlite3.Cursor) -> list[str]:
    return [name for name, *_ in found.description]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
