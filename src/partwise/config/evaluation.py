"""How clients are judged: unseen ones rebuild, tune or take their local part; seen ones have it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from partwise.algorithm import Build
from partwise.algorithms.fed_recon import fed_recon
from partwise.client import reconstruct
from partwise.client.split import Split
from partwise.config.parts import (
    make_aggregator,
    make_choices,
    make_evaluation_split,
    make_fine_tune,
    make_reconstruct,
    make_server_optimizer,
    make_split,
    make_update,
    one_of,
    rates_of,
)
from partwise.config.settings import Config
from partwise.data.store import ClientStore
from partwise.tasks.base import Setting, Task
from partwise.types import UserError

LOCAL = ("rebuilt", "tuned", "trained")  # values of evaluation.local


def evaluation_build(setting: Setting, config: Config) -> tuple[Build, dict[str, float]]:
    """What a client that has the trained model does with it, and its rates; `setting` is a `judged_setting`."""
    changes: dict[str, Any] = {"update.proximal": 0.0}
    if config.evaluation.local == "trained":
        changes["reconstruct.method"] = "skip"
    return recon_build(setting, config.changed(changes)), rates_of(config)


def judged_setting(setting: Setting, config: Config) -> Setting:
    """The setting in which clients are judged: a local part that the server trained begins as it is there."""
    one_of("evaluation.local", config.evaluation.local, LOCAL)
    if config.evaluation.local == "rebuilt":
        return setting
    begun = lambda role: dataclasses.replace(role, initial="learned") if role.kind == "local" else role
    roles = {path: begun(role) for path, role in setting.partition.roles.items()}
    return setting._replace(partition=dataclasses.replace(setting.partition, roles=roles))


def averaged_evaluation(task: Task, config: Config, build: Build) -> tuple[Build, Setting]:
    """Seen users have rows on the server: standard evaluation. Unseen ones rebuild their own: RECONEVAL."""
    check_judged(task, config)
    if task.seen or not (task.personal.partition.local_paths or config.fine_tune.max_steps != 0):
        return build, stateful(task)
    setting = judged_setting(task.personal, config)
    return evaluation_build(setting, config)[0], setting


def check_judged(task: Task, config: Config) -> None:
    """Raise where a setting of evaluation would be without effect."""
    local, steps = config.evaluation.local, config.fine_tune.max_steps
    one_of("evaluation.local", local, LOCAL)
    if task.seen and steps != 0:
        raise UserError(
            f"fine_tune.max_steps = {'none' if steps is None else steps} tunes on the support set of an unseen "
            f"client, and task '{task.name}' judges seen ones, as they were trained: leave it at 0, or use a "
            f"task of unseen clients"
        )
    if local != "rebuilt" and (task.seen or not task.personal.partition.local_paths):
        has = "has seen ones alone" if task.seen else "has no local part"
        raise UserError(
            f"evaluation.local = {local} says with which local part an unseen client is judged, and task "
            f"'{task.name}' {has}: leave it at rebuilt, or use another task"
        )


def stateful(task: Task) -> Setting:
    """The setting in which all parameters are the server's."""
    if task.stateful is None:
        raise UserError(
            f"task '{task.name}' has no variant with all parameters on the server; use fed_recon "
            f"(or, for a table of ratings, an order other than 'as is')"
        )
    return task.stateful


def check_rebuilt(config: Config) -> None:
    """Raise where clients are to be judged with a local part that nobody trained."""
    one_of("evaluation.local", config.evaluation.local, LOCAL)
    if config.evaluation.local != "rebuilt":
        raise UserError(
            f"evaluation.local = {config.evaluation.local} takes local parameters that the server trained, and "
            f"with {config.algorithm} it trains none: use rebuilt, or fed_avg and its kin"
        )


def recon_build(
    setting: Setting, config: Config, store: ClientStore | None = None, judged: Split | None = None
) -> Build:
    """FedRecon, in which all evaluation of unseen clients consists; `judged` in place of the configuration's split
    of those."""
    part, here = config.reconstruct, make_split(config.split)
    make_reconstruct(config, rates_of(config))  # mistakes are told here, not when it is compiled
    choose = make_choices(setting, config)
    aggregator = make_aggregator(setting, config, store)

    def build(rates: Mapping[str, Any]):
        return fed_recon(
            setting.model,
            setting.partition,
            split=here,
            reconstruct=make_reconstruct(config, rates),
            update=make_update(config, rates),
            optimizer=make_server_optimizer(config, rates),
            aggregator=aggregator,
            choose=choose,
            passes=config.update.passes,
            evaluation_split=judged or make_evaluation_split(config),
            check=reconstruct.check_solvable if part.method == "solve" else None,
            fine_tune=make_fine_tune(config, rates),
        )

    return build
