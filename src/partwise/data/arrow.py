"""Arrow columns as ids and numbers.

An array is validated completely before it is used. Otherwise one wrong offset in a damaged file could read
from anywhere in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from partwise.data.checks import refuse, refuse_not_utf8
from partwise.data.delimited import is_number
from partwise.data.id_columns import Ids, checked_texts, encoded_ids, no_lists, one_length, to_lists
from partwise.data.late_arrow import kinds, pa
from partwise.data.ragged import owners
from partwise.types import UserError


def arrow_ids(name: str, array: Any, first_row: int = 0, width: int | None = None) -> Ids:
    """A column of ids, or of lists of ids."""
    array = _whole(name, array, first_row)
    if _is_list(array.type):
        inner, lengths = _unlisted(name, array, first_row)
        row_of = owners(lengths)
        return to_lists(
            name, _flat_ids(name, inner, lambda at: first_row + int(row_of[at])), lengths, width, first_row
        )
    if width is not None:
        raise no_lists(name, width, str(array.type))
    return _flat_ids(name, array, lambda at: first_row + int(at))


def arrow_numbers(name: str, array: Any, first_row: int = 0, width: int | None = None) -> np.ndarray:
    """Read a column of numbers, or of lists of numbers of one length. Times become nanoseconds."""
    return _numbers(name, array, first_row, width, lambda at: first_row + at)


def _numbers(
    name: str, array: Any, first_row: int, width: int | None, row: Callable[[int], int]
) -> np.ndarray:
    """The same. `row` gives the row of a value, for messages."""
    array = _whole(name, array, first_row)
    if not _is_list(array.type):
        if width is not None:
            raise no_lists(name, width, str(array.type))
        return _flat_numbers(name, array, row)
    inner, lengths = _unlisted(name, array, first_row)
    if width is not None and np.all(lengths >= width):
        ends = np.cumsum(lengths)
        inner = inner.take(pa.array(((ends - width)[:, None] + np.arange(width)).reshape(-1)))
        lengths = np.full(len(lengths), width)
    elif width is not None:
        raise UserError(
            f"column '{name}' has lists of {lengths.min()} numbers, and lists asks for the last {width} of each: "
            f"only ids can be filled up; give numbers of one length, or name the column in ids"
        )
    size = one_length(name, lengths, first_row)
    numbers = _numbers(name, inner, first_row, None, lambda at: row(at // size))
    return numbers.reshape(len(array), size, *numbers.shape[1:])


def to_texts(name: str, array: Any, first_row: int = 0) -> list[Any]:
    """An Arrow column as Python values. If a text is not UTF-8 (Arrow does not check), the error names the
    row."""
    try:
        return array.to_pylist()
    except UnicodeDecodeError:
        refuse_not_utf8(name, array.cast(pa.large_binary()).to_pylist(), first_row)
        raise


def _whole(name: str, array: Any, first_row: int) -> pa.Array:
    """One array of a simple type, valid and without missing values."""
    check_valid(name, array, first_row)
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
        array = array if isinstance(array, pa.Array) else pa.concat_arrays(array.chunks)
        _validate(name, array, first_row)
    if isinstance(array.type, pa.BaseExtensionType):
        return _whole(name, array.storage, first_row)
    if kinds.is_dictionary(array.type):
        return _whole(name, array.dictionary_decode(), first_row)
    if kinds.is_string_view(array.type) or kinds.is_binary_view(array.type):
        wide = pa.large_string() if kinds.is_string_view(array.type) else pa.large_binary()
        return _whole(name, array.cast(wide), first_row)
    if array.null_count:
        refuse(name, "missing values", array.is_null().to_numpy(zero_copy_only=False), first_row)
    return array


def check_valid(name: str, array: pa.Array | pa.ChunkedArray, first_row: int) -> None:
    """Raise `UserError` if the memory of a column is not what its type says, as in a damaged file. Whatever is
    computed of such a column may end the process."""
    for chunk in array.chunks if isinstance(array, pa.ChunkedArray) else [array]:
        _validate(name, chunk, first_row)


def _validate(name: str, array: pa.Array, first_row: int) -> None:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" in str(error) and (kinds.is_string(array.type) or kinds.is_large_string(array.type)):
            refuse_not_utf8(name, array.cast(pa.large_binary()).to_pylist(), first_row)
        raise UserError(f"column '{name}' is damaged ({error}): get or write the file again") from error


def _flat_ids(name: str, array: pa.Array, row: Callable[[Any], int]) -> Ids:
    kind = array.type
    if kinds.is_decimal(kind) or kinds.is_string(kind) or kinds.is_large_string(kind):
        encoded = array.cast(pa.large_string()).dictionary_encode()
        places = encoded.indices.to_numpy()
        return Ids(checked_texts(name, encoded.dictionary.to_pylist(), places, row), places)
    if kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_fixed_size_binary(kind):
        return encoded_ids(name, array.to_pylist(), row)
    return encoded_ids(name, _flat_numbers(name, array, row), row)


def _flat_numbers(name: str, array: pa.Array, row: Callable[[int], int]) -> np.ndarray:
    kind = array.type
    if kinds.is_temporal(kind) and not kinds.is_interval(kind):
        array = _nanoseconds(name, array, row)
    elif kinds.is_decimal(kind):
        array = array.cast(pa.float64())
    elif kinds.is_string(kind) or kinds.is_large_string(kind):
        texts = to_texts(name, array, row(0))
        at = next((at for at, text in enumerate(texts) if not is_number(text)), 0)
        shown = f" ({texts[at]!r}, row {row(at)})" if texts else ""
        raise UserError(
            f"column '{name}' holds text{shown}, but examples are numbers: give numbers, or in Python name it in "
            f"ids=('{name}',) to number its values, or leave it out"
        )
    elif not (kinds.is_boolean(kind) or kinds.is_integer(kind) or kinds.is_floating(kind)):
        raise _unreadable(name, kind)
    return array.to_numpy(zero_copy_only=False)


def _nanoseconds(name: str, array: pa.Array, row: Callable[[int], int]) -> pa.Array:
    """Times of any unit as whole numbers of nanoseconds, so that they can be compared. No unit is finer."""
    kind = array.type
    if kinds.is_time(kind):
        unit = pa.time64("ns")
    else:
        unit = pa.duration("ns") if kinds.is_duration(kind) else pa.timestamp("ns", getattr(kind, "tz", None))
    try:
        return array.cast(unit).cast(pa.int64())
    except pa.ArrowInvalid as error:
        if len(array) > 1:  # the half with the first such time says in which row it is
            half = len(array) // 2
            _nanoseconds(name, array[:half], row)
            _nanoseconds(name, array[half:], lambda at: row(half + at))
        raise UserError(
            f"column '{name}' has times that 64 bits of nanoseconds cannot hold, as dates before 1677 and after "
            f"2262, the first in row {row(0)} ({error}): mend those rows, give whole numbers instead (days, say), "
            f"or leave the column out"
        ) from error


def held_by(values: Any) -> str:
    """What a column holds, in words: dates, times of day, durations, or plain values."""
    if not isinstance(values, pa.Array | pa.ChunkedArray):
        return "plain values"
    kind = _unwrapped(values.type)
    while _is_list(kind):
        kind = _unwrapped(kind.value_type)
    if not kinds.is_temporal(kind):
        return "plain values"
    if kinds.is_time(kind):
        return "times of day"
    return "durations" if kinds.is_duration(kind) else "dates"


def _unreadable(name: str, kind: pa.DataType) -> UserError:
    return UserError(
        f"column '{name}' holds {kind}: give one number or id per row, or a list of them, or leave it out"
    )


def holds_lists(kind: pa.DataType) -> bool:
    """Whether a column of that type has lists in its rows."""
    return _is_list(_unwrapped(kind))


def _unwrapped(kind: pa.DataType) -> pa.DataType:
    """The type inside extension and dictionary types."""
    while isinstance(kind, pa.BaseExtensionType | pa.DictionaryType):
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind.value_type
    return kind


def _is_list(kind: pa.DataType) -> bool:
    return kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)


def _unlisted(name: str, array: pa.Array, first_row: int) -> tuple[pa.Array, np.ndarray]:
    """The values of all lists, and the lengths of the lists."""
    if kinds.is_fixed_size_list(array.type):
        lengths = np.full(len(array), array.type.list_size, np.int64)
    else:
        lengths = np.asarray(array.value_lengths(), np.int64)
    inner = array.flatten()
    if inner.null_count:
        bad = np.zeros(len(array), bool)
        bad[owners(lengths)[inner.is_null().to_numpy(zero_copy_only=False)]] = True
        refuse(name, "missing values", bad, first_row)
    return _whole(name, inner, first_row), lengths
