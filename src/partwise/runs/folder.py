"""A run's folder. It is written so that a kill at any moment loses only the rounds since the last checkpoint.
It is read only if it is as it was written."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.checkpoint import (
    load_arrays,
    load_json,
    load_text,
    load_tree,
    read_header,
    remove_temporary_files,
    save_arrays,
    save_json,
    save_text,
    save_tree,
    write_file,
)
from partwise.config.settings import LATER as LATER_SETTINGS
from partwise.config.settings import Config, read_toml
from partwise.plugins import is_code
from partwise.runs import lock, records
from partwise.runs.client_file import Source
from partwise.runs.document import to_plain
from partwise.runs.trust import SETTINGS, SIGNED, settings_digest, sign
from partwise.types import RunWarning, UserError

KEEP_CHECKPOINTS = 2
MOST_RUNS = 10  # named in one message
MAY_CHANGE = (  # when a run continues
    "rounds",
    "data.path",
    "simulation.patience",
    "simulation.tables",
    "stop.metric",
    "stop.patience",
    "stop.difference",
    "stop.seconds",
)
LAST, BEST = "model.safetensors", "best.safetensors"  # the models of a run
FAILED = "failed.json"  # why the training of a run went wrong
CLOCK = "clock.json"  # the seconds that a run with a budget of them has taken
AT_START = ("model.json", "vocabularies.json", "start.json", "config.toml")  # written in this order
LATER = ("metrics.jsonl", "checkpoints", "model.safetensors", BEST, CLOCK, FAILED, "summary.json")


def identity(config: Config, begun: Mapping[str, Any]) -> str:
    """A digest of the run: its data and its settings, without how rounds are run and without what may change
    when the run continues. Every file of a simulation's folder contains it, so that files of another run are not
    used by mistake."""
    usual = {key: value for key, value in Config().flat().items() if key.startswith(LATER_SETTINGS)}
    plain = lambda key: key not in MAY_CHANGE and not key.startswith(("simulation.", "deploy."))
    settings = {key: value for key, value in config.flat().items() if plain(key) and usual.get(key) != value}
    told = json.dumps([to_plain(settings), to_plain(begun.get("data"))], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def _tell_runs(path: Path) -> str:
    """The runs in a folder, or else beside it, for a message."""
    for folder in (path, path.parent, path.parent / "runs"):
        found = sorted(str(file.parent) for file in folder.glob("*/config.toml"))
        if found:
            more = ", ..." if len(found) > MOST_RUNS else ""
            return f". Give one of the runs that are there: {', '.join(found[:MOST_RUNS])}{more}"
    return ": give the folder of a run, as `partwise train` names it at its end"


class Saved(NamedTuple):
    """A state of the server, from a checkpoint."""

    state: Any
    round: int
    capacity: Mapping[str, int]  # see `Backend`


class Folder:
    """The files of a run: config.toml, start.json, model.json, vocabularies.json, metrics.jsonl,
    checkpoints/, model.safetensors, summary.json, and best.safetensors if a best model is kept."""

    writes = True  # whether this process writes them (see runs.one_writer)

    def __init__(self, path: str | Path):
        self.path = lock.check_place(path)
        self.metrics = self.path / "metrics.jsonl"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for this writer alone. Half-written files of killed writers are removed."""
        with lock.held(self.path):
            for folder in (self.path, self.path / "checkpoints"):
                remove_temporary_files(folder)
            yield

    # The start

    def check_free(self) -> None:
        """Raise `UserError` if the folder already has a run, or parts of one."""
        if self.exists():
            raise UserError(
                f"'{self.path}' already holds a run: add --resume (resume=True) to go on, or choose another "
                f"folder with --out (out=...)"
            )
        left = [name for name in LATER if (self.path / name).exists()]
        if left:
            raise UserError(
                f"'{self.path}' holds {', '.join(left)} of a run, but no config.toml: move them away, or choose "
                f"another folder with --out (out=...)"
            )

    def start(
        self,
        config: Config,
        options: Mapping[str, Any],
        source: Source,
        begun: Mapping[str, Any],
        run: str | None = None,
    ) -> None:
        """Start a new run. Raises `UserError` if the folder already has one. `begun` is what must not change
        when the run continues. `run` is the run's own name; by default the digest of its settings and data: two
        simulations with the same ones have all results in common."""
        self.check_free()
        save_json(self.path / "model.json", to_plain(options))
        ids = {name: values.tolist() for name, values in source.vocabularies.items()}
        told = {
            "ids": ids,
            "shapes": to_plain(source.shapes),
            "client": source.client,
            "types": dict(source.types),
        }
        save_json(self.path / "vocabularies.json", told)
        digest = identity(config, begun)
        signed = {SIGNED: sign(digest)} if is_code(config.task) else {}
        named = {"run": digest} if run is None else {"run": run, SETTINGS: digest}
        save_json(self.path / "start.json", to_plain({**begun, **named, **signed}))
        self.save_config(config)

    def save_config(self, config: Config) -> None:
        """Write config.toml. From then on, the folder has a run."""
        save_text(self.path / "config.toml", config.to_toml())

    def discard(self) -> None:
        """Remove a run without results. Other files in the folder stay."""
        shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
        for name in (*reversed(AT_START), "metrics.jsonl", CLOCK):
            (self.path / name).unlink(missing_ok=True)

    def exists(self) -> bool:
        """Whether a run was started here."""
        return (self.path / "config.toml").exists()

    def config(self) -> Config:
        """The configuration of the run in this folder."""
        from partwise.algorithms.registry import recorded  # here, as it brings all of JAX

        config = recorded(self.settings())
        if identity(config, self.begun()) != settings_digest(self.begun()):
            raise UserError(
                f"'{self.path / 'config.toml'}' is of another run than the rest of the folder: put the run's own "
                f"file back, or train again in another folder"
            )
        return config

    def settings(self) -> dict[str, Any]:
        """What config.toml says, as dotted keys."""
        path = self.path / "config.toml"
        if not self.exists():
            raise UserError(
                f"'{self.path}' holds no run (there is no config.toml in it){_tell_runs(self.path)}"
            )
        try:
            load_text(path)
        except UserError as error:
            raise UserError(
                f"{error}. A run keeps its configuration: put the file back as it was; --rounds and --data change "
                f"what may be changed, and `partwise train --config` begins another run with an edited copy"
            ) from None
        return read_toml(path)

    def begun(self) -> dict[str, Any]:
        """What must not change when the run continues: lanes, devices, and the fingerprint of its data."""
        return load_json(self.path / "start.json")

    @cached_property
    def run(self) -> str:
        """The run's name, which its files contain: of a simulation its digest, of a deployed run a random one."""
        return self.begun()["run"]

    def model_options(self) -> dict[str, Any]:
        """The options that rebuild the run's model without its data."""
        return load_json(self.path / "model.json")

    def source(self) -> Source:
        """The form of the training data: ids, shapes, the client column."""
        found = load_json(self.path / "vocabularies.json")
        ids = {name: np.asarray(each) for name, each in found["ids"].items()}
        shapes = {name: tuple(shape) for name, shape in found["shapes"].items()}
        return Source(ids, shapes, found["client"], found.get("types", {}))

    # Rounds

    def append(self, rounds: Iterable[Mapping[str, Any]]) -> None:
        """Add rounds to metrics.jsonl."""
        records.append_records(self.metrics, rounds, self.run)

    def replace_records(self, rounds: Iterable[Mapping[str, Any]]) -> None:
        """Write metrics.jsonl anew."""
        write_file(self.metrics, b"".join(records.to_line(record, self.run) for record in rounds))

    def records(self) -> list[dict[str, Any]]:
        """All rounds so far. A last line that was cut short by a kill is left out."""
        return records.read_records(self.metrics, self.run)

    def rounds_done(self) -> int:
        """How many rounds need not be run again, if no file is damaged."""
        return max(self.checkpoints(), default=0)

    def save_checkpoint(self, state: Any, round_number: int, capacity: Mapping[str, int]) -> None:
        """Save the server's state after a round, when its records are on the disk. Only the last two
        checkpoints are kept."""
        records.flush_records(self.metrics)
        header = {"round": round_number, "run": self.run, "capacity": dict(capacity)}
        save_tree(self._checkpoint(round_number), state, header)
        for old in sorted(self.checkpoints())[:-KEEP_CHECKPOINTS]:
            self._checkpoint(old).unlink()

    def checkpoint(self, round_number: int, like: Any) -> Saved:
        """The state after that round, in the structure of `like`."""
        path = self._checkpoint(round_number)
        state, header = load_tree(path, like)
        if (header.get("round"), header.get("run")) != (round_number, self.run):
            raise UserError(f"'{path}' is of another round or run")
        return Saved(state, round_number, header.get("capacity", {}))

    def go_on(self, like: Any) -> Saved | None:
        """The last checkpoint that is whole and has whole records; None to start again. Later records are
        dropped.

        If the last checkpoint is damaged, the one before it is used, with a warning. If there are checkpoints
        but none can be used, raises `UserError`.
        """
        sound, problems = records.how_far(self.metrics, self.run), []
        saved = None
        for number in sorted(self.checkpoints(), reverse=True):
            try:
                if number > sound.rounds:
                    raise records.damaged_line(self.metrics, sound.rounds + 1, sound.problem)
                saved = self.checkpoint(number, like)
                break
            except UserError as error:
                problems.append(str(error))
        if problems and saved is None:
            raise UserError(f"the run in '{self.path}' cannot go on: {'; '.join(dict.fromkeys(problems))}")
        if sound.rounds and saved is None:
            warnings.warn(
                f"the run in '{self.path}' has no checkpoint, so it begins anew", RunWarning, stacklevel=2
            )
        if problems and saved:
            warnings.warn(
                f"going on from round {saved.round}, because {problems[0]}", RunWarning, stacklevel=2
            )
        records.keep_first(self.metrics, saved.round if saved else 0)
        return saved

    def drop_after(self, round_number: int) -> None:
        """Remove the checkpoints after a round, so that the run goes on from an earlier one."""
        for number in self.checkpoints():
            if number > round_number:
                self._checkpoint(number).unlink()

    def _checkpoint(self, round_number: int) -> Path:
        return self.path / "checkpoints" / f"{round_number:08d}.safetensors"

    def checkpoints(self) -> list[int]:
        """The rounds after which the state was saved, in order."""
        names = [path.stem for path in (self.path / "checkpoints").glob("*.safetensors")]
        return sorted(int(name) for name in names if name.isdecimal())

    # Results

    def save_model(
        self, params: Mapping[str, Any], header: Mapping[str, Any], place: str | Path = LAST
    ) -> None:
        """Save the server's leaves, by path."""
        save_arrays(self.path / place, params, {**header, "run": self.run})

    def model(self, which: str = "last", mapped: bool = False) -> dict[str, np.ndarray]:
        """The trained leaves: of the last round, or the best that the run kept. Raises `UserError` if the run is
        not finished, or kept none. `mapped` is as in `load_arrays`."""
        self.rounds_trained()
        if which not in ("last", "best"):
            raise UserError(f"the model must be last or best, not '{which}' (--model, model=)")
        path = self.path / (LAST if which == "last" else BEST)
        if not path.exists():
            raise UserError(
                f"the run in '{self.path}' kept no best model: use its last one, or train with --set "
                f"keep.best=METRIC"
            )
        arrays, header = load_arrays(path, mapped)
        if header.get("run") != self.run:
            raise UserError(
                f"'{path}' is the model of another run: put the run's own file back, or train again in another "
                f"folder"
            )
        return arrays

    def rounds_trained(self) -> int:
        """The number of rounds of a finished run. It may have ended before its last round (`stop`, or a budget of
        privacy). Raises `UserError` if the run is not finished."""
        path, config = self.path / LAST, self.config()
        header = read_header(path) if path.exists() else {}
        if header.get("round", -1) < config.rounds and header.get("ended") != self.ending(config):
            if failure := self.failure():
                raise UserError(f"the run in '{self.path}' has no model: {failure}")
            raise UserError(
                f"the run in '{self.path}' has not ended: go on with `partwise train --resume --out {self.path}`"
            )
        return header["round"]

    @staticmethod
    def ending(config: Config) -> dict[str, Any]:
        """What decides whether a run ends before its last round. The model of a run that did says so."""
        return dataclasses.asdict(config.stop) | {"rounds": config.rounds}

    def save_failure(self, reason: str) -> None:
        """Write failed.json: the training went wrong, and the run has no result."""
        save_json(self.path / FAILED, {"error": reason})

    def clear_failure(self) -> None:
        """Remove failed.json, as the run goes on."""
        (self.path / FAILED).unlink(missing_ok=True)

    def failure(self) -> str:
        """Why the training went wrong; empty if it did not."""
        return str(load_json(self.path / FAILED)["error"]) if (self.path / FAILED).exists() else ""

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        save_json(self.path / "summary.json", to_plain(summary))

    def summary(self) -> dict[str, Any]:
        """The summary of a finished run."""
        return load_json(self.path / "summary.json")
