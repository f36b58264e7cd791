"""A device's own data: a table of its client, or of all clients of a site, read as the run's model needs it.

The table is looked at before every task, and read anew when it has changed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from partwise.algorithms.registry import find_algorithm, recorded
from partwise.config.settings import parse_toml
from partwise.data.sqlite_table import sqlite_place
from partwise.data.store import ClientStore
from partwise.data.store import open_store as open_folder
from partwise.deployment.link import Offer
from partwise.runs.client_file import Form, check_from_tables, read_clients, tell_unknown
from partwise.runs.resolve import entry_of
from partwise.types import UserError

log = logging.getLogger("partwise.agent")
STORE = "store:"

Stamp = tuple[tuple[str, int, int, int], ...]  # (name, inode, size, time of the last change) of every file


def open_store(offer: Offer, place: str, id: str | None = None) -> ClientStore:
    """The clients in a device's own table, with the columns that the run's model reads.

    Args:
        offer: What the run is.
        place: A .csv, .tsv, .parquet, .arrow or .feather file, a folder of .parquet files, or
            `sqlite:PATH?table=NAME`, `sqlite:PATH?query=SELECT ...`, or `store:FOLDER` with what
            `ClientStore.save` wrote, whose keys must be the model's.
        id: The only client that is wanted; if the table does not name its clients, the client of all rows.
    """
    if place.startswith(STORE):
        return _saved_store(offer, place.removeprefix(STORE))
    found = read_clients(place, form_of(offer), id)
    for name, count in found.unknown.items():
        if count:
            log.warning(tell_unknown(place, name, count))
    return found.examples


def _saved_store(offer: Offer, folder: str) -> ClientStore:
    """A store that was saved as the run's model reads it: with its keys, in their order."""
    store = open_folder(folder)
    for name, ids in offer.vocabularies.items():
        if name in store.columns and store.vocabularies.get(name, np.zeros(0)).tolist() != ids:
            raise UserError(
                f"the keys of '{name}' in '{folder}' are not those of the run: give a table with the ids themselves"
            )
    setting = entry_of(recorded(parse_toml(offer.config)).task).settings(**offer.options)[0]
    for name in setting.columns:
        shape = offer.shapes[name]
        if name not in store.columns or list(store.columns[name].shape[1:]) != list(shape):
            raise UserError(f"'{folder}' must have a column '{name}' with values of shape {shape}")
    return store


def form_of(offer: Offer) -> Form:
    """How a device's table is read. Raises `UserError` if the offer makes no sense, or if its model cannot be read
    from a table."""
    try:
        return _form(offer)
    except UserError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise UserError(f"what the server says of its run cannot be read: {error!r}") from None


def _form(offer: Offer) -> Form:
    config = recorded(parse_toml(offer.config))
    personal, stateful = entry_of(config.task).settings(**offer.options)
    setting = stateful if find_algorithm(config.algorithm).trains == "stateful" and stateful else personal
    vocabularies = {name: np.array(ids) for name, ids in offer.vocabularies.items()}
    numbered = [space for space in setting.own_spaces if space not in vocabularies]
    if numbered:
        raise UserError(
            f"{config.algorithm} trains a table on the server with a row for every client ('{numbered[0]}'), and "
            f"a device's own table cannot say which row is its client's: run an algorithm with local parameters, "
            f"such as fed_recon"
        )
    check_from_tables(vocabularies, [name for name in setting.columns if name in vocabularies])
    names = {name: str(config.data.get(name, name)) for name in setting.columns}
    client = str(config.data.get("client", offer.client))
    return Form(
        names=names,
        vocabularies=vocabularies,
        shapes={name: tuple(shape) for name, shape in offer.shapes.items()},
        client_column=None if client in names.values() else client,
        dialect={name: config.data[name] for name in ("delimiter", "encoding") if name in config.data},
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
