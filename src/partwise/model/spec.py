"""A model is a set of pure functions over a pytree of parameters. Nothing here knows of clients.

`predict` and `loss` see a *batch*: a dict of arrays whose first axis is the example. The loss is one value
per example, never a mean. The caller masks padding and divides once, so that a mean of batch means cannot
happen. Metrics are sums in the same way. They are finished (for example by a square root) after everything
has been added up.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from partwise import tree
from partwise.metrics import area_under_curve
from partwise.types import Params, UserError

Batch = dict[str, jax.Array]
FUSED_EXAMPLES = 32  # largest batch whose gradient `bag` writes as a sum over examples
SMALL_TABLE = (
    1024  # numbers in a table for each id of an example, up to which a pass over the table costs less
)
UNROLLED = 10  # ids that `bag` adds up in one step of its loop


class Metric(NamedTuple):
    """A value per example. The metric is the mean over all evaluated examples, changed by `finish`.

    Attributes:
        values: (outputs, batch) -> [B].
        finish: Turns the mean into the metric, for example by a square root.
        higher_is_better: Whether larger values are better.
        weight: batch -> [B], the weight of an example (for a recall: its number of tags); by default the
            model's weight. With a weight, a value is the sum over what the weight counts.
    """

    values: Callable[[jax.Array, Batch], jax.Array]  # (outputs, batch) -> [B]
    finish: Callable[[float], float] = lambda mean: mean
    higher_is_better: bool = False
    weight: Callable[[Batch], jax.Array] | None = None


NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


class Pooled(NamedTuple):
    """A metric of the scores and labels of all evaluated examples together. No mean of per-example values can
    give it.

    `finish` runs on the host. It may raise `metrics.UndefinedError` with the reason. The scores of one example are
    a number, or an array like `each`, such as the ids of the ten best items.
    """

    scores: Callable[[jax.Array, Batch], jax.Array]  # (outputs, batch) -> [B, *each.shape]
    labels: Callable[[Batch], jax.Array]  # batch -> [B]
    finish: Callable[[np.ndarray, np.ndarray], float]  # (scores, labels) -> value
    higher_is_better: bool = True
    each: jax.ShapeDtypeStruct = NUMBER


def auc(
    label: str, scores: Callable[[jax.Array, Batch], jax.Array] = lambda outputs, batch: outputs
) -> Pooled:
    """The area under the ROC curve of the scores. The labels are the column `label`; values above 0 are
    positive."""
    return Pooled(scores, lambda batch: batch[label], area_under_curve)


def one_per_example(batch: Batch) -> jax.Array:
    """The default weight: 1 for every example."""
    return jnp.ones(next(iter(batch.values())).shape[0], jnp.float32)


class Model(NamedTuple):
    """A model: pure functions over a tree of parameters. B is the number of examples of a batch.

    Attributes:
        init: rng -> parameters, a tree of arrays.
        predict: (parameters, batch, rng) -> outputs, whose first axis is the example.
        loss: (outputs, batch) -> [B], the loss of every example (a sum over its tokens, if it has several).
        metrics: {name: Metric or Pooled}; the first is the one shown while training.
        weight: batch -> [B], the weight of an example in a mean and in a client's weight (1, or its number of
            tokens).
        train_loss: (parameters, batch, rng) -> [B], what steps minimise if the loss of the predictions is too
            expensive for them (for example a sampled softmax). Evaluation always uses `predict` and `loss`.
        module: parameters -> a module of the framework that the model was written in, with these values. None for
            a model of plain functions.
        rebuild_loss: As `train_loss`, what a reconstruction of the local part minimises, if this is another loss.
            What is in it besides the local part is learned only by an update through the reconstruction
            (`client.through`).
    """

    init: Callable[[jax.Array], Params]
    predict: Callable[[Params, Batch, jax.Array], jax.Array]
    loss: Callable[[jax.Array, Batch], jax.Array]
    metrics: Mapping[str, Metric | Pooled] = {}
    weight: Callable[[Batch], jax.Array] = one_per_example
    train_loss: Callable[[Params, Batch, jax.Array], jax.Array] | None = None
    module: Callable[[Params], Any] | None = None
    rebuild_loss: Callable[[Params, Batch, jax.Array], jax.Array] | None = None


CALLED_WITH = {"predict": ("params", "batch", "rng"), "loss": ("outputs", "batch")}
MOST_SHOWN = 12  # arrays that one message names
RESERVED = (
    "loss",
    "clients",
    "clients_without_examples",
    "over_clients",
    "undefined",
    "judged",
    "not_finite",
)


def check_arguments(model: Model) -> None:
    """Raise `UserError` if one of the model's functions cannot be called with its arguments."""
    for name, arguments in CALLED_WITH.items():
        try:
            inspect.signature(getattr(model, name)).bind(*arguments)
        except TypeError as error:
            called = f"{name}({', '.join(arguments)})"
            raise UserError(
                f"the model's {name} cannot be called as {called} ({error}): give it these arguments"
            ) from None
        except ValueError:
            continue  # a function that does not tell its arguments


def naming(model: Model) -> Model:
    """The model, with functions that say, if they fail, which of them it was and what it was given."""
    metrics = {
        name: each._replace(
            **{
                part: named(f"{part} of the metric '{name}'", getattr(each, part))
                for part in ("values", "scores", "labels", "weight")
                if getattr(each, part, None)
            }
        )
        for name, each in model.metrics.items()
    }
    functions = ("init", "predict", "loss", "weight", "train_loss", "rebuild_loss")
    found = {name: named(name, getattr(model, name)) for name in functions if getattr(model, name)}
    return model._replace(metrics=metrics, **found)


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a model, which says its name and what it was given if it fails."""

    def called(*given: Any) -> Any:
        try:
            return function(*given)
        except UserError:
            raise
        except Exception as error:
            raise _failed(name, given, error) from error

    return called


def _failed(name: str, given: tuple[Any, ...], error: Exception) -> UserError:
    arguments = CALLED_WITH.get(name, ("params", "batch", "rng") if name.endswith("_loss") else ())
    names = (
        ("rng",) if name == "init" else arguments or (("batch",) if len(given) == 1 else ("outputs", "batch"))
    )
    told = [f"{what} {_shapes(each)}" for what, each in zip(names, given, strict=False) if what != "rng"]
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if f"{os.sep}site-packages{os.sep}" not in each.filename][1:]
    where = f" in {os.path.basename(own[-1].filename)}, line {own[-1].lineno}" if own else ""
    lines = str(error).strip().splitlines()
    why = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    given_to = f". It was given {'; '.join(told)}" if told else ""
    return UserError(f"the model's {name} failed{where} ({why.rstrip('.')}){given_to}")


def _shapes(values: Any) -> str:
    """Types and shapes of arrays, for a message: `item float32[5, 3]`."""
    one = lambda leaf: f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else repr(leaf)
    told = [f"{path} {one(leaf)}".strip() for path, leaf in tree.flatten(values).items()]
    return ", ".join(told[:MOST_SHOWN]) + (", ..." if len(told) > MOST_SHOWN else "")


def check_metrics(model: Model) -> None:
    """Raise `UserError` if a metric has the wrong type, or a name that an evaluation uses for something else."""
    for name, metric in model.metrics.items():
        if not isinstance(metric, Metric | Pooled):
            raise UserError(
                f"the metric '{name}' is a {type(metric).__name__}, not a Metric or Pooled: write "
                f"Metric(function), a function of outputs and batch with a value for every example"
            )
        if name in RESERVED:
            raise UserError(
                f"a metric cannot be named '{name}', under which every evaluation tells something of its own "
                f"(so do {', '.join(RESERVED)}): choose another name"
            )


def training_losses(
    model: Model,
    params: Params,
    batch: Batch,
    rng: jax.Array,
    scored: Callable[[Any], Any] = lambda outputs: outputs,
) -> jax.Array:
    """The losses [B] that a step minimises. `scored` is applied to the outputs before the loss."""
    if model.train_loss is not None:
        losses = model.train_loss(params, batch, rng)
    else:
        losses = model.loss(scored(model.predict(params, batch, rng)), batch)
    return one_for_each(losses, batch)


def one_for_each(losses: jax.Array, batch: Batch) -> jax.Array:
    """Return the losses. Raises `UserError` if there is not one floating-point number per example."""
    size = next(iter(batch.values())).shape[0]
    if jnp.shape(losses) != (size,):
        raise UserError(
            f"the loss of a batch of {size} examples has shape {jnp.shape(losses)}; expected ({size},), one value "
            f"for every example (a sum over its tokens, if it has several) and no mean over the batch: mend the "
            f"model's loss"
        )
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        raise UserError(
            f"the loss has the type {losses.dtype}, along which there is no gradient; expected floating-point "
            f"numbers: mend the model's loss"
        )
    return losses


def squared_error(outputs: jax.Array, batch: Batch, target: str) -> jax.Array:
    """Per-example squared error against the column `target`."""
    return jnp.square(outputs - batch[target])


def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a table by id; zeros where the id is -1 (no id, or an id outside the client's slice)."""
    rows = table[jnp.maximum(ids, 0)]
    return jnp.where((ids >= 0).reshape(*ids.shape, *[1] * (rows.ndim - ids.ndim)), rows, 0)


def indicators(ids: jax.Array, size: int) -> jax.Array:
    """[B, L] ids as [B, size]: how often each id occurs. The id -1 is ignored."""
    rows = jnp.arange(ids.shape[0])[:, None]
    return jnp.zeros((ids.shape[0], size)).at[rows, jnp.where(ids >= 0, ids, size)].add(1.0, mode="drop")


@jax.custom_vjp
def bag(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The sum of the rows of every example's ids: [n, d] and [B, L] -> [B, d]. The id -1 is ignored.

    It equals `lookup(table, ids).sum(1)`, but does not hold the rows of all ids at once. Its gradient is one
    matrix product.
    """
    if ids.shape[1] == 1:
        return lookup(table, ids[:, 0])
    padded = jnp.pad(ids, [(0, 0), (0, -ids.shape[1] % UNROLLED)], constant_values=-1)

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        for i in range(UNROLLED):
            total = total + lookup(table, padded[:, step * UNROLLED + i])
        return total

    return jax.lax.fori_loop(
        0, -(-_longest(ids) // UNROLLED), add, jnp.zeros((ids.shape[0], *table.shape[1:]), table.dtype)
    )


def _longest(ids: jax.Array) -> jax.Array:
    """The length of the longest bag; most are short."""
    return jnp.max(jnp.where(ids >= 0, jnp.arange(1, ids.shape[1] + 1), 0), initial=0)


def _bag_forward(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, Any]:
    return bag(table, ids), (ids, table)


def _bag_backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, None]:
    ids, table = kept
    occurs = indicators(ids, table.shape[0]).astype(table.dtype)
    product = lambda occurs, gradient: (gradient.T @ occurs).T
    return jax.lax.platform_dependent(occurs, gradient, cpu=_sum_of_products, default=product), None


def _sum_of_products(occurs: jax.Array, gradient: jax.Array) -> jax.Array:
    """`occurs.T @ gradient`, example by example. XLA fuses sums into the step that adds them to the table,
    which saves a pass over memory. It does not fuse a matrix product."""
    if len(occurs) > FUSED_EXAMPLES:
        return (gradient.T @ occurs).T
    total = jnp.zeros((), gradient.dtype)
    for here, along in zip(occurs, gradient, strict=True):
        total = total + here[:, None] * along
    return total


bag.defvjp(_bag_forward, _bag_backward)


def add_to_bags(table: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """The table [n, ...] with the row of every example [B, ...] added to the rows of the example's ids [B, L]. The
    id -1 is ignored. `bag` is its transpose."""
    added = lambda table, ids, rows: table + _bag_backward((ids, table), rows)[0]
    flat, flat_rows = table.reshape(len(table), -1), rows.reshape(len(rows), -1)
    if table.size <= SMALL_TABLE * ids.shape[1]:
        return added(flat, ids, flat_rows).reshape(table.shape)
    total = jax.lax.platform_dependent(flat, ids, flat_rows, cpu=_add_in_turn, default=added)
    return total.reshape(table.shape)


@jax.custom_batching.custom_vmap
def _add_in_turn(table: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """`add_to_bags` on the rows that are named alone: the first id of all examples, then the second, ..."""
    at = jnp.where(ids >= 0, ids, len(table))
    add = lambda i, table: table.at[at[:, i]].add(rows, mode="drop")
    return jax.lax.fori_loop(0, _longest(ids), add, table)


@_add_in_turn.def_vmap
def _add_in_lanes(size: int, batched: Any, table: Any, ids: Any, rows: Any) -> tuple[jax.Array, bool]:
    """Lanes are one table below the other, so that the loop ends with the longest bag of all."""
    given = [
        each if has_lanes else jnp.broadcast_to(each, (size, *each.shape))
        for each, has_lanes in zip((table, ids, rows), batched, strict=True)
    ]
    table, ids, rows = given
    shift = jnp.arange(size).reshape(-1, 1, 1) * table.shape[1]
    flat = lambda each: each.reshape(-1, *each.shape[2:])
    added = _add_in_turn(flat(table), flat(jnp.where(ids >= 0, ids + shift, -1)), flat(rows))
    return added.reshape(table.shape), True
