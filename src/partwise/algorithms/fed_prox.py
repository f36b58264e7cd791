"""FedProx (Li et al., 2020), Algorithm 2: Federated Averaging whose clients stay near what they received.

A client minimises its loss plus (mu / 2) |x - x(0)|^2. The second term is over all of the client's part, not
only over the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from partwise.algorithm import Algorithm, Build
from partwise.algorithms.entry import AlgorithmEntry, Prepared
from partwise.algorithms.fed_avg import UNREAD, fed_avg, prepare_stateful, unselected
from partwise.client.batches import Batches
from partwise.client.fit import ClientOptimizer, Extra
from partwise.client.state import Client, Progress, received_slices, value_leaves
from partwise.client.update import by_steps
from partwise.config.parts import (
    make_aggregator,
    make_choices,
    make_schedule,
    make_scheduled,
    make_server_optimizer,
    needs,
)
from partwise.config.sections import LARGEST
from partwise.config.settings import Config, Own
from partwise.data.store import ClientStore
from partwise.model.partition import Partition
from partwise.model.spec import Model
from partwise.optimizers import ServerOptimizer
from partwise.selection.choose import Choice
from partwise.server.total import Aggregator
from partwise.tasks.base import Setting, Task
from partwise.types import Limits

MU = "update.proximal"


def fed_prox(
    model: Model,
    partition: Partition,
    *,
    mu: Any,
    schedule: Batches,
    client_optimizer: ClientOptimizer,
    optimizer: ServerOptimizer,
    aggregator: Aggregator | None = None,
    choose: Mapping[str, Choice] | None = None,
) -> Algorithm:
    """FedProx. With mu = 0 it is Federated Averaging. The other arguments are those of `fed_avg` and
    `client.update`."""
    update = by_steps(schedule, client_optimizer, extra=proximal(mu))
    return fed_avg(model, partition, update=update, optimizer=optimizer, aggregator=aggregator, choose=choose)


def proximal(mu: Any) -> Callable[[Client], Extra]:
    """The gradient of (mu / 2) |x - x(0)|^2, where x(0) is what the client received (eq. 2)."""

    def extra(client: Client) -> Extra:
        received = received_slices(client, value_leaves(client))

        def gradient(now: Progress) -> dict[str, dict[str, jax.Array]]:
            shared = {path: mu * (x - client.received.shared[path]) for path, x in now.shared.items()}
            keyed = {path: mu * (x - received.get(path, 0)) for path, x in now.keyed.items()}
            return {"shared": shared, "keyed": keyed}

        return gradient

    return extra


def prepare(task: Task, config: Config) -> Prepared:
    """FedProx for a task: gradient steps on the clients; everything else as in FedAvg."""
    why = "what holds a client near the model is a part of the gradient of each step"
    needs(config.algorithm, "update.method", config.update.method, ("steps",), why)
    bare = unselected(task, config, FED_PROX)

    def make_build(setting: Setting, store: ClientStore) -> Build:
        aggregator, choose = make_aggregator(setting, bare, store), make_choices(setting, bare)
        return lambda rates: fed_prox(
            setting.model,
            setting.partition,
            mu=config.own[MU],
            schedule=make_schedule(config),
            client_optimizer=make_scheduled(config, rates, "update"),
            optimizer=make_server_optimizer(config, rates),
            aggregator=aggregator,
            choose=choose,
        )

    return prepare_stateful(task, config, make_build)


FED_PROX = AlgorithmEntry(
    "FedProx: FedAvg whose clients stay near what they received (Li et al., 2020)",
    prepare,
    own={MU: Own(0.01, "mu: how strongly steps are held to what was received", Limits(0, LARGEST))},
    trains="stateful",
    selects=False,
    unread=UNREAD,
)
