"""Train and evaluate: a task and a configuration into a run, recorded in a folder."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.config.algorithms import Prepared, prepare
from partwise.config.settings import Config
from partwise.data.store import ClientStore
from partwise.experiments.checks import check_cohort, check_counted, check_fit, check_model
from partwise.experiments.folder import Folder, as_record
from partwise.experiments.personal import Personal
from partwise.experiments.picture import learning_curve
from partwise.experiments.resolve import reopened, resolve, resumed
from partwise.experiments.summary import judged, summarize_run
from partwise.simulation.clock import compile_seconds
from partwise.simulation.evaluate import Evaluator, KeptOf
from partwise.simulation.lanes import choose_lanes
from partwise.simulation.loop import Simulation
from partwise.simulation.plain import PlainSimulation
from partwise.tasks import Task
from partwise.types import UserError

SPLITS = ("train", "validation", "test")


class Status(NamedTuple):
    """Where a run is, for a progress bar."""

    round: int
    rounds: int
    loss: float
    evaluation: Mapping[str, Any] | None
    part: str = ""  # which of several trainings


Progress = Callable[[Status], None]


def silent(status: Status) -> None:
    """Show no progress."""


class Run(NamedTuple):
    """A finished run: its results and its model."""

    config: Config
    task: Task
    params: Mapping[str, Any]
    summary: Mapping[str, Any]
    records: list[dict[str, Any]]

    @property
    def test(self) -> Mapping[str, Any]:
        """The metrics of the test clients."""
        return self.summary["test"]

    @property
    def personal(self) -> Personal:
        """The trained model for one client, which rebuilds and uses its local part offline."""
        return Personal(self.config, self.task.personal, self.params, self.task.train.vocabularies)


def train(
    task: str | Task | None = None,
    *,
    data: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress = silent,
    changes: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Train a task (by name, or one of your own; by default `planted`) and evaluate it on its test clients.

    `settings` are keys of the configuration, with `__` for the dot: rounds=100, reconstruct__rate=0.5; `changes`
    are the same with dots. With `out` the run is recorded in that folder, and `resume` goes on where a killed
    run stopped.
    """
    changes = {**(changes or {}), **{key.replace("__", "."): value for key, value in settings.items()}}
    folder = Folder(out) if out is not None else None
    if resume:
        if folder is None:
            raise UserError("to resume a run, say where it is: --out DIR (in Python, out=...)")
        return _train(*resumed(folder, task, data, changes), folder, progress)
    if folder is not None:
        folder.check_free()
    return _train(*resolve(task or "planted", data, changes), folder, progress)


def _train(task: Task, config: Config, folder: Folder | None, progress: Progress) -> Run:
    began, compiling = time.perf_counter(), compile_seconds()
    prepared = prepare(task, config)
    check_cohort(prepared)
    check_fit(prepared, config)
    saved = folder.last_checkpoint() if folder else None
    simulation = make_simulation(prepared, config, saved.header["lanes"] if saved else 0)
    if saved:
        simulation.resume(saved.load(simulation.snapshot()), saved.header["round"])
    evaluate = make_evaluator(prepared, config, task.validation, task.test)
    with recording(folder, task, config):
        records = _rounds(simulation, evaluate, config, folder, progress)
    test = evaluate.of(task.test.select(prepared.evaluated.columns))(
        simulation.state.params, kept=simulation.kept_of
    ) | {"judged": judged(task, prepared, config)}
    params = {path: np.asarray(leaf) for path, leaf in simulation.state.params.items()}
    summary = summarize_run(task, config, records, test) | {
        "lanes": simulation.lanes,
        "seconds_total": time.perf_counter() - began,
        "seconds_compile": compile_seconds() - compiling,
    }
    if folder:
        folder.save_model(params, {"task": config.task, "round": simulation.round})
        folder.save_summary(summary)
        learning_curve(folder.path / "curve.png", records, summary)
    return Run(config, task, params, summary, records)


def _rounds(
    simulation: Simulation | PlainSimulation,
    evaluate: Evaluator,
    config: Config,
    folder: Folder | None,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Run the rounds that are left; the records of all."""
    records = folder.forget_after(simulation.round) if folder else []
    every, saving = config.simulation.evaluate_every, config.simulation.checkpoint_every
    while simulation.round < config.rounds:
        due, save = _next(simulation.round, every), _next(simulation.round, saving)
        stop = min(due, save, config.rounds)
        fresh = []
        for call in simulation.run(stop - simulation.round):
            fresh += [as_record(record) for record in call]
            check_counted([*records, *fresh], config.rounds)
            progress(Status(simulation.round, config.rounds, call[-1].loss, None))
        if stop in (due, config.rounds):
            fresh[-1]["evaluation"] = evaluate(simulation.state.params, kept=simulation.kept_of)
            progress(Status(stop, config.rounds, fresh[-1]["train"]["loss"], fresh[-1]["evaluation"]))
        records += fresh
        if folder:
            folder.append(fresh)
            if stop in (save, config.rounds):
                folder.save_checkpoint(simulation.snapshot(), stop, {"lanes": simulation.lanes})
    return records


@contextmanager
def recording(folder: Folder | None, task: Task, config: Config) -> Iterator[None]:
    """Begin a run's folder, or note another number of rounds in it. Of a new run that fails before any client
    counted nothing is left."""
    if folder is None:
        yield
        return
    new = not folder.exists()
    if new:
        folder.start(config, task.options, task.train.vocabularies)
    else:
        folder.save_config(config)
    try:
        yield
    except UserError:
        if new and not any(record["clients"] for record in folder.records()):
            folder.discard()
        raise


def _next(round_number: int, every: int) -> int:
    """The next multiple; 0 means never."""
    return (round_number // every + 1) * every if every > 0 else sys.maxsize


def make_simulation(prepared: Prepared, config: Config, lanes: int = 0) -> Simulation | PlainSimulation:
    """The backend that the configuration names; lanes measured unless they are given."""
    given = (prepared.build, prepared.rates, prepared.store, prepared.recruiting)
    if config.simulation.backend == "plain":
        return PlainSimulation(*given, seed=config.seed, serving=config.serving.way)
    if config.simulation.backend != "compiled":
        raise UserError(f"simulation.backend must be compiled or plain, not '{config.simulation.backend}'")
    make = lambda count: Simulation(
        *given,
        seed=config.seed,
        lanes=count,
        rounds_per_call=config.simulation.rounds_per_call,
        serving=config.serving.way,
    )
    wanted = lanes or config.simulation.lanes
    if wanted:
        return make(wanted)
    name = dataclasses.replace(config, seed=0, rounds=0).to_toml() + str(prepared.store)
    return choose_lanes(make, config.rounds, name)


def make_evaluator(prepared: Prepared, config: Config, store: ClientStore, *others: ClientStore) -> Evaluator:
    """Evaluation of these clients, in a program that fits the others too."""
    seen, *rest = (each.select(prepared.evaluated.columns) for each in (store, *others))
    return Evaluator(prepared.evaluation, prepared.rates, seen, seed=config.seed, others=rest)


def evaluate_run(
    run: str | Path,
    split: str = "test",
    changes: Mapping[str, Any] | None = None,
    data: str | None = None,
) -> dict[str, Any]:
    """Evaluate a recorded run again, perhaps with other settings (another number of reconstruction steps).

    `data` is where the run's data is, if not where it was.
    """
    if split not in SPLITS:
        raise UserError(f"the split must be one of {', '.join(SPLITS)}, not '{split}' (--split, split=)")
    folder = Folder(run)
    params = folder.model()
    task, config = reopened(folder, data, changes or {})
    prepared = prepare(task, config)
    check_model(folder, prepared, params)
    evaluate = make_evaluator(prepared, config, getattr(task, split))
    result = evaluate(params, kept=_kept_of(folder, prepared, config, evaluate))
    return result | {"judged": judged(task, prepared, config, split)}


def _kept_of(folder: Folder, prepared: Prepared, config: Config, evaluate: Evaluator) -> KeptOf | None:
    """What the clients of a finished run kept, from its last checkpoint, where they are judged with it."""
    if not evaluate.algorithm.judged_with:
        return None
    saved = folder.last_checkpoint()
    if saved is None:
        raise UserError(
            f"the clients of the run in '{folder.path}' are judged with what they kept, and its checkpoints, which "
            f"hold it, are gone: train it again"
        )
    simulation = make_simulation(prepared, config, saved.header["lanes"])
    simulation.resume(saved.load(simulation.snapshot()), saved.header["round"])
    return simulation.kept_of
