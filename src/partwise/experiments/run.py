"""Train, evaluate, resume: a task and a configuration into a run, recorded in a folder."""

from __future__ import annotations

import dataclasses
import math
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from partwise.algorithms.base import init_params
from partwise.algorithms.device import Device, send
from partwise.config.algorithms import Prepared, prepare
from partwise.config.settings import Config
from partwise.data.store import ClientStore
from partwise.experiments.folder import Folder, as_record
from partwise.experiments.personal import Personal
from partwise.experiments.picture import learning_curve
from partwise.simulation.clock import compile_seconds
from partwise.simulation.evaluate import Evaluator
from partwise.simulation.lanes import choose_lanes
from partwise.simulation.loop import INIT_ROUND, Simulation, round_rng
from partwise.simulation.plain import PlainSimulation
from partwise.tasks import Task, defaults_of, load_task
from partwise.types import UserError


class Status(NamedTuple):
    """Where a run is, for a progress bar."""

    round: int
    rounds: int
    loss: float
    evaluation: Mapping[str, Any] | None


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


def resolve(task: str | Task, data: str | None, changes: Mapping[str, Any]) -> tuple[Task, Config]:
    """The task, and the configuration: defaults, then the task's published settings, then `changes`."""
    name = task if isinstance(task, str) else task.name
    given = dict(changes) | ({"data.path": str(data)} if data else {})
    asked = Config(task=name).changed(given)
    if isinstance(task, str):
        options = {key: value for key, value in asked.data.items() if key != "path"}
        task = load_task(name, asked.data.get("path"), **options)
    return task, Config(task=name).changed(defaults_of(task, asked.algorithm)).changed(given)


def train(
    task: str | Task = "planted",
    *,
    data: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress = silent,
    changes: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Train a task (by name, or one of your own) and evaluate it on its test clients.

    `settings` are keys of the configuration, with `__` for the dot: rounds=100, reconstruct__rate=0.5; `changes`
    are the same with dots. With `out` the run is recorded in that folder, and `resume` goes on where a killed
    run stopped.
    """
    changes = {**(changes or {}), **{key.replace("__", "."): value for key, value in settings.items()}}
    folder = Folder(out) if out is not None else None
    if resume and folder is None:
        raise UserError("--resume needs the folder of the run: --out DIR")
    if resume and folder is not None and folder.exists():
        saved = folder.config()
        task = saved.task if isinstance(task, str) else task
        loaded, config = resolve(task, data or saved.data.get("path"), saved.flat() | changes)
        if dataclasses.replace(config, rounds=saved.rounds) != saved:
            raise UserError("a resumed run keeps its configuration: only --rounds may be given with --resume")
        if config.rounds != saved.rounds and saved.server.schedule != "constant":
            raise UserError(
                f"the rate of this run falls over its {saved.rounds} rounds; it cannot be made longer"
            )
        return _train(loaded, config, folder, progress)
    loaded, config = resolve(task, data, changes)
    if folder is not None:
        folder.start(config, loaded.options, loaded.train.vocabularies)
    return _train(loaded, config, folder, progress)


def _train(task: Task, config: Config, folder: Folder | None, progress: Progress) -> Run:
    began, compiling = time.perf_counter(), compile_seconds()
    prepared = prepare(task, config)
    check_fit(prepared, config)
    saved = folder.last_checkpoint() if folder else None
    simulation = make_simulation(prepared, config, saved.header["lanes"] if saved else 0)
    records: list[dict[str, Any]] = []
    if saved:
        simulation.state, simulation.round = saved.load(simulation.state), saved.header["round"]
    if folder:
        records = folder.forget_after(simulation.round)
    evaluate = make_evaluator(prepared, config, task.validation, task.test)
    every, saving = config.simulation.evaluate_every, config.simulation.checkpoint_every
    while simulation.round < config.rounds:
        due, save = _next(simulation.round, every), _next(simulation.round, saving)
        stop = min(due, save, config.rounds)
        fresh = []
        for call in simulation.run(stop - simulation.round):
            fresh += [as_record(record) for record in call]
            progress(Status(simulation.round, config.rounds, call[-1].loss, None))
        if stop in (due, config.rounds):
            fresh[-1]["evaluation"] = evaluate(simulation.state.params)
            progress(Status(stop, config.rounds, fresh[-1]["train"]["loss"], fresh[-1]["evaluation"]))
        records += fresh
        if folder:
            folder.append(fresh)
            if stop in (save, config.rounds):
                folder.save_checkpoint(simulation.state, stop, {"lanes": simulation.lanes})
    test = evaluate.of(task.test.select(prepared.evaluated.columns))(simulation.state.params)
    params = {path: np.asarray(leaf) for path, leaf in simulation.state.params.items()}
    summary = _summary(task, config, records, test) | {
        "lanes": simulation.lanes,
        "seconds_total": time.perf_counter() - began,
        "seconds_compile": compile_seconds() - compiling,
    }
    if folder:
        folder.save_model(params, {"task": config.task, "round": simulation.round})
        folder.save_summary(summary)
        learning_curve(folder.path / "curve.png", records, summary)
    return Run(config, task, params, summary, records)


def _next(round_number: int, every: int) -> int:
    """The next multiple; 0 means never."""
    return (round_number // every + 1) * every if every > 0 else sys.maxsize


def check_fit(prepared: Prepared, config: Config) -> None:
    """Raise if the algorithm does not fit the model, by a look at the largest client."""
    algorithm = prepared.build(prepared.rates)
    if algorithm.check is None:
        return
    examples = prepared.store.gather([int(np.argmax(prepared.store.counts))])
    rng = round_rng(config.seed, INIT_ROUND)
    device = Device(algorithm)
    keys = device.ask(examples).keys
    device.check(send(algorithm.partition, init_params(algorithm, rng), keys, rng), examples)


def make_simulation(prepared: Prepared, config: Config, lanes: int = 0) -> Simulation | PlainSimulation:
    """The backend that the configuration names; lanes measured unless they are given."""
    given = (prepared.build, prepared.rates, prepared.store, prepared.recruiting)
    if config.simulation.backend == "plain":
        return PlainSimulation(*given, seed=config.seed)
    if config.simulation.backend != "compiled":
        raise UserError(f"simulation.backend must be compiled or plain, not '{config.simulation.backend}'")
    per_call = config.simulation.rounds_per_call
    make = lambda count: Simulation(*given, seed=config.seed, lanes=count, rounds_per_call=per_call)
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
    run: str | Path, split: str = "test", changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Evaluate a recorded run again, perhaps with other settings (another number of reconstruction steps)."""
    folder = Folder(run)
    saved = folder.config()
    task, config = resolve(saved.task, saved.data.get("path"), saved.flat() | dict(changes or {}))
    stores = {"train": task.train, "validation": task.validation, "test": task.test}
    if split not in stores:
        raise UserError(f"--split must be one of {', '.join(stores)}, not '{split}'")
    return make_evaluator(prepare(task, config), config, stores[split])(folder.model())


def _summary(task: Task, config: Config, records: list, test: Mapping[str, Any]) -> dict[str, Any]:
    clients = max(sum(r["clients"] + r["empty"] + len(r["broken"]) for r in records), 1)
    return {
        "task": config.task,
        "algorithm": config.algorithm,
        "seed": config.seed,
        "rounds": config.rounds,
        "seconds_per_round": float(np.median([record["seconds"] for record in records]))
        if records
        else math.nan,
        "test": dict(test),
        "best": dict(task.best),
        "bytes_down_per_client": sum(record["bytes_down"] for record in records) / clients,
        "bytes_up_per_client": sum(record["bytes_up"] for record in records) / clients,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("partwise", "jax", "optax", "numpy")},
        },
    }
