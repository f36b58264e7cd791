"""Heat from a run that counted it (`server.counts`, `algorithms.count_heat`), for a run that trains with it.

What the count cost clients is part of what the training promises them: its noise goes into the ledger as one
release (`privacy.heat_noise`), whatever delta the training has.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from partwise.algorithms.count_heat import NAME, count_setting, counted_in
from partwise.algorithms.registry import find_algorithm, training_split
from partwise.config.parts import HEATS, fewest_examples
from partwise.config.protection import Protection, protection
from partwise.config.settings import Config
from partwise.data.heat import Heat
from partwise.data.heat_gaussian import Counted, scaled_heats
from partwise.model.partition import Partition
from partwise.runs.folder import Folder
from partwise.tasks import Task
from partwise.types import UserError


def with_counts(task: Task, config: Config) -> tuple[Task, Config]:
    """The task with the heat that `server.counts` names, and the configuration with the noise that it has. Without
    that setting, both are as they were."""
    if not config.server.counts:
        return task, config
    folder = Folder(config.server.counts)
    counting = _checked(folder, task, config)
    total = counting.cohort.size
    promised = protection(counting, total)
    heats = _heats(folder, counting, task, config, promised)
    known = dataclasses.replace(task.train, info={**task.train.info, HEATS: heats})
    return task._replace(train=known), _composed(folder, config, promised)


def _checked(folder: Folder, task: Task, config: Config) -> Config:
    """The configuration of the run that counted. Raises `UserError` if it did not count for this one."""
    counting = folder.config()
    where, population = f"server.counts = {folder.path}", config.deploy.population or task.train.num_clients
    if counting.algorithm != NAME:
        raise UserError(f"{where} is a run of {counting.algorithm}: give the folder of a run of {NAME}")
    if counting.task != task.name:
        raise UserError(
            f"{where} counted keys of task '{counting.task}', and this one is '{task.name}': count them again"
        )
    if counting.cohort.size != population:
        raise UserError(
            f"{where} counted {counting.cohort.size:,} clients, and there are {population:,} (deploy.population, "
            f"or the training clients of the data): count the clients that train"
        )
    if config.server.weighting != "uniform":
        raise UserError(
            f"{where} counted clients, and server.weighting = {config.server.weighting} weighs them by examples: "
            f"set server.weighting=uniform"
        )
    _check_same_clients(where, counting, task, config)
    return counting


def _check_same_clients(where: str, counting: Config, task: Task, config: Config) -> None:
    """Raise `UserError` if clients of the data were counted and cannot train, or the other way round."""
    counted = fewest_examples(counting, training_split(counting))
    trains, sizes = fewest_examples(config, training_split(config)), task.train.counts
    differ = int(np.sum((sizes >= counted) != (sizes >= trains)))
    if differ:
        raise UserError(
            f"{where} counted clients with at least {counted} examples, and those with at least {trains} train "
            f"(cohort.min_examples, and a query set): they differ in {differ:,} clients. Count them again with "
            f"cohort.min_examples={trains}"
        )


def _heats(
    folder: Folder, counting: Config, task: Task, config: Config, promised: Protection | None
) -> dict[str, Heat]:
    """The counts of all key spaces that the run trains. Rows that are each client's own have one holder each."""
    trains = find_algorithm(config.algorithm).trains
    setting = task.stateful if trains == "stateful" and task.stateful else task.personal
    parts, total = count_setting(task.personal).partition, counting.cohort.size
    _check_ids(folder, task, parts)
    counted = counted_in(_model(folder), parts, total)
    for space, counts in counted.counts.items():
        if len(counts) != parts.num_keys(space):
            raise UserError(
                f"server.counts = {folder.path} counted {len(counts):,} keys of '{space}', and the task has "
                f"{parts.num_keys(space):,}: count them again with this task's data"
            )
    own = {space: np.ones(setting.partition.num_keys(space), np.int64) for space in setting.own_spaces}
    sd = _deviation(promised)
    number = total if sd else counted.clients
    known = scaled_heats(counted, sd) | scaled_heats(Counted(own, number, total), 0.0)
    return {space: known[space] for space in setting.partition.spaces if space in known}


def _model(folder: Folder) -> dict[str, np.ndarray]:
    """The leaves of the run that counted, once it has ended."""
    if not (folder.path / "model.safetensors").exists():
        raise UserError(f"the run in '{folder.path}' has not counted everybody yet: wait until it has ended")
    return folder.model()


def _check_ids(folder: Folder, task: Task, parts: Partition) -> None:
    """Raise `UserError` if the keys had other ids when they were counted."""
    before, now = folder.source().vocabularies, task.train.vocabularies
    for name in dict.fromkeys(name for names in parts.columns.values() for name in names):
        if not np.array_equal(before.get(name, ()), now.get(name, ())):
            raise UserError(
                f"column '{name}' of the data has other ids than those that server.counts = {folder.path} counted: "
                f"count them again with this task's data"
            )


def _deviation(promised: Protection | None) -> float:
    """The standard deviation of the noise in every count. Of two servers, each adds all of it."""
    if promised is None:
        return 0.0
    return promised.door.deviation * (math.sqrt(2) if promised.sums == "two_servers" else 1)


def _composed(folder: Folder, config: Config, promised: Protection | None) -> Config:
    """The configuration with the noise of the counts, if clients are promised privacy."""
    if config.privacy.clip is None:
        return config
    if promised is None or not promised.door.noise:
        raise UserError(
            f"the counts in '{folder.path}' have no noise, so with privacy.clip nothing could be promised: count "
            f"them again with privacy.epsilon"
        )
    if config.privacy.heat == "response":
        raise UserError(
            "privacy.heat = response flips bits of clients, and the counts of server.counts have noise already: "
            "leave one of the two out"
        )
    return config.changed({"privacy.heat": "gaussian", "privacy.heat_noise": promised.ledger.rounds.noise})
