"""Checks for a user's columns: equal lengths, numbers, finite, no missing values."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from partwise.data.id_columns import Ids, one_length, to_ids
from partwise.types import UserError, unknown

Column = np.ndarray | Ids


def clean_columns(
    client: Any, columns: Mapping[str, Any], ids: Collection[str] = (), first_row: int = 0
) -> tuple[Ids, dict[str, Column]]:
    """The client ids and the columns. Columns in `ids` hold ids. `first_row` is used only in messages."""
    owners = to_ids("client", client, first_row)
    if owners.places.ndim > 1:
        raise UserError("the client column holds lists: a row belongs to one client")
    cleaned = {}
    for name, values in columns.items():
        column = (to_ids if name in ids else to_array)(name, values, first_row)
        single = isinstance(column, np.ndarray) and column.ndim == 0
        if single or len(column) != len(owners):
            size = "a single value" if single else f"{len(column)} rows"
            raise UserError(
                f"column '{name}' has {size}, the client column has {len(owners)}: give one value per row"
            )
        cleaned[name] = column if isinstance(column, Ids) else _numbers(name, column, owners, first_row)
    return owners, cleaned


def to_array(name: str, values: Any, first_row: int = 0) -> np.ndarray:
    """A column as an array. A masked value is a missing value, because the mask would be lost."""
    if isinstance(values, np.ma.MaskedArray):
        refuse(name, "missing values", np.ma.getmaskarray(values), first_row)
    elif isinstance(values, list | tuple):
        masked = [isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value) for value in values]
        refuse(name, "missing values", np.array(masked, bool), first_row)
    try:
        return np.asarray(values)
    except ValueError:
        refuse(name, "missing values", np.array([value is None for value in values]), first_row)
        lengths = [len(value) if isinstance(value, list | tuple) else np.size(value) for value in values]
        one_length(name, np.array(lengths), first_row)
        raise UserError(
            f"column '{name}' has values of different shapes, in one row or in several: give every row numbers "
            f"of one shape"
        ) from None


def check_memory(num_bytes: float, what: str, remedy: str) -> None:
    """Raise `UserError` if something needs more memory than this machine has, because reasonable numbers may
    have a huge product."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > there:
        raise UserError(
            f"{what} would take {num_bytes / 1e9:,.0f} GB of memory, and this machine has {there / 1e9:,.0f} GB: "
            f"{remedy}"
        )


def check_known(names: Iterable[str], columns: Iterable[str]) -> None:
    for name in names:
        if name not in columns:
            raise unknown("column", name, columns)


def check_sortable(name: str, columns: Mapping[str, Column]) -> None:
    """Raise `UserError` unless the column has one value per row, so that rows can be sorted by it."""
    check_known([name], columns)
    shape = _values(columns[name]).shape[1:]
    if shape:
        names = [other for other, column in columns.items() if _values(column).ndim == 1]
        single = ", ".join(names) or "there is none"
        raise UserError(
            f"rows cannot be sorted by column '{name}', which has {shape} values per row: "
            f"name a column with one value per row ({single})"
        )


def _values(column: Column) -> np.ndarray:
    return column.places if isinstance(column, Ids) else column


def check_keys(name: str, ids: np.ndarray, space: str, num_ids: int, lowest: int) -> None:
    """Raise `UserError` unless the ids are whole numbers in 0..num_ids-1. If `lowest` is -1, the id -1
    (nothing) is allowed too."""
    if not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"column '{name}' holds {ids.dtype}, but keys are whole numbers 0..{num_ids - 1}")
    if ids.size and (ids.min() < lowest or ids.max() >= num_ids):
        raise UserError(
            f"column '{name}' holds keys {ids.min()}..{ids.max()}, "
            f"but key space '{space}' has only 0..{num_ids - 1}"
            + (" (and -1 for nothing)" if lowest < 0 else "")
        )


def narrow(name: str, column: np.ndarray) -> np.ndarray:
    """A column in the types that devices use: 64-bit numbers become 32-bit numbers. Whole numbers that do not
    fit raise `UserError`."""
    kind = column.dtype.kind
    if column.dtype.itemsize < 8 or kind not in "iuf":
        return np.asarray(column)
    target = np.dtype({"i": np.int32, "u": np.uint32, "f": np.float32}[kind])
    if kind != "f" and column.size:
        limits = np.iinfo(target)
        if column.min() < limits.min or column.max() > limits.max:
            raise UserError(
                f"column '{name}' holds whole numbers from {column.min()} to {column.max()}, and models compute "
                f"with 32 bits ({limits.min} to {limits.max}): if they are ids, name the column in "
                f"ids=('{name}',); if not, give smaller numbers (days since the first one) or floats"
            )
    return column.astype(target)


def _numbers(name: str, array: np.ndarray, owners: Ids, first_row: int) -> np.ndarray:
    if array.dtype.kind == "O":
        flat = array.reshape(len(array), -1)
        missing = np.array([any(value is None for value in row) for row in flat], bool)
        refuse(name, "missing values", missing, first_row, owners=owners)
        array = to_array(name, array.tolist(), first_row)
    if array.dtype.kind not in "biuf":
        shown = f" ('{array.flat[0]}', row {first_row})" if array.size else ""
        raise UserError(
            f"column '{name}' holds {array.dtype}{shown}, but examples are numbers: give numbers, or name it in "
            f"ids=('{name}',) to number its values, or leave it out"
        )
    if 0 in array.shape[1:]:
        raise UserError(
            f"column '{name}' has rows of shape {array.shape[1:]}, which hold nothing: leave it out"
        )
    if array.dtype.kind == "f":
        refuse(name, "values that are not finite", ~np.isfinite(array), first_row, array, owners)
        too_large = np.abs(array) > np.finfo(np.float32).max  # what devices compute with
        refuse(name, "values too large for 32-bit numbers", too_large, first_row, array, owners)
    return array


def refuse_not_utf8(name: str, values: Iterable[bytes | None], first_row: int = 0) -> None:
    """Raise `UserError` if a value is not UTF-8."""
    bad = np.array([value is not None and not _is_utf8(value) for value in values], bool)
    refuse(name, "texts that are not UTF-8", bad, first_row)


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def refuse(
    name: str,
    what: str,
    bad: np.ndarray,
    first_row: int,
    array: np.ndarray | None = None,
    owners: Ids | None = None,
) -> None:
    """Raise `UserError` if any entry is bad. The message says how many there are and where the first one is."""
    if not bad.any():
        return
    place = tuple(int(axis[0]) for axis in np.nonzero(bad))
    value = "" if array is None else f"{array[place]} in "
    skip = ", or leave them out with missing='skip'" if what == "missing values" else ""
    client = "" if owners is None else f" of client {owners.text(place[0])}"
    raise UserError(
        f"column '{name}' has {int(bad.sum())} {what}, the first: {value}row {first_row + place[0]}{client}; "
        f"remove or mend those rows{skip}"
    )
