"""An unseen client with a file of its own: rebuild the local part, store it, refresh it, use it. All offline.

FedRecon, section 4.1: "clients can perform reconstruction once and store local parameters for repeated use,
optionally refreshing them periodically"; patent claim 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from partwise.algorithms.fed_recon import evaluation_build
from partwise.checkpoint import digest_of, load_arrays, read_header, save_arrays
from partwise.config.judged import judged_setting
from partwise.config.settings import Config
from partwise.data.reading import regular
from partwise.data.store import ClientStore
from partwise.device import Device
from partwise.randomness import EVALUATION_ROUND, round_rng
from partwise.runs.client_file import ClientFile, Form, Source, read_client_file, readable
from partwise.runs.folder import Folder
from partwise.runs.resolve import entry_of
from partwise.runs.sanity import check_finite
from partwise.server.messages import send
from partwise.tasks import Setting
from partwise.types import UserError


class Personal:
    """A trained model on one client, which rebuilds and uses its local part offline.

    From a run's folder by `Personal.open(folder)`, or from a finished run by `run.personal`.
    """

    def __init__(self, config: Config, setting: Setting, params: Mapping[str, Any], source: Source):
        setting = judged_setting(setting, config)
        self.setting, self.vocabularies, self.shapes = setting, source.vocabularies, source.shapes
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
        """From a run's folder; its training data is not needed.

        Args:
            run: The folder of a run of a named task.
        """
        folder = Folder(run)
        config = folder.config()
        setting = entry_of(config.task).settings(**folder.model_options())[0]
        return cls(config, setting, folder.model(), folder.source())

    @cached_property
    def digest(self) -> str:
        """The model in one word, which a local part that was rebuilt for it carries."""
        return digest_of(self.params, {})

    def personalize(
        self, examples: ClientStore, local: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """The client's local part, rebuilt from all of these examples.

        Args:
            examples: A store of one client, with the columns that the model reads.
            local: The local part there was, to refresh it; without it, the part begins with fresh values.

        Returns:
            The local part, {path: array}.
        """
        examples = self._read_by_model(examples)
        if local is not None:
            self._check_local(local)
        found = self.device.personalize(self._message(examples), examples, local=local)
        check_finite("the local part that was rebuilt", found)
        return found

    def predict(self, local: Mapping[str, Any], examples: ClientStore) -> np.ndarray:
        """The model's outputs.

        Args:
            local: The client's local part, as `personalize` gave it.
            examples: A store of one client; columns that only the loss reads may be missing.

        Returns:
            What the model's `predict` gives: the first axis is the example.
        """
        examples = self._read_by_model(examples)
        self._check_local(local)
        found = self.device.predict(self._message(examples), local, examples)
        check_finite("what was predicted", {"outputs": found})
        return found

    def _read_by_model(self, examples: ClientStore) -> ClientStore:
        """Only the columns of the setting: others, such as times, need not be numbers that a model can read."""
        return examples.select([name for name in self.setting.columns if name in examples.columns])

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
        there = readable(path, [self.names[name] for name in others], self.dialect)
        return tuple(n for n in self.setting.columns if n in self.vocabularies or self.names[n] in there)

    def read(self, path: str | Path, columns: tuple[str, ...], client_id: str | None = None) -> ClientFile:
        """One client's table (CSV, Parquet, Arrow), with ids as in the source of the training data.

        Args:
            path: The file.
            columns: The columns to read, by their names in the model.
            client_id: Of a table of several clients, whose rows to take.

        Returns:
            A `ClientFile`: `examples` (a store of one client), `rows` (their numbers in the file) and
            `unknown` (how many rows were left out, because the model has never met an id in them). Lists of
            ids have as much room as in training: the last ones are kept.
        """
        self._check_from_tables([name for name in columns if name in self.vocabularies])
        form = Form(
            {name: self.names[name] for name in columns},
            self.vocabularies,
            self.shapes,
            None if self.client_column in self.names.values() else self.client_column,
            self.dialect,
        )
        return read_client_file(path, form, client_id)

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


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{path} {shape}" for path, shape in shapes.items()) or "nothing"


def save_local(path: str | Path, local: Mapping[str, Any], model: str) -> None:
    """Store a local part; it belongs to the client, goes nowhere else, and only its owner may read it.

    Args:
        path: Where to; a file that is not a local part is not overwritten.
        local: The local part, as `Personal.personalize` gave it.
        model: The digest of the model that it was rebuilt for: `Personal.digest`.
    """
    if Path(path).exists() and Path(path).stat().st_size and not _is_local(path):
        raise UserError(
            f"'{path}' is there, and is not a local part: choose another name with --out (out=...)"
        )
    save_arrays(Path(path), local, {"model": model, "kind": "local"}, mode=0o600)


def load_local(path: str | Path, model: str | None = None) -> dict[str, np.ndarray]:
    """A local part that was stored before, {path: array}.

    Args:
        path: The file.
        model: The digest of the model (`Personal.digest`) that it must have been rebuilt for; None: any.
    """
    arrays, header = load_arrays(regular(path, "give the file that `partwise personalize` wrote"))
    if header.get("kind") != "local":
        raise UserError(f"'{path}' is not a local part written by `partwise personalize`")
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
