"""Batches of rows, from Arrow or numpy, as dicts of numpy columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from partwise.data.checks import refuse, refuse_not_utf8
from partwise.types import UserError

Batch = pa.RecordBatch | pa.Table | Mapping[str, Any]


def to_columns(batch: Batch, first_row: int = 0) -> dict[str, np.ndarray]:
    """Every column as an array [N] or [N, ...]; dates become whole numbers in their own unit."""
    if isinstance(batch, Mapping):
        return {name: np.asarray(values) for name, values in batch.items()}
    if isinstance(batch, (pa.RecordBatch, pa.Table)):
        names = batch.schema.names
        return {name: _from_arrow(name, batch.column(k), first_row) for k, name in enumerate(names)}
    raise UserError(
        f"a batch is a {type(batch).__name__}: give pyarrow RecordBatches, Tables or dicts of arrays"
    )


def _from_arrow(name: str, array: Any, first_row: int) -> np.ndarray:
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if array.null_count:
        refuse(name, "missing values", array.is_null().to_numpy(zero_copy_only=False), first_row)
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _from_arrow(name, array.dictionary_decode(), first_row)
    if pa.types.is_fixed_size_list(kind):
        inner = _from_arrow(name, array.flatten(), first_row)
        return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
    if pa.types.is_temporal(kind):
        array = array.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
    elif pa.types.is_decimal(kind):
        array = array.cast(pa.float64())
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_struct(kind):
        raise UserError(
            f"column '{name}' holds {kind}: give one number, id or fixed-size list per row, or leave it out"
        )
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.array(to_texts(name, array, first_row), dtype=str)
    return array.to_numpy(zero_copy_only=False)


def to_texts(name: str, array: Any, first_row: int = 0) -> list[Any]:
    """An Arrow column as Python values; if it is text that is not UTF-8 (Arrow does not look), say in which row."""
    try:
        return array.to_pylist()
    except UnicodeDecodeError:
        refuse_not_utf8(name, array.cast(pa.large_binary()).to_pylist(), first_row)
        raise
