"""A client's own table, read for a trained model: its ids are found in the model's vocabularies by their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.data.ids import look_up, typed
from partwise.data.reading import naming
from partwise.data.store import ClientStore, group_rows
from partwise.data.table import column_names, read_table
from partwise.types import UserError, counted, unknown

NOBODY = 0  # the id of a client of which nothing is known


class ClientFile(NamedTuple):
    """A client's own table: the rows that the model can use, which rows those are, and how many it cannot."""

    examples: ClientStore
    rows: np.ndarray  # [rows used] their numbers in the file
    unknown: dict[str, int]  # column -> rows that name a key which the model does not have


class Owner(NamedTuple):
    """Which rows of a file are the client's, and its id."""

    rows: np.ndarray
    client_id: Any


def readable(path: str | Path, names: Sequence[str]) -> list[str]:
    """Of these columns of numbers, those that a file has, and that can be read."""
    there = column_names(path)
    return [name for name in names if name in there and _can_be_read(path, name)]


def _can_be_read(path: str | Path, name: str) -> bool:
    """A client that asks for predictions may have left the cells of what is to be predicted empty."""
    try:
        read_table(path, client=None, columns=[name])
    except UserError:
        return False
    return True


def read_client_file(
    path: str | Path,
    columns: Mapping[str, str],
    vocabularies: Mapping[str, np.ndarray],
    client_column: str | None,
    client_id: str | None = None,
) -> ClientFile:
    """Columns (name in the model -> name in the file) of those rows of one client that name only what is known.

    Where there is a `client_column`, it says whose rows those are, and the client keeps its own id: its randomness
    hangs on it.
    """
    keys = [name for name in columns if name in vocabularies]
    table = read_table(path, None, list(columns.values()), ids=[columns[name] for name in keys])
    table = table.rename({inside: name for name, inside in columns.items()})
    owner = _owner(path, client_column, client_id, table.num_examples)
    rows, keep, strange = dict(table.columns), owner.rows.copy(), {}
    for name in keys:
        found = np.append(look_up(vocabularies[name], table.vocabularies[name]), -1)[rows[name]]
        missing = ((found < 0) & (rows[name] >= 0)).reshape(len(found), -1).any(axis=1)
        strange[name] = int((owner.rows & missing).sum())
        keep &= ~missing
        rows[name] = found.astype(np.int32)
    if not keep.any():
        rows_there = counted(int(owner.rows.sum()), "row")
        raise UserError(f"'{path}': of its {rows_there} none names anything that the model knows")
    mine = {name: values[keep] for name, values in rows.items()}
    store = group_rows([owner.client_id] * int(keep.sum()), mine, (), {"source": str(path)})
    return ClientFile(store, np.flatnonzero(keep), strange)


def source_ids(vocabulary: np.ndarray, keys: np.ndarray) -> list[Any]:
    """The ids of the source behind keys; of a list of keys, those that are there."""
    if keys.ndim == 1:
        return vocabulary[keys].tolist()
    return [vocabulary[row[row >= 0]].tolist() for row in keys]


def _owner(path: str | Path, column: str | None, client_id: str | None, num_rows: int) -> Owner:
    """All rows, or where a column names clients, those of one."""
    if column is None or column not in column_names(path):
        if client_id is not None:
            raise UserError(
                f"'{path}' has no column '{column}', in which client '{client_id}' could be found"
            )
        return Owner(np.ones(num_rows, bool), NOBODY)
    clients = read_table(path, client=None, columns=[column], ids=[column])
    ids = clients.vocabularies[column]
    if client_id is None and len(ids) > 1:
        raise UserError(
            f"'{path}' holds rows of {len(ids)} clients (column '{column}'), and a client has its own rows only: "
            f"pick one, as in --id {ids[0]} (client_id={str(ids[0])!r})"
        )
    place = 0 if client_id is None else int(look_up(ids, typed([str(client_id)]))[0])
    if place < 0:
        with naming(path):
            raise unknown("client", str(client_id), ids.astype(str))
    return Owner(clients.columns[column] == place, ids[place].item())
