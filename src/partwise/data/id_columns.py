"""Columns of ids in any form: numbers, text, lists of them, from arrays or lists of a program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from partwise.data.ids import typed
from partwise.data.late_arrow import pa
from partwise.data.ragged import last_of, owners
from partwise.types import UserError

NOTHING = -1  # in a list of ids: no id
MAX_LETTERS = 2000  # a limit is needed, because an array of texts is as wide as the longest text
EXACT = 2**53  # from here on, a float may represent several whole numbers


@dataclasses.dataclass(frozen=True)
class Ids:
    """A column of ids: the distinct texts, and the number of the text of every row."""

    texts: list[str]
    places: np.ndarray  # [N] or [N, width] int32; in lists, -1 for nothing

    def __len__(self) -> int:
        return len(self.places)

    def text(self, row: int) -> str:
        """The id of a row."""
        return self.texts[self.places[row]]


class KeyTable:
    """Numbers ids in the order in which they appear. At the end it knows their sorted order."""

    def __init__(self):
        self.numbers: dict[str, int] = {}
        self.ranks = np.empty(0, np.int32)

    def encode(self, ids: Ids) -> np.ndarray:
        """The number of every row's id; -1 stays -1."""
        numbers = self.numbers
        mine = [numbers.setdefault(text, len(numbers)) for text in ids.texts]
        return np.array([*mine, NOTHING], np.int32)[ids.places]

    def sort(self) -> np.ndarray:
        """The sorted ids. After this call, `ranks[number]` is the position of an id among them, and
        `ranks[-1]` is -1."""
        ids = typed(list(self.numbers))
        order = np.argsort(ids, kind="stable")
        self.ranks = np.full(len(ids) + 1, NOTHING, np.int32)
        self.ranks[order] = np.arange(len(ids))
        return ids[order]


def factorize(columns: Sequence[Ids]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The sorted ids of columns that share them, and for each column the key of every row (int32)."""
    keys = KeyTable()
    numbers = [keys.encode(column) for column in columns]
    return keys.sort(), [keys.ranks[number] for number in numbers]


def join_columns(parts: Sequence[Ids]) -> Ids:
    """One column from the columns of several batches."""
    keys = KeyTable()
    places = [keys.encode(part) for part in parts]
    return Ids(list(keys.numbers), np.concatenate(places))


def to_ids(name: str, values: Any, first_row: int = 0, width: int | None = None) -> Ids:
    """A column of ids from an array, a list or a list of lists. `width` is the number of ids that are kept of
    a list."""
    if isinstance(values, Ids):
        return values
    if np.ma.is_masked(values):
        values = values.tolist()  # masked values become None
    if hasattr(values, "__array__"):  # of numpy, JAX, pandas, Arrow
        values = np.asarray(values)
    if isinstance(values, np.ndarray) and values.dtype.kind != "O":
        if values.ndim not in (1, 2):
            raise UserError(
                f"id column '{name}' has shape {values.shape}: give an id or a list of ids per row"
            )
        flat, lengths = values.reshape(-1), np.full(len(values), values.shape[1]) if values.ndim > 1 else None
    else:
        flat, lengths = _flattened(name, _values(name, values), first_row)
    row_of = np.arange(len(flat)) if lengths is None else owners(lengths)
    ids = encoded_ids(name, flat, lambda at: first_row + int(row_of[at]))
    if lengths is None and width is not None:
        raise no_lists(name, width, "one id per row")
    return ids if lengths is None else to_lists(name, ids, lengths, width, first_row)


def no_lists(name: str, width: int, held: str) -> UserError:
    """Return the error for a column that should have lists but has none."""
    return UserError(
        f"lists has room for {width} ids in column '{name}', which holds {held}: give lists, or leave it out there"
    )


def _values(name: str, values: Any) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise UserError(f"id column '{name}' is the single value {values!r}: give one id per row") from None


def to_lists(name: str, ids: Ids, lengths: np.ndarray, width: int | None, first_row: int = 0) -> Ids:
    """Lists of ids, given one after the other, as rows of one length. With `width`, the last `width` ids of
    each list, padded with -1 at the end."""
    texts = [text for text in ids.texts if text != str(NOTHING)]
    if len(texts) < len(ids.texts):
        nothing = list(ids.texts).index(str(NOTHING))
        places = ids.places - (ids.places > nothing)
        ids = Ids(texts, np.where(ids.places == nothing, NOTHING, places).astype(np.int32))
    if width is None:
        return Ids(texts, ids.places.reshape(len(lengths), one_length(name, lengths, first_row)))
    there = ids.places >= 0
    row_of = owners(lengths)
    kept = np.bincount(row_of[there], minlength=len(lengths))
    return Ids(texts, last_of(ids.places[there], np.cumsum(kept), kept, width))


def one_length(name: str, lengths: np.ndarray, first_row: int = 0) -> int:
    """The length of all lists of a column. Raises `UserError` if they differ."""
    if not len(lengths):
        return 1
    if np.any(lengths != lengths[0]):
        other = int(np.argmax(lengths != lengths[0]))
        raise UserError(
            f"column '{name}' has lists of different lengths ({lengths[0]} in row {first_row}, {lengths[other]} in "
            f"row {first_row + other}): of ids, read_table and read_rows keep the last N of each and fill up with "
            f"-1 by lists={{'{name}': N}}; of numbers, give every row as many"
        )
    if not lengths[0]:
        raise UserError(f"column '{name}' has only empty lists, from row {first_row} on: leave it out")
    return int(lengths[0])


def _flattened(name: str, values: list[Any], first_row: int) -> tuple[list[Any], np.ndarray | None]:
    """The values and None; or for lists, the values of all lists and the lengths of the lists."""
    listed = [isinstance(v, list | tuple) or (isinstance(v, np.ndarray) and v.ndim > 0) for v in values]
    if not any(listed):
        return values, None
    if not all(listed):
        row = first_row + listed.index(False)
        raise UserError(f"column '{name}' holds lists, but not in row {row}: give every row a list")
    each = [value.tolist() if isinstance(value, np.ndarray) else value for value in values]
    return [value for row in each for value in row], np.array([len(row) for row in each], np.int64)


def encoded_ids(name: str, flat: Any, row: Callable[[Any], int]) -> Ids:
    """The distinct texts of some values, and the number of every value's text. `row` gives the row for
    messages."""
    if isinstance(flat, np.ndarray) and flat.dtype.kind in "biu":
        encoded = pa.array(flat if flat.dtype.kind != "b" else flat.astype(np.int64)).dictionary_encode()
        return Ids([str(value) for value in encoded.dictionary.to_pylist()], encoded.indices.to_numpy())
    numbers: dict[str, int] = {}
    places = np.empty(len(flat), np.int32)
    for at, value in enumerate(flat.tolist() if isinstance(flat, np.ndarray) else flat):
        text = _text(value)
        if text is None:
            raise bad_id(name, value, row(at))
        places[at] = numbers.setdefault(text, len(numbers))
    return Ids(checked_texts(name, list(numbers), places, row), places)


def _text(value: Any) -> str | None:
    """A value as an id; None if it cannot be one."""
    if isinstance(value, str):
        return value
    if isinstance(value, float | np.floating):
        return str(int(value)) if abs(value) < EXACT and value == int(value) else None
    if isinstance(value, bool | int | np.bool_ | np.integer):
        return str(int(value))
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else None
    except UnicodeDecodeError:
        return None


def bad_id(name: str, value: Any, row: int) -> UserError:
    """Return the error for a value that is not an id."""
    if (
        value is None
        or value is np.ma.masked
        or (isinstance(value, float | np.floating) and math.isnan(value))
    ):
        return UserError(
            f"id column '{name}' has a missing value in row {row}: remove or mend that row, or leave out all "
            f"such rows with missing='skip'"
        )
    if isinstance(value, bytes):
        return UserError(f"id column '{name}' has {value!r} in row {row}, which is not UTF-8: convert it")
    if isinstance(value, float | np.floating) and abs(value) >= EXACT and math.isfinite(value):
        return UserError(
            f"id column '{name}' has {value!r} in row {row}: from 2^53 on a float may stand for several ids. "
            f"Give whole numbers or text"
        )
    return UserError(
        f"id column '{name}' has {value!r} ({type(value).__name__}) in row {row}: ids are whole numbers or text"
    )


def checked_texts(
    name: str, texts: list[str], places: np.ndarray, row: Callable[[Any], int] = int
) -> list[str]:
    """Return the texts. Raises `UserError` if one cannot be an id: empty, too long, or not valid Unicode."""
    for place, text in enumerate(texts):
        wrong = _wrong(text)
        if wrong:
            where = row(np.flatnonzero(places.reshape(-1) == place)[0])
            raise UserError(f"id column '{name}' has {wrong} in row {where}: remove or mend that row")
    return texts


def _wrong(text: str) -> str | None:
    if not text:
        return "an empty id"
    if len(text) > MAX_LETTERS:
        return f"an id of {len(text):,} letters (an id has at most {MAX_LETTERS:,})"
    if "\0" in text:
        return f"the id {text!r}, which holds the character NUL,"
    return None if _can_be_written(text) else f"the id {text!r}, which is no Unicode text,"


def _can_be_written(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
