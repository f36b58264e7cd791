"""Federated Averaging (McMahan et al., 2017): all parameters are the server's, all data trains them.

With a user table keyed by user, every client fetches, trains and returns its own row: for matrix
factorisation this equals the stateful FedPer (FedRecon, footnote 4).
"""

from __future__ import annotations

from collections.abc import Mapping

from partwise.algorithm import Algorithm, change, choices
from partwise.client.evaluate import evaluate
from partwise.client.split import everything
from partwise.client.state import Client, begin, total_weight, with_deltas
from partwise.client.update import Update
from partwise.model.partition import Partition
from partwise.model.spec import Model
from partwise.selection.choose import Choice
from partwise.server.mean import Aggregator, mean
from partwise.server.optimizers import Optimizer
from partwise.server.total import Report
from partwise.types import UserError


def fed_avg(
    model: Model,
    partition: Partition,
    *,
    update: Update,
    optimizer: Optimizer,
    aggregator: Aggregator | None = None,
    choose: Mapping[str, Choice] | None = None,
) -> Algorithm:
    """Local training on all of a client's examples; standard evaluation."""
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
        model,
        partition,
        client_update,
        lambda client, start: start,
        lambda client: evaluate(client, begin(client), everything),
        aggregator or mean(),
        optimizer,
        choices(partition, choose),
    )
