"""The best of a catalogue, without what is excluded."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from partwise.data.checks import check_keys
from partwise.data.ids import look_up, typed
from partwise.data.store import ClientStore
from partwise.runs.client_file import ClientFile, with_keys_of
from partwise.types import RunWarning, UserError, counted, unknown

TOLD = 3  # unknown ids that a sentence names
BLOCK = 1 << 10  # scores of which only the largest is looked at first


class Recommended(NamedTuple):
    """An item and its score.

    Attributes:
        id: The item's id in the training data.
        score: The model's output for it.
    """

    id: Any
    score: float


def best(scores: np.ndarray, k: int, excluded: np.ndarray) -> np.ndarray:
    """The places of the k largest scores, the largest first; of equal ones, the first. Fewer, if fewer are not
    excluded."""
    left = scores.copy()
    left[excluded] = -np.inf
    k = min(k, len(left) - len(np.unique(excluded)))
    if not k:
        return np.empty(0, int)
    tops = np.maximum.reduceat(left, np.arange(0, len(left), BLOCK))
    least = np.partition(tops, -k)[-k] if k < len(tops) else -np.inf  # so many are at least as large
    some = np.flatnonzero(left >= least)
    return some[np.argsort(-left[some], kind="stable")[:k]]


def excluded_keys(
    column: str, ids: np.ndarray, exclude: ClientStore | ClientFile | Iterable[Any] | None
) -> np.ndarray:
    """The keys of what is excluded. Ids that the model does not know are told in a warning."""
    exclude = exclude.examples if isinstance(exclude, ClientFile) else exclude
    if isinstance(exclude, ClientStore):
        if column not in exclude.columns:
            raise UserError(f"{unknown('column', column, exclude.columns)}: its ids are to be excluded")
        there, lost = with_keys_of({column: ids}, exclude.select((column,)))
        _warn_of(lost.get(column, []))
        keys = np.unique(there.gather().columns[column])
        check_keys(column, keys, column, len(ids), -1)
        return keys[keys >= 0]
    if isinstance(exclude, str | bytes | Mapping) or not isinstance(exclude, Iterable | None):
        raise UserError(
            f"exclude is {exclude!r}: give a list of ids, as in exclude=['m7', 'm9'], or what `read` of the model "
            f"returned for the client's file"
        )
    wanted = typed([str(each) for each in (() if exclude is None else exclude)])
    keys = look_up(ids, wanted)
    _warn_of(wanted[keys < 0].tolist())
    return keys[keys >= 0]


def _warn_of(lost: list[Any]) -> None:
    if lost:
        told = f"{counted(len(lost), 'id')} to exclude that the model does not know: {some_of(lost)}"
        warnings.warn(told, RunWarning, stacklevel=4)


def some_of(ids: list[Any]) -> str:
    """The first of these ids, for a sentence."""
    return ", ".join([*map(str, ids[:TOLD]), *(["..."] if len(ids) > TOLD else [])])
