"""Metrics of one client, as sums or as pairs (RECONEVAL's second half: FedRecon, section 4.1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from partwise.client.batches import Drawn, Schedule, over_batches
from partwise.client.split import Subset
from partwise.client.state import Client, Progress, outputs_of, read
from partwise.metrics import Measured, Pairs, Sums, zero_sums
from partwise.model.spec import Batch, Metric, Model, Pooled
from partwise.randomness import child
from partwise.types import UserError

BATCH = 16  # small, because many clients have few examples and a batch is always computed completely


def evaluate(client: Client, progress: Progress, query: Subset) -> Measured:
    """Compute every metric of the model (and its loss) over a subset of the client's examples.

    Args:
        client: The client.
        progress: The client's parameters.
        query: The examples to evaluate.

    Returns:
        {name: sums}. For a `Pooled` metric, the scores and labels of the subset, in its order and padded.
    """
    model = client.model
    losses = {"loss": Metric(model.loss)}
    metrics = losses | dict(model.metrics)

    def body(i: jax.Array, drawn: Drawn, so_far: Measured) -> Measured:
        rows, need = read(client, progress, drawn)
        outputs = outputs_of(client, progress, rows, need.batch, child(client.rng, "predict"))
        return {
            name: _put(name, so_far[name], metric, outputs, need.batch, need.mask, i)
            if isinstance(metric, Pooled)
            else _add(name, so_far[name], metric, model, outputs, need.batch, need.mask)
            for name, metric in metrics.items()
        }

    nothing = {
        name: _room(client.examples.capacity) if isinstance(metric, Pooled) else zero_sums()
        for name, metric in metrics.items()
    }
    return over_batches(body, nothing, client.examples, query, Schedule(BATCH))


def _add(
    name: str,
    total: Sums | Pairs,
    metric: Metric,
    model: Model,
    outputs: jax.Array,
    batch: Batch,
    mask: jax.Array,
) -> Sums:
    masked = lambda each: jnp.sum(jnp.where(mask, each, 0), dtype=jnp.float32)
    value, weight = metric.values(outputs, batch), (metric.weight or model.weight)(batch)
    _check_each(name, mask, values=value, weights=weight)
    return Sums(total[0] + masked(value), total[1] + masked(weight))


def _check_each(name: str, mask: jax.Array, **found: jax.Array) -> None:
    """Raise `UserError` while a program is traced if an array does not have one number per example. Otherwise
    broadcasting would repeat it."""
    for what, array in found.items():
        if jnp.shape(array) != mask.shape:
            raise UserError(
                f"the {what} of the metric '{name}' have shape {jnp.shape(array)} for a batch of {len(mask)} "
                f"examples; expected {mask.shape}, one for every example and no mean over them: mend the metric"
            )


def _room(most: int) -> Pairs:
    """Empty pairs with room for whole batches."""
    size = -(-max(most, 1) // BATCH) * BATCH
    return Pairs(jnp.zeros(size), jnp.zeros(size), jnp.zeros(size, bool))


def _put(
    name: str,
    pairs: Sums | Pairs,
    metric: Pooled,
    outputs: jax.Array,
    batch: Batch,
    mask: jax.Array,
    step: jax.Array,
) -> Pairs:
    """Write the batch's pairs to their places. A lane that is done continues with batches whose mask is
    empty."""
    values = (metric.scores(outputs, batch), metric.labels(batch), mask)
    _check_each(name, mask, scores=values[0], labels=values[1])
    at = lambda array, part: jax.lax.dynamic_update_slice_in_dim(
        array, part.astype(array.dtype), step * BATCH, 0
    )
    return Pairs(*map(at, pairs, values))
