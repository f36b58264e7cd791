"""Metrics of one client, as sums (RECONEVAL's second half: FedRecon, section 4.1)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from partwise.client.batches import Drawn, Schedule, over_batches
from partwise.client.split import Subset
from partwise.client.state import Client, Progress, local_values, read
from partwise.metrics import Sums, zero_sums

BATCH = 64


def evaluate(client: Client, progress: Progress, query: Subset) -> dict[str, Sums]:
    """Every metric of the model (and its loss) over a subset of the client's examples."""
    model = client.model

    def body(i: jax.Array, drawn: Drawn, sums: dict[str, Sums]) -> dict[str, Sums]:
        rows, need = read(client, progress, drawn)
        server = {**client.received.frozen, **progress.shared, **rows}
        params = client.partition.merge(server, local_values(client, progress))
        outputs = model.predict(params, need.batch, client.rng)
        values: dict[str, Any] = {"loss": model.loss(outputs, need.batch)}
        values |= {name: metric.values(outputs, need.batch) for name, metric in model.metrics.items()}
        weigh = {name: metric.weight or model.weight for name, metric in model.metrics.items()}
        masked = lambda each: jnp.sum(jnp.where(need.mask, each, 0))
        return {
            name: Sums(
                total.value + masked(values[name]),
                total.weight + masked(weigh.get(name, model.weight)(need.batch)),
            )
            for name, total in sums.items()
        }

    return over_batches(
        body, dict.fromkeys(["loss", *model.metrics], zero_sums()), client.examples, query, Schedule(BATCH)
    )
