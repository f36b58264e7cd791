"""Federated Submodel Averaging (Ding et al., 2022), Algorithm 1: the mean of rows, corrected by their heat.

A client trains the shared part and the rows of its own keys (lines 12 to 18), as in Federated Averaging. The server
multiplies the mean update of row m by N / n_m (line 9), n_m being the number of clients that hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax

from partwise.algorithm import Algorithm
from partwise.algorithms.fed_avg import fed_avg
from partwise.client.update import Update
from partwise.data.heat import Heat
from partwise.model.partition import Partition
from partwise.model.spec import Model
from partwise.server.heat_mean import estimated_sub_mean, sub_mean
from partwise.server.mean import uniform
from partwise.server.optimizers import Optimizer
from partwise.server.total import Report
from partwise.types import UserError


def fed_sub_avg(
    model: Model,
    partition: Partition,
    *,
    update: Update,
    optimizer: Optimizer,
    heats: Mapping[str, Heat] | None,
    weigh: Callable[[Report], jax.Array] = uniform,
    cap: float | None = None,
) -> Algorithm:
    """`heats` by key space (`selection.heat.count_heats`); None: estimated from the cohorts as they come."""
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
