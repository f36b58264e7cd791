"""Ids: the names that a source gives to its clients and items. Two ids are the same if and only if their
texts are.

Ids are whole numbers (int64) if each of them is written like a whole number (7, not 007 or 7.0). Otherwise
they are text, exactly as written. So the same table gives the same store from CSV, Parquet or rows of a
program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from partwise.types import UserError

_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,18}")


def is_whole(text: str) -> bool:
    """Whether a text is written like a whole number and fits into 64 bits."""
    return bool(_WHOLE.fullmatch(text)) and (len(text) < 19 or -(2**63) <= int(text) < 2**63)


def typed(texts: Sequence[str]) -> np.ndarray:
    """Ids as an array: int64 if all of them are written like whole numbers, otherwise text."""
    if len(texts) and all(is_whole(text) for text in texts):
        return np.array([int(text) for text in texts], np.int64)
    return np.array(texts, dtype=str)


def join_ids(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Ids of several parts (int64 or text each) as one array."""
    held = list(parts)
    if any(part.dtype.kind == "U" for part in held):
        return typed([text for part in held for text in part.astype(str).tolist()])
    return np.concatenate(held)


def whole_numbers(texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(which texts are whole numbers, the numbers; 0 elsewhere)."""
    known = np.array([is_whole(text) for text in texts.tolist()], bool)
    values = np.zeros(len(texts), np.int64)
    values[known] = [int(text) for text in texts[known].tolist()]
    return known, values


def look_up(vocabulary: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The position of each of the wanted ids (int64 or text) in the vocabulary, compared by text; -1 if it is
    not there."""
    known = np.ones(len(wanted), bool)
    if vocabulary.dtype.kind == "U" and wanted.dtype.kind != "U":
        wanted = wanted.astype(str)
    elif vocabulary.dtype.kind != "U" and wanted.dtype.kind == "U":
        known, wanted = whole_numbers(wanted)
    if not len(vocabulary):
        return np.full(len(wanted), -1)
    order = np.argsort(vocabulary, kind="stable")
    found = np.searchsorted(vocabulary, wanted, sorter=order)
    place = order[np.minimum(found, len(vocabulary) - 1)]
    return np.where(known & (vocabulary[place] == wanted), place, -1)


def vocabulary_names(ids: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Column -> the name of its vocabulary. With a plain list, each column has its own."""
    check_listed("ids", ids)
    return dict(ids) if isinstance(ids, Mapping) else {name: name for name in ids}


def check_listed(name: str, columns: Any) -> None:
    """Raise `UserError` if the argument `name`, a list of columns, is a single text, or has a column twice."""
    if isinstance(columns, str):
        raise UserError(f"{name} is the text {columns!r}: give a list of columns, as in {name}=[{columns!r}]")
    listed = [] if columns is None else list(columns)
    again = next((column for column in listed if listed.count(column) > 1), None)
    if again is not None:
        raise UserError(f"{name} has the column {again!r} twice: name it once")
