"""Train and evaluate: turn a task and a configuration into a run, recorded in a folder."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from partwise.algorithms.effects import read_of
from partwise.algorithms.entry import Prepared
from partwise.algorithms.registry import find_algorithm, prepare
from partwise.config.protection import protection
from partwise.config.settings import Config
from partwise.model.spec import check_arguments
from partwise.runs.backends import Runtime, make_runtime
from partwise.runs.callbacks import Callback, Followed, Start, check_callbacks
from partwise.runs.cause import Cause, find_cause
from partwise.runs.client_file import source_of
from partwise.runs.fingerprint import fingerprint
from partwise.runs.folder import Folder
from partwise.runs.keeping import best_model, tell_best
from partwise.runs.notebook import make_progress
from partwise.runs.one_writer import check_same, go_on, open_folder
from partwise.runs.recorder import Recorder
from partwise.runs.resolve import (
    check_resumable,
    resolve,
    resumed,
)
from partwise.runs.rounds import Course, OnStatus, affordable, run_rounds
from partwise.runs.rounds import Status as Status
from partwise.runs.rounds import silent as silent
from partwise.runs.run import Run
from partwise.runs.sanity import (
    RATES,
    check_cohort,
    check_fit,
    examples_used,
    patience_of,
    tell_unused,
)
from partwise.runs.stopping import stops
from partwise.runs.summary import (
    device_words,
    judged,
    nobody_judged,
    past_its_best,
    summarize_run,
    tell_not_finite,
)
from partwise.runs.tally import Tally
from partwise.server.cohort import recruit
from partwise.simulation.backend import Backend
from partwise.simulation.clock import compile_seconds
from partwise.simulation.exchange import agreed, agreeing
from partwise.simulation.mesh import use_all_cores
from partwise.simulation.processes import is_writer, meet, num_processes
from partwise.simulation.spread import is_spread
from partwise.tasks import Task
from partwise.types import DivergedError, RunWarning, UserError

DEFAULT = "planted"  # the task that is trained if none is named


def train(
    task: str | Task | None = None,
    *,
    data: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    preset: str | None = None,
    progress: OnStatus | str = "auto",
    told: Callable[[str], None] | None = None,
    callbacks: Sequence[Callback] = (),
    changes: Mapping[str, Any] | None = None,
    recorded: Mapping[str, Any] | None = None,
    began: float | None = None,
    **settings: Any,
) -> Run:
    """Train a task and evaluate it on its test clients.

    Args:
        task: The name of a task (`partwise tasks` lists them; by default `planted`), a `Task` of your own, or
            `module:function`, the name of a function of yours that returns one.
        data: Where the data of a named task is: a file, a folder, or None for the task's own place.
        out: A folder in which the run is recorded. Without it, nothing is written.
        resume: Continue the run in `out` from its last checkpoint.
        preset: A named set of settings of the task in place of its defaults, such as "paper".
        progress: Called with a `Status` after every compiled call and every evaluation; "auto": a line that follows
            the run in a notebook, and nothing elsewhere; "none".
        told: Called with sentences about what happens before the first round (default: as `progress` shows them).
        callbacks: What follows the run, such as `pw.tensorboard()` or a `Callback` of your own.
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
    following = check_callbacks(callbacks)
    use_all_cores()
    meet()
    shown = make_progress(progress if is_writer() else "none", began)
    say = told if told and is_writer() else shown
    changes = {**(changes or {}), **{key.replace("__", "."): value for key, value in settings.items()}}
    say("loading")
    with contextlib.ExitStack() as holding:
        with agreeing():
            folder = holding.enter_context(_held(out, resume))
            if resume and folder:
                begun = resumed(folder, task, data, {**(recorded or {}), **changes}, preset)
            else:
                begun = resolve(task or DEFAULT, data, changes, preset, recorded)
        check_same(*begun)
        run = ended(train_steps(*begun, folder, shown, say, following, began))
        agreed("all is written")  # before other processes look at it, or end
        return run


@contextlib.contextmanager
def _held(out: str | Path | None, resume: bool) -> Iterator[Folder | None]:
    """The folder of a run, held for this process: a free one, or one with a run to go on with."""
    if out is None:
        if resume:
            raise UserError("to resume a run, say where it is: --out DIR (in Python, out=...)")
        yield None
        return
    folder = open_folder(out)
    if resume:
        check_resumable(folder)
    with folder.held():
        if not resume:
            folder.check_free()
        yield folder


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


def ended(steps: Generator[None, None, Run]) -> Run:
    """Take all steps of a run, and return the run."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def train_steps(
    task: Task,
    config: Config,
    folder: Folder | None,
    progress: OnStatus,
    told: Callable[[str], None],
    callbacks: Sequence[Callback],
    began: float,
    runtime: Runtime | None = None,
) -> Generator[None, None, Run]:
    """Train and evaluate in steps: one before every call of the simulation, so that runs of a sweep, with
    a `runtime` that they share, can go side by side."""
    compiling = compile_seconds()
    check_arguments(task.personal.model)
    prepared = prepare(task, config)
    check_cohort(prepared)
    if runtime is None:  # otherwise it is checked once for all runs that share it
        check_fit(prepared, config)
    measured = "" if config.simulation.lanes else ", and measuring how many run best side by side"
    unused = tell_unused(examples_used(task, prepared, config))
    begins = f"{prepared.store.num_clients:,} training clients; compiling{measured}"
    for note in filter(None, (*task.notes, unused, begins)):
        told(note)
    runtime = runtime or make_runtime(task, prepared, config, folder)
    simulation, evaluate = runtime.simulation, runtime.evaluate
    promised = protection(config, prepared.store.num_clients, runtime.trials)
    rounds = affordable(promised, config.rounds)
    params = lambda: {path: np.asarray(leaf) for path, leaf in simulation.state.params.items()}
    spread = is_spread(simulation.state)
    with recording(folder, task, config, runtime) as recorder:
        rates = read_of(RATES, task, config, find_algorithm(config.algorithm))
        shown = _unshown if spread and num_processes() > 1 else lambda: _as_now(simulation.state.params)
        start = Start(config, task, folder and folder.path, simulation.round, shown)
        keeper = best_model(config, task, evaluate.algorithm.model, folder)
        if keeper and shown is _unshown:
            raise _no_params("keep.best")
        deciding = [*stops(config, task, evaluate.algorithm.model, began), *callbacks]
        followed = Followed(
            [*([keeper.callback] if keeper else []), *(deciding if is_writer() else [])], start
        )
        yield from run_rounds(
            Course(
                simulation,
                evaluate,
                config,
                rounds,
                promised,
                recorder,
                progress,
                rates,
                followed,
                lambda clients: _cause(simulation, prepared, config, clients),
                patience_of(prepared, config),
            )
        )
    if folder:
        early = {"ended": folder.ending(config)} if simulation.round < config.rounds else {}
        header = {"task": config.task, "round": simulation.round, **early}
        folder.save_model(simulation.state.params, header)
    on_test = evaluate.of(task.test.select(prepared.evaluated.columns))
    test = on_test(simulation.state.params, kept=simulation.kept_of)
    test["judged"] = judged(task, prepared, config)
    best = keeper and keeper.end()
    summary = summarize_run(task, prepared, config, recorder.tally, test) | {
        "stopped": followed.reason or None,
        "best_model": best and tell_best(best, on_test),
        "lanes": simulation.lanes,
        "privacy": promised and promised.promise(simulation.round),
        "side_by_side": runtime.beside,
        "seconds_compile": (compile_seconds() - compiling) / runtime.beside,
    }
    if folder and folder.writes and runtime.draws:
        _draw(folder, recorder.tally, summary)
    summary["seconds_total"] = (time.perf_counter() - began) / runtime.beside
    if folder:
        folder.save_summary(summary)
    followed.end(summary)
    kept = simulation.kept_of if evaluate.algorithm.judged_with else None
    past = past_its_best(recorder.tally)
    if past and not (config.stop.metric or config.keep.best):
        warnings.warn(past, RunWarning, stacklevel=4)
    if keeper and not best:
        warnings.warn(keeper.tell_nothing(), RunWarning, stacklevel=4)
    if not test["clients"]:
        warnings.warn(nobody_judged("test"), RunWarning, stacklevel=4)
    if summary["not_finite"]:
        warnings.warn(tell_not_finite(summary["not_finite"], "test"), RunWarning, stacklevel=4)
    last = folder.model(mapped=True) if folder and spread else params()
    return Run(config, task, last, summary, recorder, best[0] if best else None, kept)


def _cause(simulation: Backend, prepared: Prepared, config: Config, clients: Sequence[Any]) -> Cause | None:
    """Why updates of these clients, or else of clients of the last round, are not finite."""
    algorithm, store = simulation.algorithm, prepared.store
    if algorithm.aggregator.private or num_processes() > 1:
        return None
    if not clients:
        last = recruit(prepared.recruiting, store.counts, config.seed, simulation.round - 1)
        clients = store.client_ids[last.clients].tolist()
    try:
        return find_cause(algorithm, store, clients, config.seed)
    except Exception:  # the run stops for another reason, which must be told
        return None


def _as_now(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The parameters for those who may keep them. The next call writes into tables that are on the host."""
    return {
        p: leaf.copy() if isinstance(leaf, np.ndarray) else np.asarray(leaf) for p, leaf in params.items()
    }


def _unshown() -> dict[str, Any]:
    """The parameters for a callback, if no process can have them all without the others."""
    raise _no_params("a callback that asks for the parameters")


def _no_params(what: str) -> UserError:
    return UserError(
        f"tables are spread over {num_processes()} processes, and {what} needs them all in one: use "
        f"--set simulation.tables=copies, or do without it"
    )


def _draw(folder: Folder, tally: Tally, summary: Mapping[str, Any]) -> None:
    """Draw the learning curve. If this fails, only a warning is given."""
    try:
        from partwise.runs.picture import learning_curve

        learning_curve(folder.path / "curve.png", tally.curve(), summary)
    except Exception as error:
        warnings.warn(
            f"the run is saved, but its curve.png could not be drawn: {type(error).__name__}: {error}",
            RunWarning,
            stacklevel=5,
        )


@contextlib.contextmanager
def recording(folder: Folder | None, task: Task, config: Config, runtime: Runtime) -> Iterator[Recorder]:
    """Start a run's folder, or continue the run that is there. If a new run fails before any client was used,
    nothing is left in the folder. If the training diverges, the folder says so."""
    if folder is None:
        yield Recorder(None)
        return
    new = agreed(not folder.exists())  # others may see it when it has begun already
    if new:
        data = fingerprint(task) if folder.writes else {}
        begun = {"lanes": runtime.simulation.lanes, "device": device_words(), "data": data}
        begun |= {"trials": runtime.trials} if runtime.trials > 1 else {}
        begun |= {"fleet": runtime.fleet} if runtime.fleet else {}
        folder.start(config, task.options, source_of(task.train), begun)
    else:
        _go_on(folder, runtime.simulation)
        folder.save_config(config)
        folder.clear_failure()
    recorder = Recorder(folder)
    try:
        yield recorder
    except UserError as error:
        if new and not recorder.tally.sums["clients"]:
            folder.discard()
        elif isinstance(error, DivergedError):
            folder.save_failure(str(error))
        raise


def _go_on(folder: Folder, simulation: Backend) -> None:
    before = folder.begun()["device"]
    if before != device_words():
        warnings.warn(
            f"the run in '{folder.path}' began on {before} and goes on on {device_words()}: its sums may differ in "
            f"the last digits",
            RunWarning,
            stacklevel=6,
        )
    saved = go_on(folder, simulation.current())
    if saved:
        simulation.resume(*saved)
