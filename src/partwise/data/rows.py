"""Rows from a program as stores: an iterator of dicts, or Arrow tables, with a column that names the client."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from partwise.data.batches import Batch, to_columns
from partwise.data.build import build_store
from partwise.data.checks import check_known, clean_columns
from partwise.data.store import ClientStore, group_rows
from partwise.types import UserError

ROWS_AT_ONCE = 1 << 16
Row = Mapping[str, Any]  # column -> a number, an id, or numbers of one shape


def read_rows(
    rows: Iterable[Row] | Iterable[pa.Table | pa.RecordBatch] | pa.Table | pa.RecordBatch,
    client: str,
    columns: Sequence[str] | None = None,
    ids: Sequence[str] = (),
    out: str | Path | None = None,
    order_by: str | None = None,
) -> ClientStore:
    """Read an iterator of dicts, one for every example, or one or more Arrow tables: into memory, or into folder
    `out`.

    As `read_table`: rows may be in any order; `columns` are those to keep (all of the first row, if not given);
    those in `ids` become keys. With `out`, memory does not grow with the rows.
    """
    tables = [rows] if isinstance(rows, pa.Table | pa.RecordBatch) else rows
    batches = _cleaned(_batches(iter(tables)), client, columns, tuple(ids), order_by)
    return gather_batches(batches, client, ids, out, order_by, {"source": "rows"})


def gather_batches(
    batches: Iterable[Mapping[str, np.ndarray]],
    client: str | None,
    ids: Sequence[str],
    out: str | Path | None,
    order_by: str | None,
    info: Mapping[str, Any],
) -> ClientStore:
    """A store of batches of columns: in memory, or written to the folder `out`; without `client`, of one client."""
    if out is not None:
        if client is None:
            raise UserError(
                "a table without a client column is one client's: read it into memory, without `out`"
            )
        return build_store(out, batches, client, ids, order_by, info)
    parts = list(batches)
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}
    num_rows = len(next(iter(whole.values()), ()))
    if not num_rows:
        raise UserError(f"{info['source']} has no rows: give at least one client with one example")
    owner = whole.pop(client) if client else np.zeros(num_rows, np.int64)
    store = group_rows(owner, whole, tuple(ids), info)
    return store if order_by is None else store.reorder(by=order_by)


def _batches(rows: Iterator[Any]) -> Iterator[Batch]:
    """Dicts in chunks, as columns; Arrow tables as they come."""
    first_row = 0
    for first in rows:
        if isinstance(first, pa.Table | pa.RecordBatch):
            yield first
            continue
        chunk = [first, *itertools.islice(rows, ROWS_AT_ONCE - 1)]
        yield _stack(chunk, first_row)
        first_row += len(chunk)


def _stack(chunk: list[Any], first_row: int) -> dict[str, np.ndarray]:
    """Rows as columns; all have what the first has."""
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
    return {name: _column(name, [row[name] for row in chunk], first_row) for name in chunk[0]}


def _column(name: str, values: list[Any], first_row: int) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError:
        raise UserError(
            f"column '{name}' has values of different shapes in rows {first_row} to {first_row + len(values) - 1}: "
            f"give every row as many numbers (fill up with -1 for nothing, where they are ids)"
        ) from None


def _cleaned(
    batches: Iterable[Batch],
    client: str,
    columns: Sequence[str] | None,
    ids: tuple[str, ...],
    order_by: str | None,
) -> Iterator[dict[str, np.ndarray]]:
    """Only the columns that are kept; what is wrong with one is said with its row."""
    first_row, kept = 0, None
    for batch in batches:
        found = to_columns(batch, first_row)
        if kept is None:
            kept = [name for name in (columns if columns is not None else found) if name != client]
            kept += [name for name in (*ids, order_by) if name and name not in kept]
        check_known([client, *kept], found)
        clean_columns(found[client], {name: found[name] for name in kept}, ids, first_row)
        yield {name: found[name] for name in (client, *kept)}
        first_row += len(found[client])
