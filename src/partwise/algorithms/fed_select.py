"""Federated Select (Charles et al., 2022), Algorithm 2: clients train slices of a model that is too large to
send.

A client chooses keys from its own data or at random. It is sent the slices of these keys and all shared
leaves. It trains for an epoch on what it has, and returns the change. The server fills in zeros (phi) and
takes the mean over the cohort (eq. 5). If all keys are chosen, this is Federated Averaging.
"""

from __future__ import annotations

from collections.abc import Mapping

from partwise.algorithm import Algorithm
from partwise.algorithms.entry import AlgorithmEntry, Prepared
from partwise.algorithms.fed_avg import UNREAD, fed_avg, prepare_averaging
from partwise.client.update import Update
from partwise.config.settings import Config
from partwise.model.partition import Partition
from partwise.model.spec import Model
from partwise.optimizers import ServerOptimizer
from partwise.selection.choose import Choice
from partwise.server.mean import mean, uniform
from partwise.server.total import Aggregator
from partwise.tasks.base import Task
from partwise.types import UserError


def fed_select(
    model: Model,
    partition: Partition,
    *,
    choose: Mapping[str, Choice],
    update: Update,
    optimizer: ServerOptimizer,
    aggregator: Aggregator | None = None,
) -> Algorithm:
    """Algorithm 2, with psi and phi from the partition. All clients have the same weight, as in eq. 5."""
    if not partition.spaces:
        raise UserError(
            "Federated Select needs keyed parameters, and this partition has none: give some leaf the role "
            "keyed(space), or use fed_avg"
        )
    return fed_avg(
        model,
        partition,
        update=update,
        optimizer=optimizer,
        aggregator=aggregator or mean(uniform),
        choose=choose,
    )


def prepare(task: Task, config: Config) -> Prepared:
    """Federated Select for a task: keys as in `select.SPACE`; everything else as in FedAvg."""
    return prepare_averaging(task, config, fed_select)


FED_SELECT = AlgorithmEntry(
    "Federated Select (Charles et al., 2022)", prepare, trains="stateful", unread=UNREAD
)
