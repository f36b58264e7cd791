"""An unseen client with its own file: rebuild the local part, store it, refresh it, use it. All of this is
offline.

FedRecon, section 4.1: "clients can perform reconstruction once and store local parameters for repeated use,
optionally refreshing them periodically"; patent claim 9.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from partwise.algorithms.fed_recon import evaluation_build
from partwise.checkpoint import digest_of, load_arrays, read_header, save_arrays
from partwise.config.judged import judged_setting
from partwise.config.settings import Config
from partwise.data.ids import check_listed
from partwise.data.reading import regular
from partwise.data.store import ClientStore
from partwise.device import Device
from partwise.randomness import EVALUATION_ROUND, round_rng
from partwise.runs.client_file import (
    ClientFile,
    Form,
    Source,
    check_from_tables,
    read_client_file,
    readable,
    tell_unknown,
)
from partwise.runs.folder import Folder
from partwise.runs.resolve import entry_of
from partwise.runs.sanity import check_finite
from partwise.server.messages import send
from partwise.tasks import Setting
from partwise.types import RunWarning, UserError, unknown


class Personal:
    """A trained model on one client. It rebuilds and uses the client's local part offline.

    Make it from a run's folder with `Personal.open(folder)`, or from a finished run with `run.personal`.
    """

    def __init__(self, config: Config, setting: Setting, params: Mapping[str, Any], source: Source):
        setting = judged_setting(setting, config)
        self.setting, self.vocabularies, self.shapes = setting, source.vocabularies, source.shapes
        self.types = source.types
        self.names = {
            name: str(config.data.get(name, name)) for name in setting.columns
        }  # in the user's files
        self.client_column = str(config.data.get("client", source.client))
        self.dialect = {name: config.data[name] for name in ("delimiter", "encoding") if name in config.data}
        self.params = setting.partition.server_leaves(params)
        check_finite("the model", self.params)
        self.rng = round_rng(config.seed, EVALUATION_ROUND)
        build, rates = evaluation_build(setting, config)
        self.device = Device(build(rates))

    @classmethod
    def open(cls, run: str | Path) -> Personal:
        """Open the model in a run's folder. The training data is not needed.

        Args:
            run: The folder of a run of a named task.
        """
        folder = Folder(run)
        config = folder.config()
        setting = entry_of(config.task).settings(**folder.model_options())[0]
        return cls(config, setting, folder.model(), folder.source())

    @cached_property
    def digest(self) -> str:
        """The digest of the model. A local part that was rebuilt for this model contains it."""
        return digest_of(self.params, {})

    def personalize(
        self, examples: ClientStore | ClientFile, local: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """Rebuild the client's local part from all of these examples.

        Args:
            examples: What `read` returned, or a store with one client and the columns that the model reads.
            local: An earlier local part, to refresh it. Without it, the part starts with initial values.

        Returns:
            The local part, {path: array}.
        """
        examples = self._read_by_model(examples)
        if local is not None:
            self.check_local(local)
        found = self.device.personalize(self._message(examples), examples, local=local)
        check_finite("the local part that was rebuilt", found)
        return found

    def predict(self, local: Mapping[str, Any], examples: ClientStore | ClientFile) -> np.ndarray:
        """The model's outputs.

        Args:
            local: The client's local part, as `personalize` returned it.
            examples: What `read` returned, or a store with one client. Columns that only the loss reads may be
                missing.

        Returns:
            The output of the model's `predict`. The first axis is the example.
        """
        examples = self._read_by_model(examples)
        self.check_local(local)
        found = self.device.predict(self._message(examples), local, examples)
        check_finite("what was predicted", {"outputs": found})
        return found

    def _read_by_model(self, examples: ClientStore | ClientFile) -> ClientStore:
        """Only the columns of the setting. Other columns, such as times, may hold values that a model cannot
        read."""
        examples = examples.examples if isinstance(examples, ClientFile) else examples
        if not isinstance(examples, ClientStore):
            raise UserError(
                f"the examples are a {type(examples).__name__}: give what `read` of the model returned for the "
                f"client's file, or a store with one client"
            )
        return examples.select([name for name in self.setting.columns if name in examples.columns])

    def check_local(self, local: Mapping[str, Any]) -> None:
        """Raise `UserError` if the local part does not have the paths and shapes of the model's."""
        partition = self.setting.partition
        wanted = {path: tuple(partition.shapes[path].shape) for path in partition.local_paths}
        found = {path: np.shape(leaf) for path, leaf in local.items()}
        if found != wanted:
            raise UserError(
                f"this local part has {_shapes(found)}, and the model needs {_shapes(wanted)}: it was rebuilt for "
                f"another model. Rebuild it for this one (`partwise personalize`)"
            )

    def _message(self, examples: ClientStore) -> bytes:
        """The message that a client would be sent, made from the model at hand."""
        partition = self.setting.partition
        return send(partition, self.params, self.device.ask_whole(examples).keys, self.rng)

    def columns_in(self, path: str | Path) -> tuple[str, ...]:
        """The model's columns that a file has: the key columns, which it must have, and other columns that
        can be read."""
        others = [name for name in self.setting.columns if name not in self.vocabularies]
        there = readable(path, [self.names[name] for name in others], self.dialect)
        return tuple(n for n in self.setting.columns if n in self.vocabularies or self.names[n] in there)

    def read(self, path: str | Path, columns: Sequence[str], client_id: str | None = None) -> ClientFile:
        """Read one client's table (CSV, Parquet, Arrow), with the ids of the source of the training data.

        Args:
            path: The file.
            columns: The columns to read, by their names in the model: ("item", "rating").
            client_id: Which client's rows to take, if the table has several clients.

        Returns:
            A `ClientFile`: `examples` (a store with one client), `rows` (their numbers in the file) and
                `unknown` (how many rows were left out because the model does not know an id in them, which is
                also a warning). Lists of ids have the same length as in training: only the last ids are kept.
        """
        check_listed("columns", columns)
        for name in columns:
            if name not in self.names:
                raise unknown("column of the model", name, self.names)
        check_from_tables(self.vocabularies, [name for name in columns if name in self.vocabularies])
        form = Form(
            {name: self.names[name] for name in columns},
            self.vocabularies,
            self.shapes,
            None if self.client_column in self.names.values() else self.client_column,
            self.dialect,
        )
        file = read_client_file(path, form, client_id)
        for name, count in file.unknown.items():
            if count:
                told = f"{tell_unknown(path, name, count)} (in Python, `rows` of what was read says which are used)"
                warnings.warn(told, RunWarning, stacklevel=2)
        return file


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{path} {shape}" for path, shape in shapes.items()) or "nothing"


def save_local(path: str | Path, local: Mapping[str, Any], model: str) -> None:
    """Store a local part. It belongs to the client and should stay there. Only the owner of the file may read
    it.

    Args:
        path: The file to write. An existing file that is not a local part is not overwritten.
        local: The local part, as `Personal.personalize` returned it.
        model: The digest of the model for which it was rebuilt: `Personal.digest`.
    """
    if Path(path).exists() and Path(path).stat().st_size and not _is_local(path):
        raise UserError(
            f"'{path}' is there, and is not a local part: choose another name with --out (out=...)"
        )
    save_arrays(Path(path), local, {"model": model, "kind": "local"}, mode=0o600)


def load_local(path: str | Path, model: str | None = None) -> dict[str, np.ndarray]:
    """Load a local part that `save_local` stored, {path: array}.

    Args:
        path: The file.
        model: The digest of the model (`Personal.digest`) for which it must have been rebuilt; None accepts
            any.
    """
    if not _is_local(regular(path, "give the file that `partwise personalize` wrote")):
        raise UserError(f"'{path}' is not a local part, or is damaged: `partwise personalize` writes one")
    arrays, header = load_arrays(Path(path))
    if model is not None and header.get("model") != model:
        raise UserError(
            f"the local part in '{path}' was rebuilt for another model, and means nothing to this one: rebuild it "
            f"with `partwise personalize` (--local {path} goes on from it)"
        )
    return arrays


def _is_local(path: str | Path) -> bool:
    try:
        return read_header(Path(path)).get("kind") == "local"
    except UserError:
        return False
