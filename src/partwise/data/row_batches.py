"""Batches of rows, from Arrow or a program, as columns: ids by their texts, all other values as numpy arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from partwise.data.arrow import arrow_ids, arrow_numbers, check_valid, held_by
from partwise.data.checks import Column, check_known, clean_columns, to_array
from partwise.data.id_columns import Ids, to_ids
from partwise.data.late_arrow import compute, kinds, pa
from partwise.types import UserError, counted

Missing = Literal["refuse", "skip"]  # what is done with rows that have an empty cell in a column that is read
Batch: TypeAlias = "pa.RecordBatch | pa.Table | Mapping[str, Any]"


@dataclasses.dataclass
class Wanted:
    """What is read from every batch, and what earlier batches held."""

    names: tuple[str, ...] | None = None  # None: all columns
    ids: tuple[str, ...] = ()
    lists: Mapping[str, int] = dataclasses.field(default_factory=dict)  # how many last ids of a list are kept
    # column -> what it held in the first batch (for example dates); the other batches must hold the same
    held: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: Missing = "refuse"
    skipped: int = 0  # rows with an empty cell, so far
    first_skipped: int = 0
    read: int = 0  # rows, so far


def cleaned(batch: Batch, client: str | None, plan: Wanted, first_row: int) -> tuple[Ids, dict[str, Column]]:
    """The client ids and the columns of a batch, checked."""
    whole = whole_rows(batch, plan, first_row)
    try:
        columns = to_columns(whole, plan, first_row)
        num_rows = len(next(iter(columns.values()), ()))
        owner = columns.pop(client) if client else np.zeros(num_rows, np.int64)
        return clean_columns(owner, columns, plan.ids, first_row)
    except UserError as error:
        if whole is batch:
            raise
        told = "from row {first_row} on, rows with an empty cell are not counted"
        raise UserError(f"{error} ({told.format(first_row=first_row)})") from error


def whole_rows(batch: Batch, plan: Wanted, first_row: int) -> Batch:
    """The batch without the rows that have an empty cell in a column that is read, if they are to be skipped. They
    are counted in the plan."""
    if plan.missing == "refuse" or not isinstance(batch, Mapping | pa.RecordBatch | pa.Table):
        return batch
    there = list(batch) if isinstance(batch, Mapping) else batch.schema.names
    names = [name for name in (there if plan.names is None else plan.names) if name in there]
    empty = (
        np.any([_empty(name, batch[name], first_row) for name in names], axis=0)
        if names
        else np.zeros(0, bool)
    )
    plan.read += len(empty)
    if not empty.any():
        return batch
    plan.first_skipped = plan.first_skipped if plan.skipped else first_row + int(np.argmax(empty))
    plan.skipped += int(empty.sum())
    kept = np.flatnonzero(~empty)
    if not isinstance(batch, Mapping):
        return batch.filter(pa.array(~empty))
    pick = lambda values: values[kept] if isinstance(values, np.ndarray) else [values[at] for at in kept]
    return {name: pick(values) for name, values in batch.items()}


def tell_skipped(plan: Wanted) -> str:
    """How many rows were skipped, in words; empty if none was."""
    if not plan.skipped:
        return ""
    return (
        f"left out for an empty cell (missing = skip): {plan.skipped:,} of {counted(plan.read, 'row')}, the first: "
        f"row {plan.first_skipped}"
    )


def _empty(name: str, values: Any, first_row: int) -> np.ndarray:
    """Which rows have no value: none, NaN, or a text without letters."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        check_valid(name, values, first_row)
        if kinds.is_string(values.type) or kinds.is_large_string(values.type):
            return np.asarray(compute.call_function("binary_length", [values.fill_null("")])) == 0
        return np.asarray(values.is_null(nan_is_null=kinds.is_floating(values.type)))
    if isinstance(values, np.ndarray) and values.dtype.kind in "biu" and not np.ma.isMaskedArray(values):
        return np.zeros(len(values), bool)
    return np.array([_no_value(value) for value in values], bool)


def _no_value(value: Any) -> bool:
    nan = isinstance(value, float | np.floating) and np.isnan(value)
    return value is None or value is np.ma.masked or nan or (isinstance(value, str) and not value)


def to_columns(batch: Batch, plan: Wanted, first_row: int = 0) -> dict[str, Column]:
    """The columns of a batch, each [N] or [N, ...]; times become nanoseconds."""
    if isinstance(batch, Mapping):
        there = list(batch)
    elif isinstance(batch, pa.RecordBatch | pa.Table):
        there = batch.schema.names
    else:
        raise UserError(
            f"a batch is a {type(batch).__name__}: give pyarrow RecordBatches, Tables or dicts of arrays"
        )
    names = there if plan.names is None else plan.names
    check_known(names, there)
    for name in names:
        now = held_by(batch[name])
        before = plan.held.setdefault(name, now)
        if before != now:
            raise UserError(
                f"column '{name}' holds {before} first and {now} from row {first_row} on, which cannot be "
                f"compared: give all of them in one way"
            )
    return {name: _column(name, batch[name], plan, first_row) for name in names}


def _column(name: str, values: Any, plan: Wanted, first_row: int) -> Column:
    width = plan.lists.get(name)
    if isinstance(values, pa.Array | pa.ChunkedArray):
        read = arrow_ids if name in plan.ids else arrow_numbers
        return read(name, values, first_row, width)
    if name in plan.ids or isinstance(values, Ids):
        return to_ids(name, values, first_row, width)
    return _cut(name, to_array(name, values, first_row), width)


def _cut(name: str, array: np.ndarray, width: int | None) -> np.ndarray:
    """The last `width` numbers of each list. Shorter lists raise `UserError`."""
    if width is None:
        return array
    if array.ndim < 2 or array.shape[1] < width:
        raise UserError(
            f"column '{name}' has rows of shape {array.shape[1:]}, and lists asks for the last {width} of each: "
            f"only lists of ids can be filled up; give numbers of one length, or name the column in ids"
        )
    return array[:, -width:]
