"""Batches of rows, from Arrow or a program, as columns: ids by their texts, all other values as numpy arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from partwise.data.arrow import arrow_ids, arrow_numbers, held_by
from partwise.data.checks import Column, check_known, to_array
from partwise.data.id_columns import Ids, to_ids
from partwise.data.late_arrow import pa
from partwise.types import UserError

Batch: TypeAlias = "pa.RecordBatch | pa.Table | Mapping[str, Any]"


@dataclasses.dataclass
class Wanted:
    """What is read from every batch, and what earlier batches held."""

    names: tuple[str, ...] | None = None  # None: all columns
    ids: tuple[str, ...] = ()
    lists: Mapping[str, int] = dataclasses.field(default_factory=dict)  # how many last ids of a list are kept
    # column -> what it held in the first batch (for example dates); the other batches must hold the same
    held: dict[str, str] = dataclasses.field(default_factory=dict)


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
