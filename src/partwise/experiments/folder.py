"""A run's folder: what is in it, written so that a kill at any moment loses only the rounds since a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.checkpoint import load_arrays, load_tree, save_arrays, save_tree, write_file
from partwise.config.settings import Config, read_toml
from partwise.simulation.loop import Record
from partwise.types import UserError

KEEP_CHECKPOINTS = 2


class Checkpoint(NamedTuple):
    """A saved state of the server."""

    path: Path
    header: dict[str, Any]  # round, lanes

    def load(self, like: Any) -> Any:
        """The state, in the structure of `like`."""
        return load_tree(self.path, like)[0]


class Folder:
    """config.toml, metrics.jsonl, summary.json, model.safetensors, vocabularies.json, checkpoints/."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    # Configuration

    def check_free(self) -> None:
        """Raise if a run is here already, or if no folder can be made here."""
        if self.exists():
            raise UserError(
                f"'{self.path}' already holds a run: add --resume (resume=True) to go on, or choose another "
                f"folder with --out (out=...)"
            )
        parent = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            reason = "may not be written to" if parent.is_dir() else "is not a folder"
            raise UserError(
                f"could not make the run folder '{self.path}': '{parent}' {reason}. Choose another "
                f"with --out (out=...)"
            )

    def start(
        self, config: Config, options: Mapping[str, Any], vocabularies: Mapping[str, np.ndarray]
    ) -> None:
        """A new run: refuses a folder that holds one already."""
        self.check_free()
        write_file(self.path / "model.json", to_json(options))
        write_file(self.path / "vocabularies.json", to_json({n: v.tolist() for n, v in vocabularies.items()}))
        self.save_config(config)

    def save_config(self, config: Config) -> None:
        """config.toml; with it, there is a run here."""
        write_file(self.path / "config.toml", config.to_toml().encode())

    def discard(self) -> None:
        """Remove a run that came to nothing; what others put into the folder stays."""
        shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
        for name in ("config.toml", "model.json", "vocabularies.json", "metrics.jsonl"):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def exists(self) -> bool:
        """Whether a run was started here."""
        return (self.path / "config.toml").exists()

    def config(self) -> Config:
        """The configuration of the run in this folder."""
        if not self.exists():
            raise UserError(f"'{self.path}' holds no run (there is no config.toml in it)")
        return Config().changed(read_toml(self.path / "config.toml"))

    def model_options(self) -> dict[str, Any]:
        """What rebuilds the run's model without its data."""
        return self._read_json("model.json")

    def vocabularies(self) -> dict[str, np.ndarray]:
        """The source id of every key, by column."""
        return {name: np.asarray(ids) for name, ids in self._read_json("vocabularies.json").items()}

    # Records

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add rounds to metrics.jsonl."""
        try:
            with open(self.path / "metrics.jsonl", "a") as file:
                file.writelines(json.dumps(to_plain(record)) + "\n" for record in records)
        except OSError as error:
            raise UserError(
                f"could not write '{self.path / 'metrics.jsonl'}': {error.strerror}. Checkpoints are intact; make "
                f"room, then go on with --resume (resume=True)."
            ) from None

    def records(self) -> list[dict[str, Any]]:
        """All rounds so far; a last line that a kill cut short is left out."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        records = []
        for line in lines:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return records

    def forget_after(self, round_number: int) -> list[dict[str, Any]]:
        """Drop the rounds after that one, which will be run again; the others are returned."""
        kept = [record for record in self.records() if record["round"] <= round_number]
        write_file(self.path / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in kept).encode())
        return kept

    # Checkpoints and results

    def save_checkpoint(self, state: Any, round_number: int, header: Mapping[str, Any]) -> None:
        """The server's state after a round; the ones before the last two go."""
        folder = self.path / "checkpoints"
        save_tree(folder / f"{round_number:08d}.safetensors", state, {"round": round_number, **header})
        for old in sorted(folder.glob("*.safetensors"))[:-KEEP_CHECKPOINTS]:
            old.unlink()

    def last_checkpoint(self) -> Checkpoint | None:
        """The last state that was saved, if there is one."""
        saved = sorted((self.path / "checkpoints").glob("*.safetensors"))
        return Checkpoint(saved[-1], load_arrays(saved[-1])[1]) if saved else None

    def rounds_done(self) -> int:
        """How many rounds need not be run again."""
        saved = self.last_checkpoint()
        return saved.header["round"] if saved else 0

    def save_model(self, params: Mapping[str, Any], header: Mapping[str, Any]) -> None:
        """The server's leaves, by path."""
        save_arrays(self.path / "model.safetensors", params, header)

    def model(self) -> dict[str, np.ndarray]:
        """The trained leaves; of a run that has not ended, an error."""
        path, rounds = self.path / "model.safetensors", self.config().rounds
        arrays, header = load_arrays(path) if path.exists() else ({}, {"round": -1})
        if header.get("round", rounds) < rounds:
            raise UserError(
                f"the run in '{self.path}' has not ended: go on with `partwise train --resume --out {self.path}`"
            )
        return arrays

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        """summary.json."""
        write_file(self.path / "summary.json", to_json(summary))

    def summary(self) -> dict[str, Any]:
        """The summary of a run that has ended."""
        return self._read_json("summary.json")

    def _read_json(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text())
        except OSError as error:
            raise UserError(f"could not read '{self.path / name}': {error.strerror}") from None
        except json.JSONDecodeError as error:
            raise UserError(f"'{self.path / name}' is damaged: {error}") from None


def as_record(record: Record) -> dict[str, Any]:
    """A line of metrics.jsonl, not evaluated yet."""
    line = record._asdict()
    loss = line.pop("loss")
    if not record.serving:
        del line["serving"]
    return line | {"train": {"loss": loss}, "broken": list(record.broken), "evaluation": None}


def to_json(value: Any) -> bytes:
    """A JSON document."""
    return (json.dumps(to_plain(value), indent=1) + "\n").encode()


def to_plain(value: Any) -> Any:
    """JSON has no NaN: what is not a number is null."""
    if isinstance(value, Mapping):
        return {name: to_plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(inner) for inner in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value
