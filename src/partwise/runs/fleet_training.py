"""The training of a fleet's schedule: a run whose rounds are the schedule's versions."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

from partwise.algorithms.entry import Prepared
from partwise.config.settings import Config
from partwise.runs.backends import Runtime, check_copies, lanes_of, make_evaluator
from partwise.runs.folder import Folder
from partwise.runs.picture import main_metric
from partwise.runs.resolve import check_goes_on, check_resumable
from partwise.runs.rounds import OnStatus
from partwise.runs.run import Run
from partwise.runs.sanity import check_fit
from partwise.runs.train import ended, train_steps
from partwise.simulation.fleet.counting import HOUR, FleetCounts
from partwise.simulation.lanes import choose_lanes
from partwise.simulation.late_loop import ScheduledSimulation
from partwise.simulation.loop import Simulation
from partwise.tasks import Task
from partwise.types import UserError


def train_schedule(
    task: Task,
    config: Config,
    prepared: Prepared,
    counts: FleetCounts,
    folder: Folder | None,
    progress: OnStatus,
    told: Callable[[str], None],
    began: float,
    resume: bool = False,
) -> Run:
    """Train the versions whose buffers were kept, and evaluate as a run does. It is recorded in `folder`; with
    `resume` it goes on there."""
    check_fit(prepared, config)
    check_copies(config, "a fleet")
    if config.simulation.backend != "compiled":
        raise UserError(
            f"simulation.backend = {config.simulation.backend} is for `partwise train`; a fleet is trained in "
            f"compiled cohorts: leave it out"
        )
    schedule = _digest(counts)
    with folder.held() if folder else contextlib.nullcontext():
        if folder and resume:
            _check_begun(folder, task, config, schedule)
        elif folder:
            folder.check_free()
        evaluate = make_evaluator(prepared, config, task.validation, task.test)
        lanes = lanes_of(folder) or config.simulation.lanes
        runtime = Runtime(_simulation(prepared, config, counts, lanes), evaluate, fleet=schedule)
        return ended(train_steps(task, config, folder, progress, told, (), began, runtime))


def _digest(counts: FleetCounts) -> str:
    """Of who reports when, and began with which version."""
    total = hashlib.sha256()
    for buffer in counts.buffers:
        for each in buffer:
            total.update(each.astype("<i8").tobytes() + b";")
    return total.hexdigest()


def _check_begun(folder: Folder, task: Task, config: Config, schedule: str) -> None:
    """Raise `UserError` unless the folder has a run of this task, configuration and schedule."""
    check_resumable(folder)
    check_goes_on(folder, task, config)
    if folder.begun().get("fleet") != schedule:
        raise UserError(
            f"the run in '{folder.path}' was begun with another schedule: go on with the same devices, hours, "
            f"every, trace and rounds, or begin another one with another --out (out=...)"
        )


def _simulation(prepared: Prepared, config: Config, counts: FleetCounts, lanes: int) -> Simulation:
    """The schedule on this machine's devices. The number of lanes is measured unless it is given."""
    make = lambda lanes: ScheduledSimulation(
        prepared.build,
        prepared.rates,
        prepared.store,
        counts.buffers,
        config.deploy.staleness,
        seed=config.seed,
        lanes=lanes,
        rounds_per_call=config.simulation.rounds_per_call,
        serving=config.serving.way,
    )
    if lanes:
        return make(lanes)
    name = dataclasses.replace(config, seed=0, rounds=0).to_toml() + f"a fleet of {prepared.store}"
    return choose_lanes(make, config.rounds, name)


def learned(run: Run, counts: FleetCounts) -> dict[str, Any]:
    """What was learned by when, on the virtual clock."""
    test, closed = run.summary["test"], counts.made["closed"]
    metric, looked = main_metric(test), [record for record in run.records if record["evaluation"]]
    return {
        "versions": run.summary["rounds"],
        "hours": float(closed[run.summary["rounds"] - 1] / HOUR),
        "metric": metric,
        "better": run.summary["better"].get(metric),
        "curve": [
            {
                "version": record["round"],
                "hours": float(closed[record["round"] - 1] / HOUR),
                "value": record["evaluation"][metric],
            }
            for record in looked
        ],
        "test": test[metric],
        "seconds_per_version": run.summary["seconds_per_round"],
    }
