"""Federated Submodel Averaging (Ding et al., 2022), Algorithm 1: the mean of rows, corrected by their heat.

A client trains the shared part and the rows of its own keys (lines 12 to 18), as in Federated Averaging. The
server multiplies the mean update of row m by N / n_m (line 9), where n_m is the number of clients that hold
the row. The correction works with every algorithm here (`server.mean = heat`). This file is the paper's
algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping

from partwise.algorithm import Algorithm, Build
from partwise.algorithms.entry import AlgorithmEntry, Prepared
from partwise.algorithms.fed_avg import UNREAD, fed_avg, prepare_stateful, unselected
from partwise.client.update import Update
from partwise.config.parts import make_aggregator, make_server_optimizer, make_update, needs
from partwise.config.settings import Config
from partwise.data.heat import Heat
from partwise.data.store import ClientStore
from partwise.model.partition import Partition
from partwise.model.spec import Model
from partwise.optimizers import ServerOptimizer
from partwise.server.heat_mean import estimated_sub_mean, sub_mean
from partwise.server.mean import Weigh, uniform
from partwise.tasks.base import Setting, Task
from partwise.types import UserError


def fed_sub_avg(
    model: Model,
    partition: Partition,
    *,
    update: Update,
    optimizer: ServerOptimizer,
    heats: Mapping[str, Heat] | None,
    weigh: Weigh = uniform,
    cap: float | None = None,
) -> Algorithm:
    """Federated Submodel Averaging.

    Args:
        model: The model.
        partition: The roles of its leaves. At least one must be keyed.
        update: How a client trains (`client.update`).
        optimizer: The server's optimizer.
        heats: {key space: heat} (`selection.key_heat.count_heats`); None if heat is estimated from the
            cohorts during training.
        weigh: The weight of a client.
        cap: The largest factor N / n_m; None for no limit.
    """
    if not partition.spaces:
        raise UserError(
            "Federated Submodel Averaging corrects keyed parameters, and this partition has none: give some leaf "
            "the role keyed(space), or use fed_avg"
        )
    known = heats is not None
    aggregator = (
        sub_mean(heats, weigh, cap) if known else estimated_sub_mean(tuple(partition.spaces), weigh, cap)
    )
    return fed_avg(model, partition, update=update, optimizer=optimizer, aggregator=aggregator)


def prepare(task: Task, config: Config) -> Prepared:
    """FedSubAvg for a task. Heat is counted before training (server.mean = heat), or estimated during
    training (seen)."""
    why = "it is the mean that heat corrects, and fed_avg has the others"
    needs(config.algorithm, "server.mean", config.server.mean, ("heat", "seen"), why)
    bare = unselected(task, config, FED_SUB_AVG)

    def make_build(setting: Setting, store: ClientStore) -> Build:
        aggregator = make_aggregator(setting, bare, store)
        return lambda rates: fed_avg(
            setting.model,
            setting.partition,
            update=make_update(config, rates),
            optimizer=make_server_optimizer(config, rates),
            aggregator=aggregator,
        )

    return prepare_stateful(task, config, make_build)


FED_SUB_AVG = AlgorithmEntry(
    "Federated Submodel Averaging: means corrected by heat (Ding et al., 2022)",
    prepare,
    {"server.mean": "heat"},
    trains="stateful",
    selects=False,
    unread=UNREAD,
)
