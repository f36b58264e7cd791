"""Federated Reconstruction (Singhal et al., 2021), Algorithm 1. Its variants are values of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from partwise.algorithm import Algorithm, Build, change, choices
from partwise.algorithms.entry import AlgorithmEntry, Prepared
from partwise.client.evaluate import evaluate
from partwise.client.fit import Trained
from partwise.client.reconstruct import Reconstruct, check_solvable
from partwise.client.split import STRIDES, Split, everything, in_other_order
from partwise.client.state import Client, Progress, begin, total_weight, with_deltas
from partwise.client.through import Through
from partwise.client.update import Update
from partwise.config.judged import check_judged, check_rebuilt, judged_setting, server_side
from partwise.config.parts import (
    make_aggregator,
    make_choices,
    make_evaluation_split,
    make_fine_tune,
    make_reconstruct,
    make_recruiting,
    make_server_optimizer,
    make_split,
    make_through,
    make_update,
    rates_of,
)
from partwise.config.settings import Config, Own
from partwise.data.store import ClientStore
from partwise.metrics import Measured, zero_sums
from partwise.model.partition import Partition
from partwise.model.spec import Model
from partwise.optimizers import ServerOptimizer
from partwise.randomness import child
from partwise.selection.choose import Choice
from partwise.server.mean import mean
from partwise.server.total import Aggregator, Report
from partwise.tasks.base import Setting, Task, algorithm_of
from partwise.types import Limits, UserError

PASSES = "update.passes"


def fed_recon(
    model: Model,
    partition: Partition,
    *,
    split: Split,
    reconstruct: Reconstruct,
    update: Update | Through,
    optimizer: ServerOptimizer,
    aggregator: Aggregator | None = None,
    passes: int = 1,
    evaluation_split: Split | None = None,
    choose: Mapping[str, Choice] | None = None,
    check: Callable[[Client], None] | None = None,
    fine_tune: Update | None = None,
    reorder: bool = False,
) -> Algorithm:
    """Federated Reconstruction: S, R, U and the server step. Evaluation is RECONEVAL.

    Args:
        model: The model.
        partition: The roles of its leaves.
        split: S, how a client's examples are split into support and query set.
        reconstruct: R, how the local part is rebuilt from the support set (`client.reconstruct`).
        update: U, how shared and keyed parts are trained on the query set (`client.update`, `client.through`).
        optimizer: The server's optimizer.
        aggregator: How updates are combined (default: the mean weighted by query examples).
        passes: With more than 1, R and U are repeated on the client. Each starts where the other ended:
            alternating minimisation (patent claim 5).
        evaluation_split: The split for evaluation (default: `split`). R uses its support set, the metrics its
            query set.
        choose: {key space: choice of keys}; by default all keys that could matter.
        check: Raises `UserError` if the algorithm does not fit a client's model and data.
        fine_tune: Steps on shared and keyed parts before the metrics of an evaluation, again on the support
            set (section 5.2, FedRecon + Finetune); None for no steps.
        reorder: Whether training splits a client's examples in another order in every round.
    """
    evaluated = evaluation_split or split

    def client_update(client: Client) -> Report:
        trained = Trained(begin(client), zero_sums())
        support, query = _reordered(client, split) if reorder else split
        train = update.given(support) if isinstance(update, Through) else update
        for number in range(passes):
            here = _phase(client, 2 * number)
            progress = reconstruct(here, trained.progress, support)  # l_i <- R(D_s, L, g)
            trained = train(_phase(client, 2 * number + 1), progress, query)  # g_i <- U(D_q, l_i, g)
        weight = total_weight(client, query)  # n_i <- |D_q|
        return Report(change(client, with_deltas(client, trained.progress)), weight, trained.loss)

    def personalize(client: Client, start: Progress) -> Progress:
        return reconstruct(_phase(client, 0), start, everything)

    def recon_eval(client: Client) -> Measured:
        rebuilt = reconstruct(_phase(client, 0), begin(client), evaluated.support)
        if fine_tune:
            rebuilt = fine_tune(_phase(client, 1), rebuilt, evaluated.support).progress
        return evaluate(client, rebuilt, evaluated.query)

    return Algorithm(
        model=model,
        partition=partition,
        client=client_update,
        personalize=personalize,
        evaluate=recon_eval,
        aggregator=aggregator or mean(),
        optimizer=optimizer,
        choose=choices(partition, choose),
        check=check,
    )


def _reordered(client: Client, split: Split) -> Split:
    """The split of this client's examples in an order of this round's own."""
    stride, first = jax.random.split(child(client.rng, "order"))
    count = jnp.maximum(client.examples.count, 1)
    return in_other_order(
        split, jax.random.choice(stride, jnp.array(STRIDES)), jax.random.randint(first, (), 0, count)
    )


def _phase(client: Client, number: int) -> Client:
    """The client with separate randomness for this phase of the round."""
    return client._replace(rng=child(client.rng, f"phase {number}"))


# How a configuration makes it, for training and for the evaluation of unseen clients after any algorithm


def prepare(task: Task, config: Config) -> Prepared:
    """FedRecon for a task. In training and in evaluation, a client rebuilds its local part."""
    if task.seen:
        raise UserError(
            f"task '{task.name}' judges clients by parameters that the server keeps for them, and fed_recon keeps "
            f"none: use fed_avg, fed_per or central, or a task of unseen clients"
        )
    made_for = algorithm_of(task.defaults)
    if not task.personal.partition.local_paths and made_for != "fed_recon":
        raise UserError(
            f"fed_recon rebuilds local parameters, and task '{task.name}' has none: it would train on the query "
            f"half of each client's examples alone. Use {made_for}, or a task with a local part"
        )
    check_rebuilt(config)
    store = task.train.select(task.personal.columns)
    build = recon_build(task.personal, config, store)
    return Prepared(build, rates_of(config), store, make_recruiting(config), build, task.personal)


def recon_build(
    setting: Setting, config: Config, store: ClientStore | None = None, judged: Split | None = None
) -> Build:
    """FedRecon with the parts that the configuration names. `judged` replaces its split for evaluated
    clients."""
    part, here = config.reconstruct, make_split(config.split)
    make_reconstruct(config, rates_of(config))  # raises errors here, not during compilation
    train = make_through if config.update.method == "through" else make_update
    choose = make_choices(setting, config)
    aggregator = make_aggregator(setting, config, store, here)

    def build(rates: Mapping[str, Any]) -> Algorithm:
        return fed_recon(
            setting.model,
            setting.partition,
            split=here,
            reconstruct=make_reconstruct(config, rates),
            update=train(config, rates),
            optimizer=make_server_optimizer(config, rates),
            aggregator=aggregator,
            choose=choose,
            passes=config.own.get(PASSES, 1),
            evaluation_split=judged or make_evaluation_split(config),
            check=check_solvable if part.method == "solve" else None,
            fine_tune=make_fine_tune(config, rates),
            reorder=config.split.kind == "random",
        )

    return build


def evaluation_build(setting: Setting, config: Config) -> tuple[Build, dict[str, float]]:
    """What an unseen client does with a trained model, and its rates; `setting` is a `judged_setting`."""
    if config.evaluation.local == "trained":
        config = config.changed({"reconstruct.method": "skip"})
    return recon_build(setting, config), rates_of(config)


def averaged_evaluation(task: Task, config: Config, build: Build) -> tuple[Build, Setting]:
    """The evaluation after an algorithm whose parameters are all on the server. Seen users have rows there:
    standard evaluation. Unseen users rebuild their own: RECONEVAL."""
    check_judged(task, config)
    if task.seen or not (task.personal.partition.local_paths or config.fine_tune.max_steps != 0):
        return build, server_side(task)
    setting = judged_setting(task.personal, config)
    return evaluation_build(setting, config)[0], setting


FED_RECON = AlgorithmEntry(
    "Federated Reconstruction (Singhal et al., 2021)",
    prepare,
    own={PASSES: Own(1, "how often reconstruction and update follow one another in a round", Limits(1, 100))},
    splits=True,
    unread={},
)
