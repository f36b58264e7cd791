"""A device's own data: a table of its client, or of all clients of a site, read as the run's model needs it.

The table is looked at before every task, and read anew when it has changed.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from partwise.algorithms.registry import find_algorithm, recorded
from partwise.config.settings import Config, parse_toml
from partwise.data.histories import with_histories
from partwise.data.sqlite_table import sqlite_place
from partwise.data.store import ClientStore
from partwise.data.store import open_store as open_folder
from partwise.deployment.link import Offer
from partwise.runs.client_file import Form, check_from_tables, read_clients, tell_unknown
from partwise.runs.resolve import entry_of
from partwise.tasks import Setting
from partwise.types import UserError

log = logging.getLogger("partwise.agent")
STORE = "store:"
FAULTS = (TypeError, ValueError, LookupError, AttributeError)  # what an offer that makes no sense leads to

Stamp = tuple[tuple[str, int, int, int], ...]  # (name, inode, size, time of the last change) of every file


def open_store(offer: Offer, place: str, id: str | None = None) -> ClientStore:
    """The clients in a device's own table, with the columns that the run's model reads.

    Args:
        offer: What the run is.
        place: A .csv, .tsv, .parquet, .arrow or .feather file, a folder of .parquet files, or
            `sqlite:PATH?table=NAME`, `sqlite:PATH?query=SELECT ...`, or `store:FOLDER` with what
            `ClientStore.save` wrote, whose keys must be the model's. A store has the rows that train, in their
            order; a table's rows are made so here.
        id: The only client that is wanted; if the table does not name its clients, the client of all rows.
    """
    if place.startswith(STORE):
        return _saved_store(offer, place.removeprefix(STORE))
    config, setting, form = _understood(offer)
    found = read_clients(place, form, id)
    for name, count in found.unknown.items():
        if count:
            log.warning(tell_unknown(place, name, count))
    return _prepared(config, setting, found.examples, offer.types)


def _prepared(
    config: Config, setting: Setting, clients: ClientStore, types: Mapping[str, str]
) -> ClientStore:
    """The rows that clients train on, in the order in which they do: as the simulator has them (`Entry.own`)."""
    try:
        kept = entry_of(config.task).own.prepare(clients, config.data).select(setting.columns)
        typed = {
            name: as_trained(values, np.dtype(types.get(name, values.dtype)))
            for name, values in kept.columns.items()
        }
        kept = dataclasses.replace(kept, columns=typed)
    except FAULTS as error:
        raise _unreadable(error) from None
    if kept.num_examples < clients.num_examples:
        log.info(
            "%d of %d rows are for training, as the task '%s' and its options of [data] say",
            *(kept.num_examples, clients.num_examples, config.task),
        )
    return kept


def _saved_store(offer: Offer, folder: str) -> ClientStore:
    """A store that was saved as the run's model reads it: with its keys, in their order."""
    store = open_folder(folder)
    for name, ids in offer.vocabularies.items():
        if name in store.columns and store.vocabularies.get(name, np.zeros(0)).tolist() != ids:
            raise UserError(
                f"the keys of '{name}' in '{folder}' are not those of the run: give a table with the ids themselves"
            )
    setting = entry_of(recorded(parse_toml(offer.config)).task).settings(**offer.options)[0]
    store = with_histories(store, setting.histories)
    for name in setting.columns:
        shape = offer.shapes[name]
        if name not in store.columns or list(store.columns[name].shape[1:]) != list(shape):
            raise UserError(f"'{folder}' must have a column '{name}' with values of shape {shape}")
    return store


def as_trained(values: np.ndarray, wanted: np.dtype) -> np.ndarray:
    """Whole numbers in the type that the column had in training: a file of ratings without a point has integers,
    where others have fractions. Numbers that would change stay what they are."""
    if values.dtype.kind == wanted.kind or values.dtype.kind not in "iuf" or wanted.kind not in "iuf":
        return values
    found = values.astype(wanted)
    return found if np.array_equal(found, values) else values


def form_of(offer: Offer) -> Form:
    """How a device's table is read. Raises `UserError` if the offer makes no sense, or if its model cannot be read
    from a table."""
    return _understood(offer)[2]


def _understood(offer: Offer) -> tuple[Config, Setting, Form]:
    """An offer's configuration, the setting that it trains, and how a table is read for it."""
    try:
        config = recorded(parse_toml(offer.config))
        setting = _trained(config, offer)
        return config, setting, _form(config, setting, offer)
    except FAULTS as error:
        raise _unreadable(error) from None


def _unreadable(error: Exception) -> UserError:
    told = f"what the server says of its run cannot be read: {error!r}"
    return error if isinstance(error, UserError) else UserError(told)


def _trained(config: Config, offer: Offer) -> Setting:
    personal, stateful = entry_of(config.task).settings(**offer.options)
    return stateful if find_algorithm(config.algorithm).trains == "stateful" and stateful else personal


def _form(config: Config, setting: Setting, offer: Offer) -> Form:
    vocabularies = {name: np.array(ids) for name, ids in offer.vocabularies.items()}
    numbered = [space for space in setting.own_spaces if space not in vocabularies]
    if numbered:
        raise UserError(
            f"{config.algorithm} trains a table on the server with a row for every client ('{numbered[0]}'), and "
            f"a device's own table cannot say which row is its client's: run an algorithm with local parameters, "
            f"such as fed_recon"
        )
    check_from_tables(vocabularies, [name for name in setting.columns if name in vocabularies])
    more = [name for name in entry_of(config.task).own.columns(config.data) if name in offer.shapes]
    own = [name for name in setting.columns if name not in setting.histories]
    names = {name: str(config.data.get(name, name)) for name in (*own, *more)}
    client = str(config.data.get("client", offer.client))
    return Form(
        names=names,
        vocabularies=vocabularies,
        shapes={name: tuple(shape) for name, shape in offer.shapes.items()},
        client_column=None if client in names.values() else client,
        dialect={name: config.data[name] for name in ("delimiter", "encoding") if name in config.data},
        missing=config.data.get("missing", "refuse"),
    )


def stamp_of(place: str) -> Stamp:
    """What changes whenever the table changes. SQLite has the newest changes in a file beside its own."""
    sqlite = sqlite_place(place)
    plain = Path(place.removeprefix(STORE))
    paths = [sqlite.file, Path(f"{sqlite.file}-wal")] if sqlite else _files(plain)
    return tuple(found for path in paths for found in _stat(path))


def _files(path: Path) -> list[Path]:
    return [path, *sorted(path.rglob("*.parquet"))] if path.is_dir() else [path]


def _stat(path: Path) -> Iterator[tuple[str, int, int, int]]:
    try:
        found = os.stat(path)
    except OSError:
        return
    yield str(path), found.st_ino, found.st_size, found.st_mtime_ns


class OwnTable:
    """A device's table, read again whenever it has changed."""

    def __init__(self, offer: Offer, place: str, id: str | None = None):
        self._offer, self._place, self._id = offer, place, id
        self._stamp, self._store = stamp_of(place), open_store(offer, place, id)

    def now(self) -> ClientStore:
        """The clients as they are now. Raises `UserError` while the table cannot be read."""
        stamp = stamp_of(self._place)  # before reading: a change during it is seen the next time
        if stamp != self._stamp:
            self._store = open_store(self._offer, self._place, self._id)
            self._stamp = stamp
            log.info("the data has changed: '%s' now has %d clients", self._place, self._store.num_clients)
        return self._store
