"""Trains a family of a sweep: runs that differ in rates and seeds alone. Each is recorded like any other run.

A run that ends has summary.json. One whose training goes wrong has failed.json, with the reason. The others go on
when the sweep is resumed: runs side by side from the last checkpoint that all of them have.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from partwise.config.settings import Config
from partwise.runs.folder import FAILED, MAY_CHANGE, Folder
from partwise.runs.resolve import check_data, resolve
from partwise.runs.run import Run
from partwise.runs.sanity import check_cohort, check_fit
from partwise.runs.side_by_side import CellRun, Programs, batches_of, goes_beside, prepared_run
from partwise.runs.sweep_plan import SweepCell, SweepPlan
from partwise.runs.train import OnStatus, Status, train_steps
from partwise.runs.trials import composed
from partwise.simulation.mesh import use_all_cores
from partwise.tasks import Task
from partwise.types import RunWarning, UserError, unknown

# What may be swept under a promise of privacy: settings that do not change what a run costs its clients.
FREE = (
    "reconstruct.",
    "update.",
    "fine_tune.",
    "split.",
    "server.rate",
    "server.optimizer",
    "server.settings.",
)
Steps = Generator[None, None, Run]


def has_ended(folder: Path) -> bool:
    """Whether a run of a sweep need not be run again."""
    return (folder / "summary.json").exists() or (folder / FAILED).exists()


def train_family(
    plan: SweepPlan,
    cells: Sequence[SweepCell],
    out: Path,
    task: Task | None = None,
    progress: OnStatus = lambda status: None,
    told: Callable[[str], None] = lambda text: None,
) -> Task | None:
    """Train the runs of a family that have not ended, and return their task. `task` is the task if it is loaded
    already."""
    if all(has_ended(out / cell.name) for cell in cells):
        return task
    began = time.perf_counter()
    use_all_cores()
    runs = _resolved(plan, cells, out, task)
    for note in runs[0].task.notes:
        told(note)
    programs = Programs()
    for batch in batches_of(runs):
        _train_batch(batch, programs, len(plan.cells()), progress, began)
        began = time.perf_counter()
    return runs[0].task


def _resolved(plan: SweepPlan, cells: Sequence[SweepCell], out: Path, task: Task | None) -> list[CellRun]:
    """The runs with their configurations. The data is loaded once."""
    runs: list[CellRun] = []
    for cell in cells:
        changes = {**plan.changes, **cell.changes, "seed": cell.seed}
        with_name = f"{cell.name}: " if len(plan.grid) else ""
        try:
            loaded, config = (
                resolve(plan.task, plan.data, changes, plan.preset, plan.recorded)
                if task is None
                else resolve(task, None, _without_data(changes), None, _without_data(plan.recorded))
            )
            task = task or loaded
            check_private(plan, config)
            noise = (
                runs[0].config.privacy.noise if runs else None
            )  # it is the same for all, and takes long to find
            config = (
                composed(config, loaded.train.num_clients, len(plan.cells()))
                if noise is None
                else config.changed({"privacy.noise": noise})
            )
            run = prepared_run(cell, loaded, config, Folder(out / cell.name))
        except UserError as error:
            raise UserError(f"{with_name}{error}") from None
        _check_metric(plan, run)
        _check_folder(run)
        runs.append(run)
    return runs


def _without_data(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without options of the data, which is loaded already."""
    return {key: value for key, value in settings.items() if not key.startswith("data.")}


def check_private(plan: SweepPlan, config: Config) -> None:
    """Raise `UserError` if the runs of a sweep promise privacy and do not all cost the same, so that their costs
    cannot be composed."""
    if config.privacy.clip is None:
        if "privacy.clip" in plan.grid:
            raise UserError(
                "some runs of the sweep have privacy.clip and others not: sweep those without apart"
            )
        return
    others = [key for key in plan.grid if not key.startswith(FREE) and key != "privacy.clip"]
    if others:
        raise UserError(
            f"all runs of a private sweep look at the same clients, so their costs are composed, and "
            f"{', '.join(others)} may change what a run costs: sweep rates, client settings and "
            f"privacy.clip, or leave privacy.clip out"
        )
    if config.privacy.heat != "none" and config.server.mean == "heat" and not config.server.counts:
        raise UserError(
            "every run of a private sweep would count heat again, at a price: count it once (algorithm=count_heat) "
            "and give that run's folder as server.counts"
        )


def _check_metric(plan: SweepPlan, run: CellRun) -> None:
    known = [*run.prepared.evaluated.model.metrics, "loss"]
    if plan.metric is not None and plan.metric not in known:
        raise unknown("metric", plan.metric, known)


def _check_folder(run: CellRun) -> None:
    """Raise `UserError` if the folder has a run of other settings or other data."""
    if not run.folder.exists():
        return
    before, now = run.folder.config().flat(), run.config.flat()
    other = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in MAY_CHANGE]
    if other:
        told = ", ".join(f"{key} was {before.get(key)} and is {now.get(key)}" for key in other)
        raise UserError(
            f"the run in '{run.folder.path}' has other settings: {told}. Choose another --out (out=)"
        )
    check_data(run.folder, run.task)


def _train_batch(
    batch: Sequence[CellRun], programs: Programs, trials: int, progress: OnStatus, began: float
) -> None:
    """Train the runs of a batch that have not ended. All are in the program, so that it is the same as before."""
    left = [run for run in batch if not has_ended(run.folder.path)]
    if not left:
        return
    _check_fit(batch[0])
    together: list[tuple[CellRun, Steps]] = []
    with ExitStack() as held:
        for run in left:
            held.enter_context(run.folder.held())
        if goes_beside(batch):
            _meet(left)
        for run, runtime in programs.runtimes(batch, trials):
            if run not in left:
                continue
            show = _shown(progress, run, together)
            steps = train_steps(run.task, run.config, run.folder, show, lambda text: None, (), began, runtime)
            together.append((run, steps))
            if runtime.beside == 1:
                _go(together)
                began = time.perf_counter()
        _go(together)


def _check_fit(run: CellRun) -> None:
    """Raise `UserError` if the model does not fit the algorithm; once for all runs with the same program."""
    try:
        check_cohort(run.prepared)
        check_fit(run.prepared, run.config)
    except UserError as error:
        raise UserError(f"{run.cell.name}: {error}") from None


def _meet(runs: Sequence[CellRun]) -> None:
    """Let runs that go on do so from the last checkpoint that all of them have."""
    common = set.intersection(*({0, *run.folder.checkpoints()} for run in runs))
    for run in runs:
        run.folder.drop_after(max(common))


def _shown(progress: OnStatus, run: CellRun, together: list[tuple[CellRun, Steps]]) -> OnStatus:
    """Progress of a run, if it is the first of those side by side."""

    def show(status: Status) -> None:
        if together and together[0][0] is run:
            others = f" and {len(together) - 1} more" if len(together) > 1 else ""
            progress(status._replace(part=f"{run.cell.name}{others}"))

    return show


def _go(together: list[tuple[CellRun, Steps]]) -> None:
    """Take all steps of these runs, in turns, until all have ended. An error before the first round ends the sweep,
    because its settings are wrong. A later one ends that run alone."""
    begun = False
    while together:
        left = []
        for run, steps in together:
            try:
                going = _step(run, steps)
            except UserError as error:
                if not begun:
                    raise UserError(f"{run.cell.name}: {error}") from None
                run.folder.save_failure(str(error))
                going = False
            if going:
                left.append((run, steps))
        together[:], begun = left, True


def _step(run: CellRun, steps: Steps) -> bool:
    """Take one step, and return whether there are more. Warnings name the run."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", RunWarning)
        going = next(steps, run) is not run
    for each in seen:
        named = issubclass(each.category, RunWarning)
        warnings.warn(
            f"{run.cell.name}: {each.message}" if named else str(each.message), each.category, stacklevel=2
        )
    return going
