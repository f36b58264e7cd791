"""Train and evaluate: turn a task and a configuration into a run, recorded in a folder."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.algorithms.effects import read_of
from partwise.algorithms.registry import find_algorithm, prepare
from partwise.config.protection import Protection, protection
from partwise.config.settings import Config
from partwise.model.spec import check_arguments
from partwise.runs.backends import lanes_of, make_evaluator, make_simulation
from partwise.runs.client_file import source_of
from partwise.runs.fingerprint import fingerprint
from partwise.runs.folder import Folder
from partwise.runs.personal import Personal
from partwise.runs.recorder import Recorder
from partwise.runs.records import as_record
from partwise.runs.resolve import (
    check_resumable,
    resolve,
    resumed,
)
from partwise.runs.sanity import RATES, check_cohort, check_fit, check_going
from partwise.runs.summary import (
    device_words,
    judged,
    nobody_judged,
    past_its_best,
    summarize_run,
    tell_not_finite,
)
from partwise.runs.tally import Tally
from partwise.simulation.backend import Backend
from partwise.simulation.clock import compile_seconds
from partwise.simulation.evaluator import Evaluator
from partwise.simulation.mesh import use_all_cores
from partwise.tasks import Task
from partwise.types import RunWarning, UserError

DEFAULT = "planted"  # the task that is trained if none is named


class Status(NamedTuple):
    """How far a run is, for a progress bar."""

    round: int
    rounds: int
    loss: float
    evaluation: Mapping[str, Any] | None
    part: str = ""  # which of several trainings


OnStatus = Callable[[Status], None]


def silent(status: Status) -> None:
    """Show no progress."""


def untold(text: str) -> None:
    """Print nothing."""


class Run(NamedTuple):
    """A finished run: its results and its model.

    Attributes:
        config: All settings, resolved.
        task: What was trained.
        params: The server's parameters, {path: array}. Keyed leaves have one row per key. Local leaves are
            not included.
        summary: The content of summary.json: test metrics, bytes, seconds, versions.
        recorded: Where the records are.
    """

    config: Config
    task: Task
    params: Mapping[str, Any]
    summary: Mapping[str, Any]
    recorded: Recorder

    def __repr__(self) -> str:
        told = {name: value for name, value in self.test.items() if isinstance(value, float)}
        return f"Run({self.config.algorithm} on {self.config.task}, {self.config.rounds} rounds, test {told})"

    @property
    def records(self) -> list[dict[str, Any]]:
        """The record of every round. They are read from the run's folder, or from memory if it has none."""
        return self.recorded.records()

    @property
    def test(self) -> Mapping[str, Any]:
        """The metrics of the test clients."""
        return self.summary["test"]

    @property
    def personal(self) -> Personal:
        """The trained model for one client, which rebuilds and uses its local part offline."""
        return Personal(self.config, self.task.personal, self.params, source_of(self.task.train))


def train(
    task: str | Task | None = None,
    *,
    data: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    preset: str | None = None,
    progress: OnStatus = silent,
    told: Callable[[str], None] = untold,
    changes: Mapping[str, Any] | None = None,
    recorded: Mapping[str, Any] | None = None,
    began: float | None = None,
    **settings: Any,
) -> Run:
    """Train a task and evaluate it on its test clients.

    Args:
        task: The name of a task (`partwise tasks` lists them; by default `planted`), or a `Task` of your own.
        data: Where the data of a named task is: a file, a folder, or None for the task's own place.
        out: A folder in which the run is recorded. Without it, nothing is written.
        resume: Continue the run in `out` from its last checkpoint.
        preset: A named set of settings of the task in place of its defaults, such as "paper".
        progress: Called with a `Status` after every compiled call and every evaluation.
        told: Called with sentences about what happens before the first round.
        changes: Settings as dotted keys, {"reconstruct.rate": 0.5}; the same as `settings`.
        recorded: All settings of another run (its config.toml as dotted keys). `changes` are applied to them.
        began: The `time.perf_counter()` from which the total seconds are counted (default: this call).
        **settings: Settings with `__` for the dot: rounds=100, reconstruct__rate=0.5. `partwise settings
            TASK` lists them all with their meanings.

    Returns:
        The finished run: its test metrics, its records, its parameters, and the model for one client.

    Raises:
        UserError: A setting, the task or the data does not fit, or the training goes wrong. The message says
            what to do.
    """
    began = time.perf_counter() if began is None else began
    _check_call(task, settings)
    use_all_cores()
    changes = {**(changes or {}), **{key.replace("__", "."): value for key, value in settings.items()}}
    told("loading")
    if out is None:
        if resume:
            raise UserError("to resume a run, say where it is: --out DIR (in Python, out=...)")
        begun = resolve(task or DEFAULT, data, changes, preset, recorded)
        return _train(*begun, None, progress, told, began)
    folder = Folder(out)
    if resume:
        check_resumable(folder)
    with folder.held():
        if resume:
            begun = resumed(folder, task, data, {**(recorded or {}), **changes}, preset)
        else:
            folder.check_free()
            begun = resolve(task or DEFAULT, data, changes, preset, recorded)
        return _train(*begun, folder, progress, told, began)


def _check_call(task: Any, settings: Mapping[str, Any]) -> None:
    """Raise `UserError` if the data is given in place of a task, or the settings under a name of their own."""
    if not isinstance(task, str | Task | None):
        raise UserError(
            f"the task is a {type(task).__name__}: make a Task first, from a store of ratings with "
            f"ratings_task(store), or give the name of a task (`partwise tasks` lists them)"
        )
    if isinstance(settings.get("settings"), Mapping):
        raise UserError(
            'train() has no argument settings: give them as changes={"server.rate": 0.1}, or one by one as '
            "server__rate=0.1"
        )


def _train(
    task: Task,
    config: Config,
    folder: Folder | None,
    progress: OnStatus,
    told: Callable[[str], None],
    began: float,
) -> Run:
    compiling = compile_seconds()
    check_arguments(task.personal.model)
    prepared = prepare(task, config)
    check_cohort(prepared)
    check_fit(prepared, config)
    clients = f"{prepared.store.num_clients:,} training clients"
    for note in (*task.notes, f"{clients}; compiling, and measuring how many run best side by side"):
        told(note)
    simulation = make_simulation(prepared, config, lanes_of(folder))
    evaluate = make_evaluator(prepared, config, task.validation, task.test)
    promised = protection(config, prepared.store.num_clients)
    rounds = _affordable(promised, config.rounds)
    with recording(folder, task, config, simulation) as recorder:
        rates = read_of(RATES, task, config, find_algorithm(config.algorithm))
        _rounds(simulation, evaluate, config, rounds, promised, recorder, progress, rates)
    params = {path: np.asarray(leaf) for path, leaf in simulation.state.params.items()}
    if folder:
        folder.save_model(params, {"task": config.task, "round": simulation.round})
    test = evaluate.of(task.test.select(prepared.evaluated.columns))(
        simulation.state.params, kept=simulation.kept_of
    ) | {"judged": judged(task, prepared, config)}
    summary = summarize_run(task, prepared, config, recorder.tally, test) | {
        "lanes": simulation.lanes,
        "privacy": promised and promised.promise(simulation.round),
        "seconds_compile": compile_seconds() - compiling,
    }
    if folder:
        _draw(folder, recorder.tally, summary)
    summary["seconds_total"] = time.perf_counter() - began
    if folder:
        folder.save_summary(summary)
    past = past_its_best(recorder.tally)
    if past:
        warnings.warn(past, RunWarning, stacklevel=3)
    if not test["clients"]:
        warnings.warn(nobody_judged("test"), RunWarning, stacklevel=3)
    if summary["not_finite"]:
        warnings.warn(tell_not_finite(summary["not_finite"], "test"), RunWarning, stacklevel=3)
    return Run(config, task, params, summary, recorder)


def _draw(folder: Folder, tally: Tally, summary: Mapping[str, Any]) -> None:
    """Draw the learning curve. If this fails, only a warning is given."""
    try:
        from partwise.runs.picture import learning_curve

        learning_curve(folder.path / "curve.png", tally.curve(), summary)
    except Exception as error:
        warnings.warn(
            f"the run is saved, but its curve.png could not be drawn: {type(error).__name__}: {error}",
            RunWarning,
            stacklevel=4,
        )


def _rounds(
    simulation: Backend,
    evaluate: Evaluator,
    config: Config,
    rounds: int,
    promised: Protection | None,
    recorder: Recorder,
    progress: OnStatus,
    rates: Sequence[str],
) -> None:
    """Run the rounds that remain of so many. An evaluated round is recorded together with its evaluation. `rates`
    are those that may be lowered if the training goes wrong."""
    every, saving = config.simulation.evaluate_every, config.simulation.checkpoint_every
    spent = lambda number, exactly: {"privacy": promised.spent(number, exactly)} if promised else {}
    while simulation.round < rounds:
        due, save = _next(simulation.round, every), _next(simulation.round, saving)
        stop, last = min(due, save, rounds), {}
        for call in simulation.run(stop - simulation.round):
            *lines, last = [as_record(each) | spent(each.round, exactly=False) for each in call]
            if simulation.round < stop or stop not in (due, rounds):
                lines.append(last)
            _write(recorder, lines, config, rates)
            progress(Status(simulation.round, rounds, call[-1].loss, None))
        if stop in (due, rounds):
            last["evaluation"] = evaluate(simulation.state.params, kept=simulation.kept_of)
            last |= spent(stop, exactly=True)
            _write(recorder, [last], config, rates)
            progress(Status(stop, rounds, last["train"]["loss"], last["evaluation"]))
        if recorder.folder and stop in (save, rounds):
            recorder.folder.save_checkpoint(simulation.snapshot(), stop)


def _affordable(promised: Protection | None, wanted: int) -> int:
    """How many rounds the privacy budget allows. Raises `UserError` if it is none."""
    if promised is None:
        return wanted
    rounds = promised.most_rounds(wanted)
    if rounds == 0:
        raise UserError(
            f"one round costs more than privacy.epsilon = {promised.budget:g}: give more noise than "
            f"{promised.rounds.noise:g} (privacy.noise), or leave it out, and it is found for all {wanted:,} rounds"
        )
    if rounds < wanted:
        warnings.warn(
            f"privacy.epsilon = {promised.budget:g} ends the run after {rounds:,} of {wanted:,} rounds",
            RunWarning,
            stacklevel=4,
        )
    return rounds


def _write(recorder: Recorder, lines: list[dict[str, Any]], config: Config, rates: Sequence[str]) -> None:
    recorder.add(lines)
    check_going(recorder.tally, config.simulation.patience, config.rounds, rates)


@contextmanager
def recording(folder: Folder | None, task: Task, config: Config, simulation: Backend) -> Iterator[Recorder]:
    """Start a run's folder, or continue the run that is there. If a new run fails before any client was used,
    nothing is left in the folder."""
    if folder is None:
        yield Recorder(None)
        return
    new = not folder.exists()
    if new:
        begun = {"lanes": simulation.lanes, "device": device_words(), "data": fingerprint(task)}
        folder.start(config, task.options, source_of(task.train), begun)
    else:
        _go_on(folder, simulation)
        folder.save_config(config)
    recorder = Recorder(folder)
    try:
        yield recorder
    except UserError:
        if new and not recorder.tally.sums["clients"]:
            folder.discard()
        raise


def _go_on(folder: Folder, simulation: Backend) -> None:
    before = folder.begun()["device"]
    if before != device_words():
        warnings.warn(
            f"the run in '{folder.path}' began on {before} and goes on on {device_words()}: its sums may differ in "
            f"the last digits",
            RunWarning,
            stacklevel=5,
        )
    saved = folder.go_on(simulation.snapshot())
    if saved:
        simulation.resume(saved.state, saved.round)


def _next(round_number: int, every: int) -> int:
    """The next multiple of `every`; 0 means never."""
    return (round_number // every + 1) * every if every > 0 else sys.maxsize
