"""A sweep: every combination of a grid with every seed, each recorded as a run, and the best settings of them.

Runs that differ in rates and seeds alone share a compiled program and go side by side (`runs.side_by_side`). Others
are trained in processes of their own, as many at once as suit the machine (`runs.sweep_processes`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from partwise.checkpoint import load_json, save_json, write_file
from partwise.runs.document import to_plain
from partwise.runs.lock import check_place, held
from partwise.runs.run_view import SWEEP
from partwise.runs.sweep_plan import (
    SweepPlan,
    check_grid,
    check_same,
    check_seeds,
    from_document,
    to_document,
)
from partwise.runs.sweep_result import best_config, result_of
from partwise.runs.train import DEFAULT, OnStatus, silent
from partwise.simulation.processes import check_alone
from partwise.tasks import Task
from partwise.types import RunWarning, UserError, counted


class Swept(NamedTuple):
    """A sweep that has ended.

    Attributes:
        folder: Where its runs are, each in a folder of its own, with sweep.json, sweep.png and best.toml.
        result: The content of sweep.json.
    """

    folder: Path
    result: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"Swept({counted(len(self.rows), 'row')} in '{self.folder}', best {self.best})"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every set of settings with its metrics over seeds, the best first."""
        return self.result["rows"]

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The settings with the best metric of validation clients; None if none ended."""
        return self.result["best"] and self.result["best"]["settings"]


def sweep(
    task: str | Task | None = None,
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    seeds: int | str | Sequence[int] = 1,
    out: str | Path,
    metric: str | None = None,
    data: str | None = None,
    resume: bool = False,
    preset: str | None = None,
    processes: int | None = None,
    progress: OnStatus = silent,
    told: Callable[[str], None] = lambda text: None,
    changes: Mapping[str, Any] | None = None,
    recorded: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Swept:
    """Train every combination of a grid with every seed, and find the best by the validation clients.

    Args:
        task: The name of a task, or a `Task` of your own.
        grid: {dotted key: values}, such as {"server.rate": [0.1, 0.3], "data.dim": [8, 16]}.
        seeds: How many seeds (from the setting `seed` on, which is 0), or the seeds themselves.
        out: A folder for the sweep. Every run is recorded in a folder of its own there.
        metric: The metric of validation clients by which settings are chosen (default: the model's first).
        data: Where the data of a named task is.
        resume: Go on with the sweep in `out`. Runs that have ended are not run again.
        preset: A named set of settings of the task, such as "paper".
        processes: How many processes train at once, if not all runs share a program (default: what suits the
            machine).
        progress: Called with a `Status`; its `part` names the run.
        told: Called with sentences about what happens.
        changes: Settings of all runs as dotted keys; the same as `settings`.
        recorded: All settings of another run, to which `changes` are applied.
        **settings: Settings of all runs with `__` for the dot.

    Returns:
        The rows, sorted by the metric, and the best settings. They are also in sweep.json and best.toml.

    Raises:
        UserError: A setting, the task or the data does not fit. A run that diverges is a row that says so.
    """
    check_alone("a sweep starts processes of its own", "call sweep in a process that has not joined others")
    changes = {**(changes or {}), **{key.replace("__", "."): value for key, value in settings.items()}}
    first = changes.pop("seed", None)
    plan = SweepPlan(
        task=task.name if isinstance(task, Task) else task or DEFAULT,
        data=None if data is None else str(data),
        preset=preset,
        recorded=dict(recorded or {}),
        changes=changes,
        grid=check_grid(grid or {}, changes),
        seeds=check_seeds(seeds, first),
        metric=metric,
    )
    out = check_place(out)
    with held(out):
        _begin(plan, out, resume)
        _train_all(plan, out, task if isinstance(task, Task) else None, processes, progress, told)
        return _finished(plan, out)


def _begin(plan: SweepPlan, out: Path, resume: bool) -> None:
    """Write the plan, or check that it is the one with which the sweep began."""
    there = (out / SWEEP).exists()
    if resume and not there:
        raise UserError(f"'{out}' holds no sweep to go on with: look at --out (out=), or leave out --resume")
    if there and not resume:
        raise UserError(
            f"'{out}' already holds a sweep: add --resume (resume=True) to go on, or choose another folder with "
            f"--out (out=)"
        )
    if there:
        check_same(from_document(load_json(out / SWEEP)["plan"]), plan, out)
    elif (out / "config.toml").exists():
        raise UserError(f"'{out}' holds a run: choose another folder for the sweep with --out (out=)")
    save_json(out / SWEEP, {"plan": to_plain(to_document(plan))})


def _train_all(
    plan: SweepPlan,
    out: Path,
    task: Task | None,
    processes: int | None,
    progress: OnStatus,
    told: Callable[[str], None],
) -> None:
    from partwise.runs.sweep_family import has_ended, train_family
    from partwise.runs.sweep_processes import suited, train_families

    families = plan.families()
    left = [
        number
        for number, cells in enumerate(families)
        if not all(has_ended(out / cell.name) for cell in cells)
    ]
    told(f"{counted(len(plan.cells()), 'run')}, {counted(len(left), 'family', 'families')} to train")
    count = 1 if task is not None or len(families) == 1 else processes or suited(len(families))
    if count > 1:
        train_families(out, left, count, progress, told)
        return
    for number in left:
        train_family(plan, families[number], out, task, progress, told)


def _finished(plan: SweepPlan, out: Path) -> Swept:
    """Write sweep.json, best.toml and sweep.png."""
    from partwise.runs.sweep_picture import draw_sweep

    result = to_plain(result_of(plan, out))
    if result["best"]:
        write_file(out / "best.toml", best_config(result, out).encode())
    try:
        draw_sweep(out / "sweep.png", result, plan.grid)
    except Exception as error:  # the results are there without it
        warnings.warn(
            f"sweep.png could not be drawn: {type(error).__name__}: {error}", RunWarning, stacklevel=3
        )
    save_json(out / SWEEP, {"plan": to_plain(to_document(plan)), **result})
    return Swept(out, result)
