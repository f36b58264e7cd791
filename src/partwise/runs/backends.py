"""Makes what runs and what evaluates the rounds of a configuration."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from partwise.algorithms.entry import Prepared
from partwise.config.settings import Config
from partwise.data.store import ClientStore
from partwise.runs.folder import Folder
from partwise.simulation.backend import Backend
from partwise.simulation.evaluator import Evaluator
from partwise.simulation.lanes import choose_lanes
from partwise.simulation.loop import Simulation
from partwise.simulation.plain import EagerEvaluator, PlainSimulation
from partwise.simulation.processes import check_alone
from partwise.simulation.table_places import AUTO, COPIES
from partwise.tasks import Task
from partwise.types import UserError


class Runtime(NamedTuple):
    """What runs and evaluates the rounds of a run.

    simulation: runs the rounds
    evaluate:   evaluates validation clients, and test clients with the same program
    beside:     how many runs share the time, this one counted
    trials:     how many runs of a sweep look at the same clients; a promise of privacy is for all of them
    draws:      whether the learning curve is drawn
    fleet:      the digest of the fleet's schedule that its rounds are; empty if they are of no fleet
    """

    simulation: Backend
    evaluate: Evaluator
    beside: int = 1
    trials: int = 1
    draws: bool = True
    fleet: str = ""


def make_runtime(task: Task, prepared: Prepared, config: Config, folder: Folder | None) -> Runtime:
    """What runs and evaluates a run of its own, as it began if its folder has one."""
    simulation = make_simulation(prepared, config, lanes_of(folder))
    trials = int(folder.begun().get("trials", 1)) if folder and folder.exists() else 1
    return Runtime(simulation, make_evaluator(prepared, config, task.validation, task.test), trials=trials)


def make_simulation(prepared: Prepared, config: Config, lanes: int = 0) -> Backend:
    """The backend that the configuration names. The number of lanes is measured unless it is given."""
    given = (prepared.build, prepared.rates, prepared.store, prepared.recruiting)
    backend = config.simulation.backend
    if backend in ("plain", "eager"):
        check_alone(f"simulation.backend = {backend} runs one client after another", "leave --processes out")
        check_copies(config, f"simulation.backend = {backend}")
        eager = backend == "eager"
        return PlainSimulation(*given, seed=config.seed, serving=config.serving.way, eager=eager)
    if backend != "compiled":
        raise UserError(f"simulation.backend must be compiled, plain or eager, not '{backend}'")
    make = lambda count: Simulation(
        *given,
        seed=config.seed,
        lanes=count,
        rounds_per_call=config.simulation.rounds_per_call,
        serving=config.serving.way,
        tables=config.simulation.tables,
    )
    wanted = lanes or config.simulation.lanes
    if wanted:
        return make(wanted)
    name = dataclasses.replace(config, seed=0, rounds=0).to_toml() + str(prepared.store)
    return choose_lanes(make, config.rounds, name)


def check_copies(config: Config, what: str) -> None:
    """Raise `UserError` if tables are to be elsewhere than what runs the rounds can have them."""
    if config.simulation.tables not in (AUTO, COPIES):
        raise UserError(
            f"simulation.tables = {config.simulation.tables} is for `partwise train` of one run on its compiled "
            f"backend, and this is {what}: leave it out"
        )


def make_evaluator(prepared: Prepared, config: Config, store: ClientStore, *others: ClientStore) -> Evaluator:
    """The evaluator of these clients, with a program that the others fit into too."""
    seen, *rest = (each.select(prepared.evaluated.columns) for each in (store, *others))
    kind = EagerEvaluator if config.simulation.backend == "eager" else Evaluator
    return kind(prepared.evaluation, prepared.rates, seen, seed=config.seed, others=rest)


def lanes_of(folder: Folder | None) -> int:
    """The number of lanes with which the run in a folder began; 0 if there is no run."""
    return int(folder.begun()["lanes"]) if folder and folder.exists() else 0
