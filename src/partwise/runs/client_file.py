"""Clients' own tables, read for a trained model. Their ids are looked up in the model's vocabularies by their
texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.data.checks import narrow
from partwise.data.ids import look_up, typed
from partwise.data.ragged import offsets
from partwise.data.reading import naming
from partwise.data.row_batches import Missing
from partwise.data.sqlite_table import read_sqlite, sqlite_names, sqlite_place
from partwise.data.store import CLIENT_COLUMN, ClientStore
from partwise.data.table import column_names, is_delimited, list_columns, read_table
from partwise.types import UserError, counted, unknown

NOBODY = 0  # the id of a client if the file does not name it


class ClientFile(NamedTuple):
    """A table of one client or of many: the rows that the model can use, their numbers in the file, and how many
    rows it cannot use."""

    examples: ClientStore
    rows: np.ndarray  # [rows used] their numbers in the file, in the order of the examples
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
    """How a table is read for a model."""

    names: Mapping[str, str]  # column of the model -> column of the file
    vocabularies: Mapping[str, np.ndarray]
    shapes: Mapping[str, tuple[int, ...]]  # column of the model -> shape of one row's value
    client_column: str | None  # the column of the file that names the client of a row
    dialect: Mapping[str, Any]  # for text files
    missing: Missing = "refuse"  # what is done with rows that have an empty cell


class AnyTable(NamedTuple):
    """A table of any kind."""

    names: list[str]
    lists: list[str]  # the columns that hold lists
    read: Callable[
        [Sequence[str], Sequence[str], Mapping[str, int]], ClientStore
    ]  # (columns, ids, room of lists)


class Rows(NamedTuple):
    """All rows of a table, with keys of the model in the place of ids, and the clients that they belong to."""

    columns: Mapping[str, np.ndarray]
    missing: Mapping[str, np.ndarray]  # column -> which rows have an id that the model does not have
    client_ids: np.ndarray | None  # None if no column names the clients
    owners: np.ndarray  # the place of a row's client among the ids


def readable(
    path: str | Path, names: Sequence[str], dialect: Mapping[str, Any], ids: Sequence[str] = ()
) -> list[str]:
    """Return those of the columns `names` that a file has and that can be read, as numbers unless they are among
    `ids`."""
    table = _opened(path, dialect)
    return [name for name in names if name in table.names and (name in ids or _can_be_read(table, name))]


def _opened(path: str | Path, dialect: Mapping[str, Any], missing: Missing = "refuse") -> AnyTable:
    """A table; the dialect is that of the training data, which matters if the table is a text file."""
    place = sqlite_place(path)
    if place is not None:
        return AnyTable(sqlite_names(place), [], partial(read_sqlite, place, missing=missing))
    dialect = dialect if is_delimited(path) else {}
    how: Any = {**dialect, "missing": missing}
    read = lambda columns, ids, lists: read_table(path, None, columns, ids, lists=lists, **how)
    return AnyTable(column_names(path, **dialect), list_columns(path), read)


def _can_be_read(table: AnyTable, name: str) -> bool:
    """Whether a column can be read. A client that asks for predictions may have left the target column empty."""
    try:
        table.read([name], [], {})
    except UserError:
        return False
    return True


def read_client_file(path: str | Path, form: Form, client_id: str | None = None) -> ClientFile:
    """Read the rows of one client, without rows that have an id the model does not know.

    If the file has the client column, the client keeps its own id, because its randomness depends on the id.
    """
    rows = _read(path, form)
    if rows.client_ids is None:
        if client_id is not None:
            raise UserError(
                f"'{path}' has no column '{form.client_column}', in which client '{client_id}' could be found"
            )
        return _used(path, rows._replace(client_ids=np.array([NOBODY])), None)
    if client_id is None and len(rows.client_ids) > 1:
        first = rows.client_ids[0]
        raise UserError(
            f"'{path}' holds rows of {len(rows.client_ids)} clients (column '{form.client_column}'), and a client "
            f"has its own rows only: pick one, as in --id {first} (client_id={str(first)!r})"
        )
    return _used(path, rows, client_id)


def read_clients(path: str | Path, form: Form, client_id: str | None = None) -> ClientFile:
    """Read the rows of all clients of a table, without rows that have an id the model does not know.

    Args:
        path: A table, or `sqlite:PATH?table=NAME`.
        form: How it is read.
        client_id: The only client that is wanted; if the table does not name its clients, the client that all rows
            belong to.
    """
    rows = _read(path, form)
    if rows.client_ids is None:
        if client_id is None:
            column = f"no column '{form.client_column}'" if form.client_column else "no column of clients"
            raise UserError(f"'{path}' has {column}: say whose rows these are, as in --id ann")
        return _used(path, rows._replace(client_ids=typed([client_id])), None)
    return _used(path, rows, client_id)


def _read(path: str | Path, form: Form) -> Rows:
    """All rows of a table. Raises `UserError` if its columns do not have the shapes of the model's."""
    names, vocabularies, table = form.names, form.vocabularies, _opened(path, form.dialect, form.missing)
    keys = [name for name in names if name in vocabularies]
    _check_lists(path, form, table)
    room = {names[name]: form.shapes[name][0] for name in keys if form.shapes.get(name)}
    named = [form.client_column] if form.client_column in table.names else []
    with naming(path):
        store = table.read([*names.values(), *named], [*(names[name] for name in keys), *named], room)
    columns = {name: store.columns[inside] for name, inside in names.items()}
    _check_shapes(path, form, columns)
    missing = {}
    for name in keys:
        own = store.vocabularies[names[name]]
        found = np.append(look_up(vocabularies[name], own), -1)[columns[name]].astype(np.int32)
        missing[name] = ((found < 0) & (columns[name] >= 0)).reshape(len(found), -1).any(axis=1)
        columns[name] = found
    if named:
        return Rows(columns, missing, store.vocabularies[named[0]], store.columns[named[0]])
    return Rows(columns, missing, None, np.zeros(store.num_examples, np.int32))


def _used(path: str | Path, rows: Rows, client_id: str | None) -> ClientFile:
    """The rows that the model can use: of one client, or of all."""
    ids, mine = np.asarray(rows.client_ids), np.ones(len(rows.owners), bool)
    if client_id is not None:
        place = int(look_up(ids, typed([str(client_id)]))[0])
        if place < 0:
            with naming(path):
                raise unknown("client", str(client_id), ids.astype(str))
        mine = rows.owners == place
    keep = mine & ~np.any([np.zeros(len(mine), bool), *rows.missing.values()], axis=0)
    if not keep.any():
        there = counted(int(mine.sum()), "row")
        raise UserError(f"'{path}': of its {there} none names anything that the model knows")
    used = np.flatnonzero(keep)
    used = used[np.argsort(rows.owners[used], kind="stable")]
    counts = np.bincount(rows.owners[used], minlength=len(ids))
    present, columns = counts > 0, {name: values[used] for name, values in rows.columns.items()}
    counts = counts[present]
    own = typed([str(each) for each in ids[present].tolist()])  # a number among texts is one again, alone
    store = ClientStore(columns, offsets(counts), counts, own, {}, {"source": str(path)})
    return ClientFile(store, used, {name: int((mine & lost).sum()) for name, lost in rows.missing.items()})


def _check_lists(path: str | Path, form: Form, table: AnyTable) -> None:
    """Raise `UserError` if a column has lists where the model has single values, or the other way round."""
    for name, inside in form.names.items():
        wanted = form.shapes.get(name)
        if inside in table.names and wanted is not None and bool(wanted) != (inside in table.lists):
            found, own = ("lists", "one value") if inside in table.lists else ("one value", "lists")
            raise UserError(
                f"'{path}': column '{inside}' has {found} in a row, and the model was trained with {own}: give "
                f"a table like that of the training data"
            )


def _check_shapes(path: str | Path, form: Form, columns: Mapping[str, np.ndarray]) -> None:
    for name, values in columns.items():
        wanted = tuple(form.shapes.get(name, values.shape[1:]))
        if values.shape[1:] != wanted:
            raise UserError(
                f"'{path}': column '{form.names[name]}' has {values.shape[1:]} numbers in a row, and the model was "
                f"trained with {wanted}: give as many"
            )


def with_keys_of(
    vocabularies: Mapping[str, np.ndarray], store: ClientStore
) -> tuple[ClientStore, dict[str, list[Any]]]:
    """A store whose columns have the keys of these vocabularies in the place of its own, and the ids that these do
    not have, by column; their key is -1."""
    own = {name: ids for name, ids in store.vocabularies.items() if name in store.columns}
    other = [n for n, ids in vocabularies.items() if n in own and not np.array_equal(own[n], ids)]
    if not other:
        return store, {}
    store, lost = store.gather(), {}
    columns = dict(store.columns)
    for name in other:
        keys, found = columns[name], np.append(look_up(vocabularies[name], own[name]), -1).astype(np.int32)
        missing = np.unique(keys[(keys >= 0) & (found[keys] < 0)])
        lost |= {name: own[name][missing].tolist()} if len(missing) else {}
        columns[name] = found[keys]
    return dataclasses.replace(store, columns=columns, vocabularies=vocabularies), lost


def check_from_tables(vocabularies: Mapping[str, np.ndarray], named: Sequence[str]) -> None:
    """Raise `UserError` if keys of these columns are not sorted by id. Keys of tables are; keys of words are sorted
    by frequency."""
    for name in named:
        ids = vocabularies[name]
        if np.any(ids[1:] < ids[:-1]):
            raise UserError(
                f"the column '{name}' of this model was made of text, and a client's file can only be read "
                f"where its columns are the model's own: in Python give `Personal.personalize` and "
                f"`Personal.predict` the client's store, made as the training data was (docs/data.md, Text)"
            )


def tell_unknown(path: str | Path, name: str, count: int) -> str:
    """A sentence about rows that were left out."""
    rows, are = counted(count, "row"), "is" if count == 1 else "are"
    return f"{rows} of '{path}' with a value of '{name}' that the model does not know {are} left out"


def source_ids(vocabulary: np.ndarray, keys: np.ndarray) -> list[Any]:
    """The source ids of keys; for a list of keys, without the missing ones (-1)."""
    if keys.ndim == 1:
        return vocabulary[keys].tolist()
    return [vocabulary[row[row >= 0]].tolist() for row in keys]
