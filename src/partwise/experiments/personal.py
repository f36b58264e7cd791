"""An unseen client with a file of its own: rebuild the local part, store it, refresh it, use it. All offline.

FedRecon, section 4.1: "clients can perform reconstruction once and store local parameters for repeated use,
optionally refreshing them periodically"; patent claim 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.algorithms.device import Device, send
from partwise.checkpoint import load_arrays, save_arrays
from partwise.config.evaluation import evaluation_build, judged_setting
from partwise.config.settings import Config
from partwise.data.store import ClientStore, group_rows
from partwise.data.table import read_table
from partwise.experiments.folder import Folder
from partwise.experiments.resolve import entry_of
from partwise.randomness import EVALUATION_ROUND, round_rng
from partwise.tasks import Setting
from partwise.types import UserError, unknown


class ClientFile(NamedTuple):
    """A client's own table: the rows that the model can use, which rows those are, and how many it cannot."""

    examples: ClientStore
    rows: np.ndarray  # [rows used] their numbers in the file
    unknown: dict[str, int]  # column -> rows that name a key which the model does not have


class Personal:
    """A trained model on one client."""

    def __init__(
        self, config: Config, setting: Setting, params: Mapping[str, Any], vocabularies: Mapping[str, Any]
    ):
        setting = judged_setting(setting, config)
        self.setting, self.vocabularies = setting, vocabularies
        self.names = {
            name: str(config.data.get(name, name)) for name in setting.columns
        }  # in the user's files
        self.client_column = str(config.data.get("client", "user"))
        self.params = setting.partition.server_leaves(params)
        self.rng = round_rng(config.seed, EVALUATION_ROUND)
        build, rates = evaluation_build(setting, config)
        self.device = Device(build(rates))

    @classmethod
    def open(cls, run: str | Path) -> Personal:
        """From a run's folder; its training data is not needed."""
        folder = Folder(run)
        config = folder.config()
        setting = entry_of(config.task).settings(**folder.model_options())[0]
        return cls(config, setting, folder.model(), folder.vocabularies())

    def personalize(
        self, examples: ClientStore, local: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """The local part, from fresh values or (to refresh it) from the one there was."""
        if local is not None:
            self._check_local(local)
        return self.device.personalize(self._message(examples), examples, local=local)

    def predict(self, local: Mapping[str, Any], examples: ClientStore) -> np.ndarray:
        """The model's output for each example."""
        self._check_local(local)
        try:
            return self.device.predict(self._message(examples), local, examples)
        except KeyError as error:
            raise UserError(f"the model reads the column {error}, which the client's table has not") from None

    def _check_local(self, local: Mapping[str, Any]) -> None:
        partition = self.setting.partition
        wanted = {path: tuple(partition.shapes[path].shape) for path in partition.local_paths}
        found = {path: np.shape(leaf) for path, leaf in local.items()}
        if found != wanted:
            raise UserError(
                f"this local part has {_shapes(found)}, and the model needs {_shapes(wanted)}: it was rebuilt for "
                f"another model. Rebuild it for this one (`partwise personalize`)"
            )

    def _message(self, examples: ClientStore) -> bytes:
        """What the client would fetch: here from the model at hand."""
        partition = self.setting.partition
        return send(partition, self.params, self.device.ask_whole(examples).keys, self.rng)

    def columns_in(self, path: str | Path) -> tuple[str, ...]:
        """The model's columns that a file has: its keys, which it must have, and others that can be read."""
        others = [name for name in self.setting.columns if name not in self.vocabularies]
        there = [name for name in others if _column(path, self.names[name], key=False) is not None]
        return tuple(n for n in self.setting.columns if n in self.vocabularies or n in there)

    def read(self, path: str | Path, columns: tuple[str, ...], client_id: str | None = None) -> ClientFile:
        """One client's CSV or Parquet file with these columns, ids as in the source of the training data.

        Of a table of several clients, the rows of `client_id`. Rows with ids that the model has never met cannot
        be used; they are counted.
        """
        named = [name for name in columns if name in self.vocabularies]
        self._check_from_tables(named)
        names = {self.names[name]: name for name in columns}
        table = read_table(path, client=None, columns=list(names), ids=[self.names[name] for name in named])
        table = table.rename(names)
        own = self._own_rows(path, client_id, table.num_examples)
        rows, keep, strange = dict(table.columns), own.copy(), {}
        for name in named:
            keys, known = _look_up(self.vocabularies[name], table.vocabularies[name])
            strange[name] = int((own & ~known[rows[name]]).sum())
            keep &= known[rows[name]]
            rows[name] = keys[rows[name]]
        if not keep.any():
            raise UserError(f"'{path}': none of its {own.sum()} rows names anything that the model knows")
        rows = {name: values[keep] for name, values in rows.items()}
        store = group_rows(np.zeros(int(keep.sum()), np.int64), rows, (), {"source": str(path)})
        return ClientFile(store, np.flatnonzero(keep), strange)

    def _check_from_tables(self, named: Sequence[str]) -> None:
        """Keys of tables are sorted by id; those of words by how frequent they are."""
        for name in named:
            ids = self.vocabularies[name]
            if np.any(ids[1:] < ids[:-1]):
                raise UserError(
                    f"the column '{name}' of this model was made of text, and a client's file can only be read "
                    f"where its columns are the model's own: in Python give `Personal.personalize` and "
                    f"`Personal.predict` the client's store, made as the training data was (docs/data.md, Text)"
                )

    def _own_rows(self, path: str | Path, client_id: str | None, num_rows: int) -> np.ndarray:
        """Which rows are the client's: all, or where a column names clients, those of one."""
        name = self.client_column
        clients = None if name in self.names.values() else _column(path, name)
        if clients is None:
            if client_id is not None:
                raise UserError(
                    f"'{path}' has no column '{name}', in which client '{client_id}' could be found"
                )
            return np.ones(num_rows, bool)
        ids = clients.vocabularies[name].astype(str)
        if client_id is None and len(ids) > 1:
            raise UserError(
                f"'{path}' holds rows of {len(ids)} clients (column '{name}'), and a client has its own rows only: "
                f"pick one, as in --id {ids[0]} (client_id={str(ids[0])!r})"
            )
        if client_id is not None and client_id not in ids:
            raise unknown("client", client_id, ids)
        return ids[clients.columns[name]] == (ids[0] if client_id is None else client_id)


def _column(path: str | Path, name: str, key: bool = True) -> ClientStore | None:
    """One column of a table, in the order of its rows; None if it is not there or cannot be read."""
    try:
        return read_table(path, client=None, columns=[name], ids=[name] if key else [])
    except UserError:
        return None


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{path} {shape}" for path, shape in shapes.items()) or "nothing"


def _look_up(vocabulary: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(key of each id, whether it has one); the vocabulary is sorted."""
    if vocabulary.dtype.kind in "US" and values.dtype.kind not in "US":
        values = values.astype(str)
    place = np.minimum(np.searchsorted(vocabulary, values), len(vocabulary) - 1)
    return place.astype(np.int32), vocabulary[place] == values


def save_local(path: str | Path, local: Mapping[str, Any], run: str) -> None:
    """Store a local part; it belongs to the client, goes nowhere else, and only its owner may read it."""
    save_arrays(Path(path), local, {"run": run, "kind": "local"}, mode=0o600)


def load_local(path: str | Path) -> dict[str, np.ndarray]:
    """A local part that was stored before."""
    arrays, header = load_arrays(Path(path))
    if header.get("kind") != "local":
        raise UserError(f"'{path}' is not a local part written by `partwise personalize`")
    return arrays
