"""FedProx (Li et al., 2020), Algorithm 2: Federated Averaging whose clients are held to what they received.

A client minimises its loss plus (mu / 2) |x - x(0)|^2. All of its part is held, not only a batch's rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partwise.algorithm import Algorithm
from partwise.algorithms.fed_avg import fed_avg
from partwise.client.batches import Schedule
from partwise.client.fit import Optimizer as ClientOptimizer
from partwise.client.update import by_steps, proximal
from partwise.model.partition import Partition
from partwise.model.spec import Model
from partwise.selection.choose import Choice
from partwise.server.mean import Aggregator
from partwise.server.optimizers import Optimizer


def fed_prox(
    model: Model,
    partition: Partition,
    *,
    mu: Any,
    schedule: Schedule,
    client_optimizer: ClientOptimizer,
    optimizer: Optimizer,
    aggregator: Aggregator | None = None,
    choose: Mapping[str, Choice] | None = None,
) -> Algorithm:
    """mu = 0 is Federated Averaging."""
    update = by_steps(schedule, client_optimizer, extra=proximal(mu))
    return fed_avg(model, partition, update=update, optimizer=optimizer, aggregator=aggregator, choose=choose)
