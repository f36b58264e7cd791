"""The training of a fleet's schedule: a run whose rounds are the schedule's versions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from partwise.algorithms.entry import Prepared
from partwise.config.settings import Config
from partwise.runs.backends import Runtime, make_evaluator
from partwise.runs.folder import Folder
from partwise.runs.picture import main_metric
from partwise.runs.rounds import OnStatus
from partwise.runs.sanity import check_fit
from partwise.runs.train import Run, ended, train_steps
from partwise.simulation.fleet.counting import HOUR, FleetCounts
from partwise.simulation.lanes import choose_lanes
from partwise.simulation.late_loop import ScheduledSimulation
from partwise.simulation.loop import Simulation
from partwise.tasks import Task


def train_schedule(
    task: Task,
    config: Config,
    prepared: Prepared,
    counts: FleetCounts,
    folder: Folder | None,
    progress: OnStatus,
    told: Callable[[str], None],
    began: float,
) -> Run:
    """Train the versions whose buffers were kept, and evaluate as a run does. It is recorded in `folder`."""
    check_fit(prepared, config)
    evaluate = make_evaluator(prepared, config, task.validation, task.test)
    runtime = Runtime(_simulation(prepared, config, counts), evaluate, fleet=True)
    with folder.held() if folder else contextlib.nullcontext():
        return ended(train_steps(task, config, folder, progress, told, (), began, runtime))


def _simulation(prepared: Prepared, config: Config, counts: FleetCounts) -> Simulation:
    """The schedule on this machine's devices. The number of lanes is measured unless it is set."""
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
    if config.simulation.lanes:
        return make(config.simulation.lanes)
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
