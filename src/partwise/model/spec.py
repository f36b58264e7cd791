"""A model is pure functions over a pytree of parameters; nothing here knows of clients.

`predict` and `loss` see a *batch*: a dict of arrays whose first axis is the example. The loss is a value for
every example, never a mean: the caller masks padding and divides once, so that a mean of batch means cannot
happen. Metrics are sums in the same way, finished (a square root, say) after everything has been added up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from partwise.types import Params

Batch = dict[str, jax.Array]


class Metric(NamedTuple):
    """A value per example, averaged over everything that was evaluated, then finished.

    An example counts with the metric's own weight, if it has one (the tags that a recall is of), else with the
    model's; a value is then a sum over what the weight counts.
    """

    values: Callable[[jax.Array, Batch], jax.Array]  # (outputs, batch) -> [B]
    finish: Callable[[float], float] = lambda mean: mean
    higher_is_better: bool = False
    weight: Callable[[Batch], jax.Array] | None = None


def one_per_example(batch: Batch) -> jax.Array:
    """The weight of plain examples."""
    return jnp.ones(next(iter(batch.values())).shape[0], jnp.float32)


class Model(NamedTuple):
    """What partwise needs to know of a model.

    init:    rng -> parameters
    predict: (parameters, batch, rng) -> outputs, first axis the example
    loss:    (outputs, batch) -> [B], the loss of every example (a sum over its tokens, if it has several)
    metrics: name -> Metric; the first is the one shown while training
    weight:  batch -> [B], what an example counts in a mean and in a client's weight (1, or its tokens)
    """

    init: Callable[[jax.Array], Params]
    predict: Callable[[Params, Batch, jax.Array], jax.Array]
    loss: Callable[[jax.Array, Batch], jax.Array]
    metrics: Mapping[str, Metric] = {}
    weight: Callable[[Batch], jax.Array] = one_per_example


def squared_error(outputs: jax.Array, batch: Batch, target: str) -> jax.Array:
    """Per-example squared error against the column `target`."""
    return jnp.square(outputs - batch[target])


def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a table by id; zeros where the id is -1: nothing, or outside the client's slice."""
    rows = table[jnp.maximum(ids, 0)]
    return jnp.where((ids >= 0).reshape(*ids.shape, *[1] * (rows.ndim - ids.ndim)), rows, 0)
