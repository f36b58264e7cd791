"""Rows from a program as stores: an iterator of dicts, or Arrow tables, with a column that names the client."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from partwise.data.build import build_store
from partwise.data.checks import Column, check_sortable
from partwise.data.id_columns import EXACT, Ids, join_columns
from partwise.data.ids import check_listed, vocabulary_names
from partwise.data.late_arrow import pa
from partwise.data.row_batches import Batch, Missing, Wanted, cleaned, tell_skipped
from partwise.data.store import CLIENT_COLUMN, ClientStore, group_rows
from partwise.types import RunWarning, UserError, unknown

ROWS_AT_ONCE = 1 << 16
Row = Mapping[str, Any]  # column -> a number, an id, a list of ids, or numbers of one shape
IdNames = Sequence[str] | Mapping[str, str]


def read_rows(
    rows: Iterable[Row] | Iterable[pa.Table | pa.RecordBatch] | pa.Table | pa.RecordBatch,
    client: str,
    columns: Sequence[str] | None = None,
    ids: IdNames = (),
    out: str | Path | None = None,
    order_by: str | None = None,
    lists: Mapping[str, int] | None = None,
    missing: Missing = "refuse",
) -> ClientStore:
    """Read rows from a program, in any order, into a store.

    Args:
        rows: An iterator of dicts, one for every example, or one or more Arrow tables or record batches.
        client: The column that names the client of a row.
        columns: The columns to keep (default: all columns of the first row).
        ids: Columns whose values are ids. They become keys 0, 1, 2, ... If it is a mapping, columns with the
            same name on the right share their keys: ids={"past": "item", "next": "item"}.
        out: A folder to which the store is written; memory then does not grow with the rows. By default the
            store is in memory.
        order_by: A column by which each client's rows are sorted.
        lists: For lists of ids of different lengths: {"past": 20} keeps the last 20 and pads with -1.
        missing: "skip" leaves out rows with an empty cell (none, NaN, no text) in a column that is read, and warns
            with their number. By default they are refused.

    Returns:
        The store.
    """
    tables = [rows] if isinstance(rows, pa.Table | pa.RecordBatch) else rows
    if not isinstance(tables, Iterable):
        raise UserError(f"rows is {rows!r}: give dicts, one for every example, or Arrow tables")
    batches = _batches(iter(tables))
    first = list(itertools.islice(batches, 1))
    there = _names(first[0]) if first else []
    plan = plan_columns(there, client, columns, ids, order_by, lists, missing)
    found = _cleaned(itertools.chain(first, batches), client, plan)
    kept = kept_columns(there, client, columns, ids)
    store = gather_batches(found, client, ids, out, order_by, {"source": "rows"}, kept)
    warn_of_skipped(plan)
    return store


def warn_of_skipped(plan: Wanted, place: str = "") -> None:
    """Warn of rows that were left out."""
    if plan.skipped:
        warnings.warn(f"{place}{tell_skipped(plan)}", RunWarning, stacklevel=3)


def kept_columns(
    there: Sequence[str], client: str | None, columns: Sequence[str] | None, ids: IdNames
) -> list[str]:
    """The columns of the store: the requested ones, or all, and all columns of ids."""
    kept = [name for name in (columns if columns is not None else there) if name != client]
    return kept + [name for name in vocabulary_names(ids) if name not in kept]


def plan_columns(
    there: Sequence[str],
    client: str | None,
    columns: Sequence[str] | None,
    ids: IdNames,
    order_by: str | None,
    lists: Mapping[str, int] | None,
    missing: Missing = "refuse",
) -> Wanted:
    """What is read: the kept columns, the client column, and the column by which rows are sorted."""
    check_listed("columns", columns)
    kept, names = kept_columns(there, client, columns, ids), tuple(vocabulary_names(ids))
    if client in names:
        raise UserError(
            f"ids names '{client}', the column of the client: leave it out of ids, as clients have their ids anyway"
        )
    read = [*([client] if client else []), *kept]
    read += [order_by] if order_by and order_by not in read else []
    if lists is not None and not isinstance(lists, Mapping):
        raise UserError(
            f"lists is {lists!r}: say how many ids of a list are kept, as in lists={{'past': 20}}"
        )
    for name, width in (lists or {}).items():
        if name not in kept or not isinstance(width, int | np.integer) or width < 1:
            raise UserError(
                f"lists has {name!r}: {width}; give columns that are kept ({', '.join(kept)}), each with a room of "
                f"at least 1"
            )
    if missing not in get_args(Missing):
        raise unknown("value of missing", missing, get_args(Missing))
    return Wanted(tuple(read), (*([client] if client else []), *names), dict(lists or {}), missing=missing)


def gather_batches(
    batches: Iterable[Mapping[str, Column]],
    client: str | None,
    ids: IdNames,
    out: str | Path | None,
    order_by: str | None,
    info: Mapping[str, Any],
    kept: Sequence[str],
) -> ClientStore:
    """A store from batches of columns: in memory, or written to the folder `out`. Without `client`, it has
    one client."""
    if out is not None:
        if client is None:
            raise UserError(
                "a table without a client column is one client's: read it into memory, without `out`"
            )
        return build_store(out, batches, client, ids, order_by, info, kept)
    parts = list(batches)
    whole = {name: _joined(name, [part[name] for part in parts]) for name in parts[0]} if parts else {}
    num_rows = len(next(iter(whole.values()), ()))
    if not num_rows:
        raise UserError(f"{info['source']} has no rows: give at least one client with one example")
    owner = whole.pop(client) if client else np.zeros(num_rows, np.int64)
    info = {**info, CLIENT_COLUMN: client} if client else info
    if order_by is not None:
        check_sortable(order_by, whole)
    store = group_rows(owner, whole, ids, info)
    return (store if order_by is None else store.reorder(by=order_by)).select(kept)


def _joined(name: str, parts: list[Any]) -> Column:
    """A column from the columns of the batches."""
    widths = {(part.places if isinstance(part, Ids) else part).shape[1:] for part in parts}
    if len(widths) > 1:
        raise UserError(
            f"column '{name}' has rows of shapes {', '.join(map(str, sorted(widths)))}: give every row the same, "
            f"or where they are lists of ids, room for the last N of each by lists={{'{name}': N}}"
        )
    if isinstance(parts[0], Ids):
        return join_columns(parts)
    joined = np.concatenate(parts)
    if joined.dtype.kind == "f":
        for part in parts:
            if part.dtype.kind in "iu" and part.size and max(abs(int(part.min())), int(part.max())) >= EXACT:
                raise UserError(
                    f"column '{name}' holds whole numbers beyond 2^53 in some rows and fractions in others, which "
                    f"one type cannot hold: write all of them as whole numbers, or smaller ones"
                )
    return joined


def _batches(rows: Iterator[Any]) -> Iterator[Batch]:
    """Dicts in chunks, as columns. Arrow tables are passed on unchanged."""
    first_row = 0
    for first in rows:
        if isinstance(first, pa.Table | pa.RecordBatch):
            yield first
            continue
        chunk = [first, *itertools.islice(rows, ROWS_AT_ONCE - 1)]
        yield _stack(chunk, first_row)
        first_row += len(chunk)


def _names(batch: Batch) -> list[str]:
    return list(batch) if isinstance(batch, Mapping) else batch.schema.names


def _stack(chunk: list[Any], first_row: int) -> dict[str, list[Any]]:
    """Rows as columns. All rows must have the columns of the first row."""
    for number, row in enumerate(chunk):
        if not isinstance(row, Mapping):
            raise UserError(
                f"row {first_row + number} is a {type(row).__name__}: give a dict for every example, "
                f"or Arrow tables"
            )
        missing = [name for name in chunk[0] if name not in row]
        if missing:
            raise UserError(
                f"row {first_row + number} has no '{missing[0]}', which the first has: every row has every column"
            )
    return {name: [row[name] for row in chunk] for name in chunk[0]}


def _cleaned(batches: Iterable[Batch], client: str, plan: Wanted) -> Iterator[dict[str, Column]]:
    """Only the columns that are read. Errors name the row."""
    first_row = 0
    for batch in batches:
        skipped = plan.skipped
        owner, columns = cleaned(batch, client, plan, first_row)
        yield {client: owner, **columns}
        first_row += len(owner) + plan.skipped - skipped
