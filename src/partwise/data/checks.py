"""What a user's columns must be: of one length, numbers, finite, without gaps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from partwise.types import UserError, unknown


def clean_columns(
    client: Any, columns: Mapping[str, Any], ids: tuple[str, ...] = (), first_row: int = 0
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The client ids (int64 or text) and the columns as arrays; `first_row` only serves the messages."""
    owners = clean_ids("client", client, first_row)
    cleaned = {}
    for name, values in columns.items():
        array = np.asarray(values)
        if array.ndim == 0 or len(array) != len(owners):
            size = "a single value" if array.ndim == 0 else f"{len(array)} rows"
            raise UserError(
                f"column '{name}' has {size}, the client column has {len(owners)}: give one value per row"
            )
        cleaned[name] = (
            clean_ids(name, array, first_row) if name in ids else _numbers(name, array, owners, first_row)
        )
    return owners, cleaned


def check_known(names: Iterable[str], columns: Iterable[str]) -> None:
    for name in names:
        if name not in columns:
            raise unknown("column", name, columns)


def check_sortable(name: str, columns: Mapping[str, np.ndarray]) -> None:
    """Rows can be sorted by a column with one value per row."""
    check_known([name], columns)
    shape = columns[name].shape[1:]
    if shape:
        single = ", ".join(other for other, values in columns.items() if values.ndim == 1) or "there is none"
        raise UserError(
            f"rows cannot be sorted by column '{name}', which has {shape} values per row: "
            f"name a column with one value per row ({single})"
        )


def clean_ids(name: str, values: Any, first_row: int = 0) -> np.ndarray:
    """Ids as int64 or text [N]."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise UserError(f"id column '{name}' has shape {array.shape}: ids must be one per row")
    if array.dtype.kind == "O":
        refuse(name, "missing values", np.array([value is None for value in array], bool), first_row)
        array = np.array(array.tolist()) if len(array) else array.astype(np.int64)
    if array.dtype.kind == "S":
        array = _decoded(name, array, first_row)
    if array.dtype.kind == "f":
        refuse(name, "missing or infinite ids", ~np.isfinite(array), first_row)
        refuse(name, "ids that are not whole numbers", array != np.floor(array), first_row, array)
    if array.dtype.kind == "U":
        refuse(name, "empty ids", array == "", first_row)
        return array
    if array.dtype.kind not in "biuf":
        raise UserError(f"id column '{name}' is of type {array.dtype}: ids must be whole numbers or text")
    return array.astype(np.int64)


def check_keys(name: str, ids: np.ndarray, space: str, num_ids: int, lowest: int) -> None:
    """Ids of a key space are whole numbers from 0 on; where `lowest` is -1, that stands for nothing."""
    if not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"column '{name}' holds {ids.dtype}, but keys are whole numbers 0..{num_ids - 1}")
    if ids.size and (ids.min() < lowest or ids.max() >= num_ids):
        raise UserError(
            f"column '{name}' holds keys {ids.min()}..{ids.max()}, "
            f"but key space '{space}' has only 0..{num_ids - 1}"
            + (" (and -1 for nothing)" if lowest < 0 else "")
        )


def factorize(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sorted distinct ids, and every row's key 0..K-1 among them (int32)."""
    vocabulary, keys = np.unique(values, return_inverse=True)
    return vocabulary, keys.astype(np.int32)


def _numbers(name: str, array: np.ndarray, owners: np.ndarray, first_row: int) -> np.ndarray:
    if array.dtype.kind == "O":
        flat = array.reshape(len(array), -1)
        missing = np.array([any(value is None for value in row) for row in flat], bool)
        refuse(name, "missing values", missing, first_row, owners=owners)
        array = np.array(array.tolist())
    if array.dtype.kind not in "biuf":
        shown = f" ('{array.flat[0]}', row {first_row})" if array.size else ""
        raise UserError(
            f"column '{name}' holds {array.dtype}{shown}, but examples are numbers: "
            f"name it in ids=('{name}',) to number its values, or leave it out"
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


def _decoded(name: str, array: np.ndarray, first_row: int) -> np.ndarray:
    try:
        return np.char.decode(array, "utf-8")
    except UnicodeDecodeError:
        refuse_not_utf8(name, array.tolist(), first_row)
        raise


def refuse_not_utf8(name: str, values: Iterable[bytes | None], first_row: int = 0) -> None:
    """Raise if a value is no UTF-8."""
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
    owners: np.ndarray | None = None,
) -> None:
    """Raise if any is bad: how many, and where the first one is."""
    if not bad.any():
        return
    place = tuple(int(axis[0]) for axis in np.nonzero(bad))
    value = "" if array is None else f"{array[place]} in "
    client = "" if owners is None else f" of client {owners[place[0]]}"
    raise UserError(
        f"column '{name}' has {int(bad.sum())} {what}, the first: {value}row {first_row + place[0]}{client}; "
        "remove or mend those rows"
    )
