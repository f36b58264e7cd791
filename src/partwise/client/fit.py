"""Gradient steps: k steps of an optimizer on some groups of a client's parameters, the others left alone.

Every gradient of the library is taken here (and in `solve`). A plain number as optimizer is SGD with that
rate; it is special only in that it needs no state and changes only the rows of the batch, which makes it much
faster. Any optax transformation works too, on the client's whole slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from partwise import tree
from partwise.client.batches import Drawn, Schedule, over_batches
from partwise.client.split import Subset
from partwise.client.state import (
    Client,
    Group,
    Progress,
    batch_loss,
    get_parts,
    put_parts,
    read,
    with_deltas,
)
from partwise.metrics import Sums, add_sums, zero_sums
from partwise.selection import slices
from partwise.selection.slices import own_rows

Optimizer = float | jax.Array | optax.GradientTransformation
Penalty = Callable[[Any], jax.Array]  # of the local part, added to the mean loss


class Trained(NamedTuple):
    """Progress, and the loss summed over the batches that led to it."""

    progress: Progress
    loss: Sums


def fit(
    client: Client,
    progress: Progress,
    subset: Subset,
    schedule: Schedule,
    optimizer: Optimizer,
    groups: tuple[Group, ...],
    penalty: Penalty | None = None,
) -> Trained:
    """Train the named groups on a subset of the client's examples."""
    if "keyed" in groups:
        progress = with_deltas(client, progress)
    move = _optax(optimizer) if isinstance(optimizer, optax.GradientTransformation) else _sgd(optimizer)
    start = (progress, move.init(client, progress, groups), zero_sums())

    def step(i: jax.Array, drawn: Drawn, carry: Any) -> Any:
        now, state, sums = carry
        rows, need = read(client, now, drawn)
        rng = jax.random.fold_in(client.rng, i)

        def objective(parts: dict) -> tuple[jax.Array, Sums]:
            here = put_parts(now, parts)
            value, total = batch_loss(client, here, parts.get("keyed", rows), need.batch, drawn.mask, rng)
            if penalty is not None:
                value = value + jnp.where(drawn.mask.any(), penalty(here.local), 0)
            return value, total

        parts = get_parts(now._replace(deltas=rows), groups)
        gradients, total = jax.grad(objective, has_aux=True)(parts)
        now, state = move.step(client, now, gradients, state, need, drawn.mask.any(), groups)
        return now, state, add_sums(sums, total)

    progress, _, loss = over_batches(step, start, client.examples, subset, schedule)
    return Trained(progress, loss)


class _Move(NamedTuple):
    init: Callable[..., Any]
    step: Callable[..., tuple[Progress, Any]]


def _sgd(rate: float | jax.Array) -> _Move:
    """p <- p - rate * gradient, on the batch's rows only: exact, because the others' gradient is zero."""

    def step(client, now, gradients, state, need, active, groups):
        change = jax.tree_util.tree_map(lambda g: jnp.where(active, -rate * g, 0), gradients)
        dense = tuple(group for group in groups if group != "keyed")
        moved: dict[str, Any] = jax.tree_util.tree_map(
            jnp.add, get_parts(now, dense), {group: change[group] for group in dense}
        )
        if "keyed" in groups:
            moved["keyed"] = slices.scatter(client.partition, now.deltas, change["keyed"], need)
        return put_parts(now, moved), state

    return _Move(lambda *given: (), step)


def _received_rows(client: Client) -> dict[str, jax.Array]:
    """What was received of the client's own keys, in the shape of its deltas."""
    result = {}
    for path, table in client.received.tables.items():
        keys = client.examples.keys[client.partition.roles[path].space]
        rows = own_rows(keys, jnp.asarray(0), keys.capacity, table.shape[0])
        result[path] = table.at[rows].get(mode="fill", fill_value=0)
    return result


def _optax(optimizer: optax.GradientTransformation) -> _Move:
    """Any optimizer: it sees the client's slice with its values, and keeps its state where a batch is empty."""

    def values(client: Client, now: Progress, groups: tuple[Group, ...]) -> dict[str, Any]:
        parts = get_parts(now, groups)
        if "keyed" in groups:
            parts["keyed"] = jax.tree_util.tree_map(jnp.add, _received_rows(client), parts["keyed"])
        return parts

    def step(client, now, gradients, state, need, active, groups):
        old = get_parts(now, groups)
        if "keyed" in groups:
            zeros = jax.tree_util.tree_map(jnp.zeros_like, old["keyed"])
            keyed = slices.scatter(client.partition, zeros, gradients["keyed"], need)
            gradients = gradients | {"keyed": keyed}
        changes, new_state = optimizer.update(gradients, state, values(client, now, groups))
        new = tree.where(active, optax.apply_updates(old, changes), old)
        return put_parts(now, new), tree.where(active, new_state, state)

    return _Move(lambda *given: optimizer.init(values(*given)), step)
