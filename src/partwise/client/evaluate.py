"""Metrics of one client, as sums or as pairs (RECONEVAL's second half: FedRecon, section 4.1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from partwise.client.batches import Batches, Drawn, over_batches
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
        name: no_pairs(metric, _whole_batches(client.examples.capacity))
        if isinstance(metric, Pooled)
        else zero_sums()
        for name, metric in metrics.items()
    }
    return over_batches(body, nothing, client.examples, query, Batches(BATCH))


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
    value = check_each(name, "values", metric.values(outputs, batch), mask.shape)
    weight = check_each(name, "weights", (metric.weight or model.weight)(batch), mask.shape)
    return Sums(total[0] + masked(value), total[1] + masked(weight))


def check_each(name: str, what: str, found: jax.Array, expected: tuple[int, ...]) -> jax.Array:
    """Return the array. Raises `UserError` while a program is traced if it does not have one entry per example.
    Otherwise broadcasting would repeat it."""
    if jnp.shape(found) != expected:
        raise UserError(
            f"the {what} of the metric '{name}' have shape {jnp.shape(found)} for a batch of {expected[0]} "
            f"examples; expected {expected}, one for every example and no mean over them: mend the metric"
        )
    return found


def no_pairs(metric: Pooled, size: int) -> Pairs:
    """Room for the pairs of so many examples."""
    return Pairs(
        jnp.zeros((size, *metric.each.shape), metric.each.dtype), jnp.zeros(size), jnp.zeros(size, bool)
    )


def _whole_batches(most: int) -> int:
    return -(-max(most, 1) // BATCH) * BATCH


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
    scores = check_each(name, "scores", metric.scores(outputs, batch), (*mask.shape, *metric.each.shape))
    values = (scores, check_each(name, "labels", metric.labels(batch), mask.shape), mask)
    at = lambda array, part: jax.lax.dynamic_update_slice_in_dim(
        array, part.astype(array.dtype), step * BATCH, 0
    )
    return Pairs(*map(at, pairs, values))
