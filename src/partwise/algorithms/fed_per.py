"""Personalised learning with clients that keep their local part from round to round: FedPer, LG-FedAvg,
FedRep.

All three divide a model into a part that clients share and a part that each client keeps, trains and never
sends. The partition's rules say which part is which. Then:

* FedPer (Arivazhagan et al., 2019, Algorithm 1): the last layers are local. Both parts are trained together,
  `update.by_steps(joint=True)`, on all examples. The shared part is averaged with the numbers of examples as
  weights.
* LG-FedAvg (Liang et al., 2020, Algorithm 1): the same, with a local representation and shared last layers.
* FedRep (Collins et al., 2021, Algorithm 1): the head is local, and the parts take turns. First come steps on
  the head (`local`), starting from the kept head. Then come steps on the representation (`update`), with the
  head frozen.

What a client keeps dates from its last round. The fewer clients take part in a round, the staler it is. A
client that never took part has nothing. For this reason, Federated Reconstruction keeps nothing (FedRecon,
section 4, appendix A).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from partwise.algorithm import Algorithm, Build, change, choices
from partwise.algorithms.entry import AlgorithmEntry, Prepared
from partwise.algorithms.fed_recon import evaluation_build
from partwise.client.evaluate import evaluate
from partwise.client.fit import Trained
from partwise.client.reconstruct import Reconstruct, check_solvable
from partwise.client.split import everything
from partwise.client.state import Client, Progress, begin, total_weight, with_deltas
from partwise.client.update import Update
from partwise.config.judged import check_judged, check_rebuilt
from partwise.config.parts import (
    make_aggregator,
    make_choices,
    make_reconstruct,
    make_recruiting,
    make_server_optimizer,
    make_update,
    needs,
    rates_of,
)
from partwise.config.settings import Config
from partwise.model.partition import Partition
from partwise.model.spec import Model
from partwise.optimizers import ServerOptimizer
from partwise.randomness import child
from partwise.selection.choose import Choice
from partwise.server.mean import mean
from partwise.server.total import Aggregator, Report
from partwise.tasks.base import Task
from partwise.types import UserError

BEGAN = "began"  # kept with the local leaves: 1 after a client's first round, 0 while nothing is kept yet


def fed_per(
    model: Model,
    partition: Partition,
    *,
    update: Update,
    optimizer: ServerOptimizer,
    local: Reconstruct | None = None,
    aggregator: Aggregator | None = None,
    choose: Mapping[str, Choice] | None = None,
    check: Callable[[Client], None] | None = None,
) -> Algorithm:
    """Clients continue with the local part that they kept; before their first round, with initial values.

    `local` is what clients do to the local part before `update`. If `update` is joint, it trains the local
    part too. Evaluation uses the kept local part, on all examples of the client.
    """
    _check(partition)

    def train(client: Client, start: Progress) -> Trained:
        if local is not None:
            apart = client._replace(rng=child(client.rng, "local"))  # with separate randomness
            start = local(apart, start, everything)
        return update(client, start, everything)

    def client_update(client: Client) -> Report:
        trained = train(client, resume(client))
        keep = {**trained.progress.local, BEGAN: jnp.ones(())}
        changed = change(client, with_deltas(client, trained.progress))
        return Report(changed, total_weight(client, everything), trained.loss, keep)

    def personalize(client: Client, start: Progress) -> Progress:
        return start._replace(local=train(client, start).progress.local)

    keeps = (*partition.local_paths, BEGAN)
    return Algorithm(
        model=model,
        partition=partition,
        client=client_update,
        personalize=personalize,
        evaluate=lambda client: evaluate(client, resume(client), everything),
        aggregator=aggregator or mean(),
        optimizer=optimizer,
        choose=choices(partition, choose),
        check=check,
        keeps=keeps,
        judged_with=keeps,
    )


def resume(client: Client) -> Progress:
    """What was received, and the local part that the client kept; initial values if it never took part."""
    fresh = begin(client)
    began = client.kept[BEGAN] > 0
    return fresh._replace(
        local={path: jnp.where(began, client.kept[path], leaf) for path, leaf in fresh.local.items()}
    )


def _check(partition: Partition) -> None:
    if not partition.local_paths:
        raise UserError(
            "clients of FedPer, FedRep and LG-FedAvg keep a local part, and nothing of this model is local. Make a "
            "part of it local(), or use fed_avg."
        )
    if BEGAN in partition.paths:
        raise UserError(
            f"parameter '{BEGAN}': clients keep a number of that name beside their parameters; rename it"
        )


# How a configuration makes them


def prepare(task: Task, config: Config) -> Prepared:
    """FedPer and LG-FedAvg: the local part is trained together with the rest."""
    why = "the local part is trained with the rest, step by step"
    needs(config.algorithm, "update.method", config.update.method, ("steps",), why)
    if not config.update.joint:
        raise UserError(
            f"{config.algorithm} trains local and shared parts together: leave update.joint = true, or use fed_rep"
        )
    return _prepare_keeping(task, config, lambda rates: None)


def prepare_fed_rep(task: Task, config: Config) -> Prepared:
    """FedRep: first train the local part with the settings reconstruct.*, then the rest with update.*."""
    why = "it trains the local part before the others"
    needs(config.algorithm, "reconstruct.method", config.reconstruct.method, ("steps", "solve"), why)
    if config.update.joint:
        raise UserError(
            "fed_rep trains the local part before the shared ones: leave update.joint = false, or use fed_per"
        )
    make_reconstruct(config, rates_of(config))  # raises errors here, not during compilation
    check = check_solvable if config.reconstruct.method == "solve" else None
    return _prepare_keeping(task, config, lambda rates: make_reconstruct(config, rates), check)


def _prepare_keeping(
    task: Task,
    config: Config,
    make_local: Callable[[Mapping[str, Any]], Reconstruct | None],
    check: Callable[[Client], None] | None = None,
) -> Prepared:
    """Seen clients are evaluated with the local part that they kept. Unseen clients have none and rebuild
    theirs: RECONEVAL."""
    check_rebuilt(config)
    check_judged(task, config)
    setting = task.personal
    if not setting.partition.local_paths:
        raise UserError(
            f"clients of {config.algorithm} keep a local part, and task '{task.name}' has none: use fed_avg, or a "
            f"task with one"
        )
    store = task.train.select(setting.columns)
    choose, aggregator = make_choices(setting, config), make_aggregator(setting, config, store)
    build: Build = lambda rates: fed_per(
        setting.model,
        setting.partition,
        update=make_update(config, rates),
        optimizer=make_server_optimizer(config, rates),
        local=make_local(rates),
        aggregator=aggregator,
        choose=choose,
        check=check,
    )
    evaluation = build if task.seen else evaluation_build(setting, config)[0]
    return Prepared(build, rates_of(config), store, make_recruiting(config), evaluation, setting)


FED_PER = AlgorithmEntry(
    "FedPer: clients keep and train their local part, the head (Arivazhagan et al., 2019)",
    prepare,
    {"update.joint": True},
    unread={},
)
LG_FED_AVG = FED_PER._replace(
    summary="LG-FedAvg: the same, made for a local representation (Liang et al., 2020)"
)
FED_REP = AlgorithmEntry(
    "FedRep: clients keep their local part and train it before the shared one (Collins et al., 2021)",
    prepare_fed_rep,
    unread={},
)
