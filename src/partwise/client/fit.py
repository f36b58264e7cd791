"""Gradient steps: k steps of an optimizer on some groups of a client's parameters. The other groups do not
change.

Every gradient of the library is computed here (and in `solve`). If the optimizer is a plain number, it is SGD
with that rate. SGD needs no state and changes only the rows of the batch, which makes it much faster. Any
optax transformation works too, on the client's whole slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from partwise import tree
from partwise.client.batches import Batches, Drawn, over_batches
from partwise.client.split import Subset
from partwise.client.state import (
    Client,
    Group,
    Progress,
    batch_loss,
    get_parts,
    put_parts,
    read,
    received_slices,
    value_leaves,
    whole_leaves,
    with_deltas,
)
from partwise.metrics import Sums, add_sums, zero_sums
from partwise.randomness import child
from partwise.selection import slices

Stepping = float | jax.Array | optax.GradientTransformation
ClientOptimizer = (
    Stepping | Callable[[Any], Stepping]
)  # or a function of the round (`Client.round`) that gives it
# The gradient of what a procedure adds to the loss, by group and path. It covers the client's whole part, including
# rows that the batch does not name.
Extra = Callable[[Progress], Mapping[str, Mapping[str, jax.Array]]]


class Trained(NamedTuple):
    """The progress after training, and the loss summed over the batches that were used."""

    progress: Progress
    loss: Sums


def fit(
    client: Client,
    progress: Progress,
    subset: Subset,
    schedule: Batches,
    optimizer: ClientOptimizer,
    groups: tuple[Group, ...],
    extra: Extra | None = None,
) -> Trained:
    """Train the named groups on a subset of the client's examples.

    Args:
        client: The client.
        progress: The parameters to start from.
        subset: The examples to train on.
        schedule: Batch size, epochs and steps.
        optimizer: A rate for SGD, an optax transformation, or a function of the client's round that gives one.
        groups: The groups that are trained: "shared", "keyed", "local".
        extra: A function of the progress; its result is added to the gradient of the loss.
    """
    if "keyed" in groups:
        progress = with_deltas(client, progress)
    if callable(optimizer):
        optimizer = optimizer(client.round)
    move = _optax(optimizer) if isinstance(optimizer, optax.GradientTransformation) else _sgd(optimizer)
    start = (progress, move.init(client, progress, groups), zero_sums())

    def step(i: jax.Array, drawn: Drawn, carry: Any) -> Any:
        now, state, sums = carry
        rows, need = read(client, now, drawn)
        rng = jax.random.fold_in(child(client.rng, "step"), i)

        def objective(parts: dict) -> tuple[jax.Array, Sums]:
            here = put_parts(now, parts)
            return batch_loss(client, here, parts.get("keyed", rows), need.batch, need.mask, rng)

        parts = get_parts(now._replace(keyed=rows), groups)
        gradients, total = jax.grad(objective, has_aux=True)(parts)
        more = extra(now) if extra else {}
        now, state = move.step(client, now, gradients, more, state, need, need.mask.any(), groups)
        return now, state, add_sums(sums, total)

    begin = first_batch(client, subset, schedule) if schedule.anywhere else 0
    progress, _, loss = over_batches(step, start, client.examples, subset, schedule, begin)
    return Trained(progress, loss)


def first_batch(client: Client, subset: Subset, schedule: Batches) -> jax.Array:
    """The number of the batch with which a client begins in this round, at random."""
    batches = schedule.steps_per_epoch(subset.count(client.examples.count))
    return jax.random.randint(child(client.rng, "begin"), (), 0, jnp.maximum(batches, 1))


class _Move(NamedTuple):
    init: Callable[..., Any]
    step: Callable[..., tuple[Progress, Any]]


def _sgd(rate: float | jax.Array) -> _Move:
    """p <- p - rate * gradient. Of keyed rows, only the batch's rows change. This is exact, because the
    gradient of the other rows is zero."""

    def step(client, now, gradients, more, state, need, active, groups):
        change, pushed = jax.tree_util.tree_map(
            lambda g: jnp.where(active, -rate * g, 0).astype(g.dtype), (gradients, dict(more))
        )
        dense = tuple(group for group in groups if group != "keyed")
        moved: dict[str, Any] = jax.tree_util.tree_map(
            jnp.add, get_parts(now, dense), {group: change[group] for group in dense}
        )
        if "keyed" in groups:
            moved["keyed"] = add_rows(client, now.keyed, change["keyed"], need)
        return put_parts(now, _with(moved, pushed)), state

    return _Move(lambda *given: (), step)


def _with(parts: Mapping[str, Any], more: Mapping[str, Mapping[str, jax.Array]]) -> dict[str, Any]:
    """Parts by group and path, with `more` added where it is given; its type is at least as wide as theirs."""
    add = lambda part, extra: part | {p: (part[p] + x).astype(part[p].dtype) for p, x in extra.items()}
    return {group: add(part, more.get(group, {})) for group, part in parts.items()}


def add_rows(
    client: Client, into: Mapping[str, Any], rows: Mapping[str, Any], need: slices.BatchRows
) -> dict:
    """Add to whole slices the rows that are keys (padding stays as it is), and to the other leaves the
    batch's rows."""
    whole = [path for path in whole_leaves(client) if path in into]
    keys = {path: client.examples.keys[client.partition.roles[path].space] for path in whole}
    real = {path: slices.is_key(keys[path], into[path].ndim) for path in whole}
    added = {path: into[path] + jnp.where(real[path], rows[path], 0) for path in whole}
    rest = {path: delta for path, delta in into.items() if path not in whole}
    return {**added, **slices.scatter(client.partition, rest, rows, need)}


def _optax(optimizer: optax.GradientTransformation) -> _Move:
    """Any optax optimizer. It sees the values of the client's slice. Its state does not change if a batch is
    empty."""

    def values(client: Client, now: Progress, groups: tuple[Group, ...]) -> dict[str, Any]:
        parts = get_parts(now, groups)
        if "keyed" in groups:
            received = received_slices(client, [p for p in parts["keyed"] if p not in value_leaves(client)])
            parts["keyed"] |= {path: rows + parts["keyed"][path] for path, rows in received.items()}
        return parts

    def step(client, now, gradients, more, state, need, active, groups):
        old = get_parts(now, groups)
        if "keyed" in groups:
            zeros = jax.tree_util.tree_map(jnp.zeros_like, old["keyed"])
            gradients = gradients | {"keyed": add_rows(client, zeros, gradients["keyed"], need)}
        changes, new_state = optimizer.update(_with(gradients, more), state, values(client, now, groups))
        new = tree.where(active, optax.apply_updates(old, changes), old)
        return put_parts(now, new), tree.where(active, tree.like(new_state, state), state)

    return _Move(lambda *given: optimizer.init(values(*given)), step)
