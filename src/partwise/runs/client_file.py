"""A client's own table, read for a trained model. Its ids are looked up in the model's vocabularies by their
texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.data.checks import narrow
from partwise.data.ids import look_up, typed
from partwise.data.reading import naming
from partwise.data.store import CLIENT_COLUMN, ClientStore, group_rows
from partwise.data.table import column_names, is_delimited, list_columns, read_table
from partwise.types import UserError, counted, unknown

NOBODY = 0  # the id of a client if the file does not name it


class ClientFile(NamedTuple):
    """A client's own table: the rows that the model can use, their numbers in the file, and how many rows it
    cannot use."""

    examples: ClientStore
    rows: np.ndarray  # [rows used] their numbers in the file
    unknown: dict[str, int]  # column -> number of rows with an id that the model does not have


class Source(NamedTuple):
    """The form of the training data. A client's own table must have the same form."""

    vocabularies: Mapping[str, np.ndarray]  # the source id of every key, by column
    shapes: Mapping[str, tuple[int, ...]]  # column -> shape of one row's value
    client: str  # the name of the client column
    types: Mapping[str, str] = {}  # column -> its type on a device


def source_of(store: ClientStore) -> Source:
    """The form of a store of training clients."""
    shapes = {name: values.shape[1:] for name, values in store.columns.items()}
    types = {name: narrow(name, values[:0]).dtype.name for name, values in store.columns.items()}
    return Source(store.vocabularies, shapes, str(store.info.get(CLIENT_COLUMN, "user")), types)


class Form(NamedTuple):
    """How a client's table is read for a model."""

    names: Mapping[str, str]  # column of the model -> column of the file
    vocabularies: Mapping[str, np.ndarray]
    shapes: Mapping[str, tuple[int, ...]]  # column of the model -> shape of one row's value
    client_column: str | None  # the column of the file that names the client of a row
    dialect: Mapping[str, Any]  # for text files


class Owner(NamedTuple):
    """Which rows of a file belong to the client, and the client's id."""

    rows: np.ndarray
    client_id: Any


def readable(path: str | Path, names: Sequence[str], dialect: Mapping[str, Any]) -> list[str]:
    """Return those of the columns `names` (columns of numbers) that a file has and that can be read."""
    dialect = _fitting(dialect, path)
    there = column_names(path, **dialect)
    return [name for name in names if name in there and _can_be_read(path, name, dialect)]


def _fitting(dialect: Mapping[str, Any], path: str | Path) -> Mapping[str, Any]:
    """The dialect of the training data if the file is a text file; otherwise an empty dialect."""
    return dialect if is_delimited(path) else {}


def _can_be_read(path: str | Path, name: str, dialect: Mapping[str, Any]) -> bool:
    """Whether a column can be read. A client that asks for predictions may have left the target column empty."""
    try:
        read_table(path, client=None, columns=[name], **dialect)
    except UserError:
        return False
    return True


def read_client_file(path: str | Path, form: Form, client_id: str | None = None) -> ClientFile:
    """Read the rows of one client, without rows that have an id the model does not know.

    If the file has the client column, the client keeps its own id, because its randomness depends on the id.
    """
    names, vocabularies, dialect = form.names, form.vocabularies, _fitting(form.dialect, path)
    keys = [name for name in names if name in vocabularies]
    _check_lists(path, form, dialect)
    room = {names[name]: form.shapes[name][0] for name in keys if form.shapes.get(name)}
    ids = [names[name] for name in keys]
    table = read_table(path, None, list(names.values()), ids, lists=room, **dialect)
    table = table.rename({inside: name for name, inside in names.items()})
    for name, values in table.columns.items():
        wanted = form.shapes.get(name, values.shape[1:])
        if values.shape[1:] != wanted:
            raise UserError(
                f"'{path}': column '{names[name]}' has {values.shape[1:]} numbers in a row, and the model was "
                f"trained with {wanted}: give as many"
            )
    owner = _owner(path, form.client_column, client_id, table.num_examples, dialect)
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


def _check_lists(path: str | Path, form: Form, dialect: Mapping[str, Any]) -> None:
    """Raise `UserError` if a column has lists where the model has single values, or the other way round."""
    there, listed = column_names(path, **dialect), list_columns(path)
    for name, inside in form.names.items():
        wanted = form.shapes.get(name)
        if inside in there and wanted is not None and bool(wanted) != (inside in listed):
            found, own = ("lists", "one value") if inside in listed else ("one value", "lists")
            raise UserError(
                f"'{path}': column '{inside}' has {found} in a row, and the model was trained with {own}: give "
                f"a table like that of the training data"
            )


def source_ids(vocabulary: np.ndarray, keys: np.ndarray) -> list[Any]:
    """The source ids of keys; for a list of keys, without the missing ones (-1)."""
    if keys.ndim == 1:
        return vocabulary[keys].tolist()
    return [vocabulary[row[row >= 0]].tolist() for row in keys]


def _owner(
    path: str | Path, column: str | None, client_id: str | None, num_rows: int, dialect: Mapping[str, Any]
) -> Owner:
    """All rows, or the rows of one client if a column names clients."""
    if column is None or column not in column_names(path, **dialect):
        if client_id is not None:
            raise UserError(
                f"'{path}' has no column '{column}', in which client '{client_id}' could be found"
            )
        return Owner(np.ones(num_rows, bool), NOBODY)
    clients = read_table(path, client=None, columns=[column], ids=[column], **dialect)
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
