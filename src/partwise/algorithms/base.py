"""The interface of an algorithm: a small record of pure functions, driven by any runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from partwise.aggregation.mean import Aggregator
from partwise.aggregation.total import Report
from partwise.client.state import Client, Progress
from partwise.metrics import Sums
from partwise.model.partition import Partition
from partwise.model.spec import Model
from partwise.server import Optimizer


class Algorithm(NamedTuple):
    """One published algorithm.

    client:      what a client does in a round, from what it holds to its report
    personalize: what a client does before it uses the model: rebuild its local part from all its examples, from
                 fresh values or from those it had (or nothing, if there is no local part)
    evaluate:    the metrics of a client as sums
    check:       raises if the algorithm does not fit this client's model and data
    """

    model: Model
    partition: Partition
    client: Callable[[Client], Report]
    personalize: Callable[[Client, Progress], Progress]
    evaluate: Callable[[Client], dict[str, Sums]]
    aggregator: Aggregator
    optimizer: Optimizer
    check: Callable[[Client], None] | None = None


# Rates by name -> algorithm. Called inside the compiled function, so that rates are values, not constants:
# another rate needs no compilation, and many rates can run side by side.
Build = Callable[[Mapping[str, Any]], Algorithm]


def init_params(algorithm: Algorithm, rng: jax.Array) -> dict[str, jax.Array]:
    """The leaves that the server stores, before training."""
    return algorithm.partition.split(algorithm.model.init(rng))[0]


def change(client: Client, progress: Progress) -> dict[str, jax.Array]:
    """Delta_i = g_i - g (FedRecon, Algorithm 1)."""
    shared = {path: leaf - client.received.shared[path] for path, leaf in progress.shared.items()}
    return {**shared, **progress.deltas}
