"""Federated Averaging (McMahan et al., 2017): all parameters are on the server, and all data trains them.

If a user table is keyed by user, every client fetches, trains and returns its own row. For matrix
factorisation this equals the stateful FedPer (FedRecon, footnote 4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from partwise.algorithm import Algorithm, Build, change, choices
from partwise.algorithms.entry import AlgorithmEntry, Prepared
from partwise.algorithms.fed_recon import averaged_evaluation
from partwise.client.evaluate import evaluate
from partwise.client.split import everything
from partwise.client.state import Client, begin, total_weight, with_deltas
from partwise.client.update import Update
from partwise.config.judged import server_side
from partwise.config.parts import (
    make_aggregator,
    make_choices,
    make_recruiting,
    make_server_optimizer,
    make_update,
    rates_of,
)
from partwise.config.settings import Config
from partwise.data.store import ClientStore
from partwise.model.partition import Partition
from partwise.model.spec import Model
from partwise.optimizers import ServerOptimizer
from partwise.selection.choose import Choice
from partwise.server.mean import mean
from partwise.server.total import Aggregator, Report
from partwise.tasks.base import Setting, Task, defaults_for
from partwise.types import UserError


def fed_avg(
    model: Model,
    partition: Partition,
    *,
    update: Update,
    optimizer: ServerOptimizer,
    aggregator: Aggregator | None = None,
    choose: Mapping[str, Choice] | None = None,
) -> Algorithm:
    """Local training on all of a client's examples, and standard evaluation.

    Args:
        model: The model.
        partition: The roles of its leaves. None may be local.
        update: How a client trains (`client.update`).
        optimizer: The server's optimizer.
        aggregator: How updates are combined (default: the mean weighted by examples).
        choose: {key space: choice of keys}; by default all keys that could matter.
    """
    if partition.local_paths:
        raise UserError(
            f"FedAvg has no local parameters, but {', '.join(partition.local_paths)} is local. "
            f"Make it shared() or keyed(...), or use fed_recon."
        )

    def client_update(client: Client) -> Report:
        trained = update(client, begin(client), everything)
        weight = total_weight(client, everything)
        return Report(change(client, with_deltas(client, trained.progress)), weight, trained.loss)

    return Algorithm(
        model=model,
        partition=partition,
        client=client_update,
        personalize=lambda client, start: start,
        evaluate=lambda client: evaluate(client, begin(client), everything),
        aggregator=aggregator or mean(),
        optimizer=optimizer,
        choose=choices(partition, choose),
    )


# How a configuration makes it, and its relatives

MakeBuild = Callable[[Setting, ClientStore], Build]

# Settings that averaging algorithms do not read.
UNREAD = {"update.joint": "all parameters are the server's and trained anyway"}


def prepare(task: Task, config: Config) -> Prepared:
    """FedAvg for a task: clients have all keys that could matter to them."""
    return prepare_averaging(task, unselected(task, config, FED_AVG), fed_avg)


def prepare_averaging(task: Task, config: Config, make: Callable[..., Algorithm]) -> Prepared:
    """Prepare an algorithm that has the arguments of `fed_avg`."""
    return prepare_stateful(task, config, lambda setting, store: averaging(setting, config, make, store))


def prepare_stateful(task: Task, config: Config, make_build: MakeBuild) -> Prepared:
    """Prepare an algorithm whose parameters are all on the server."""
    setting = server_side(task)
    store = task.train.select(setting.columns)
    build = make_build(setting, store)
    evaluation, evaluated = averaged_evaluation(task, config, build)
    return Prepared(build, rates_of(config), store, make_recruiting(config), evaluation, evaluated)


def averaging(
    setting: Setting, config: Config, make: Callable[..., Algorithm], store: ClientStore | None = None
) -> Build:
    """`make` with the parts that the configuration names; heat is counted in `store`."""
    choose = make_choices(setting, config)
    aggregator = make_aggregator(setting, config, store)
    return lambda rates: make(
        setting.model,
        setting.partition,
        update=make_update(config, rates),
        optimizer=make_server_optimizer(config, rates),
        aggregator=aggregator,
        choose=choose,
    )


def unselected(task: Task, config: Config, entry: AlgorithmEntry) -> Config:
    """The configuration without the task's choice of keys, for an algorithm whose clients have all keys that
    could matter. Raises `UserError` if the user wrote a choice."""
    usual = defaults_for(task.defaults, config.algorithm, entry.defaults)
    for space, text in config.select.items():
        if text != usual.get(f"select.{space}"):
            raise UserError(
                f"select.{space} = {text} chooses keys, and clients of {config.algorithm} have all that could "
                f"matter to them: leave it out, or use fed_select"
            )
    return dataclasses.replace(config, select={})


FED_AVG = AlgorithmEntry(
    "Federated Averaging, any server optimizer",
    prepare,
    trains="stateful",
    selects=False,
    unread=UNREAD,
)
