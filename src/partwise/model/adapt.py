"""What the adapters of other frameworks share. `nnx`, `keras` and `torch` make a `Model` from a module.

A module can be called in two ways. In use, it is a function of its arrays. In training, it may also draw
random numbers (dropout), add penalties to its loss, and update statistics of batches. The first way is the
model's `predict`, the second its `train_loss`. `train_loss` is left out if there is no difference.

Statistics are parameters like all others here, with a path and a role. Their loss is half the squared
distance to the statistics of the batch. So a step of SGD with rate r is a running mean with momentum 1 - r.
Shared statistics are averaged over the cohort like shared weights. They are those of the batch's examples: the rows
with which a batch is filled up are left out, by the batch's mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import jax
import jax.numpy as jnp

from partwise.model.columns import MASK, Columns
from partwise.model.spec import Batch, Metric, Pooled, one_for_each
from partwise.types import UserError, unknown

# What a module is called with: the batch itself, one column, several columns, or the result of a function of the
# batch.
Inputs = str | Sequence[str] | Callable[[Batch], Any] | None
# Which statistics a module with batch normalisation uses in training: those of the batch (and its own statistics
# move towards them), or its own, which do not change.
Statistics = Literal["batch", "fixed"]


_MASK: ContextVar[Any] = ContextVar("mask", default=None)


@contextmanager
def calling(batch: Batch) -> Iterator[None]:
    """While a module is called with this batch, `real_rows` has its mask."""
    before = _MASK.set(batch.mask if isinstance(batch, Columns) else None)
    try:
        yield
    finally:
        _MASK.reset(before)


def real_rows(x: Any) -> jax.Array | None:
    """Which rows of a layer's input are of examples and not of padding, [len(x), 1, ...]; None if it is not known.
    All are if none is, so that no mean is over nothing. An example may have several rows, one after the other."""
    mask = _MASK.get()
    if mask is None or x.shape[0] % mask.shape[0]:
        return None
    mask = jnp.repeat(mask | ~mask.any(), x.shape[0] // mask.shape[0])
    return mask.reshape(-1, *[1] * (len(x.shape) - 1))


def check_functions(
    loss: Any, metrics: Any, weight: Any, inputs: Any = None, train_loss: Any = None
) -> dict[str, Metric | Pooled]:
    """Check the functions that were given with the module. Returns the metrics as a dict; raises `UserError`
    if something is wrong."""
    takes("loss", loss, "outputs", "batch")
    takes("weight", weight, "batch")
    if train_loss is not None:
        takes("train_loss", train_loss, "module", "batch", "rng")
    if callable(inputs):
        takes("inputs", inputs, "batch")
    elif not (inputs is None or isinstance(inputs, str | Sequence)):
        raise UserError(
            f"inputs is {shown(inputs)}: give a column's name, several, or a function of the batch"
        )
    wrong = "metrics are a dict of names to Metric (or Pooled), as in {'error': Metric(values)}"
    if not isinstance(metrics or {}, Mapping):
        raise UserError(f"{wrong}, not {shown(metrics)}")
    for name, metric in (metrics or {}).items():
        if not isinstance(metric, Metric | Pooled):
            raise UserError(f"{wrong}; '{name}' is {shown(metric)}")
    return dict(metrics or {})


def shown(thing: Any) -> str:
    """A value as one short line, for messages."""
    text = " ".join(repr(thing).split())
    return text if len(text) <= 120 else f"{text[:120]}..."


def takes(what: str, function: Any, *names: str) -> None:
    """Raise `UserError` unless the function can be called with these arguments."""
    call = f"{what}({', '.join(names)})"
    if not callable(function):
        raise UserError(f"{what} is {shown(function)}: give a function, {call}")
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        raise UserError(
            f"it is called as {call}, but the {what} that was given does not fit: {error}"
        ) from None
    except ValueError:  # a function without a signature
        return


def losses_of(loss: Callable[[Any, Batch], jax.Array], outputs: Any, batch: Batch) -> jax.Array:
    """The losses [B]. Raises `UserError` if there is not one per example: a mean would be broadcast silently
    in the sum."""
    return one_for_each(loss(outputs, batch), batch)


def check_statistics(statistics: str) -> bool:
    """Whether the statistics are fixed. Raises `UserError` for an unknown value."""
    if statistics not in ("batch", "fixed"):
        raise unknown("statistics of a module", statistics, ("batch", "fixed"))
    return statistics == "fixed"


def arguments(inputs: Inputs, batch: Batch) -> tuple[Any, ...]:
    """The arguments with which the module is called."""
    if inputs is None:
        return (dict(batch),)  # frameworks know plain dicts
    if callable(inputs):
        made = inputs(batch)
        made = dict(made) if isinstance(made, Columns) else made
        return made if isinstance(made, tuple) else (made,)
    names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    for name in names:
        if name not in batch and not (name == MASK and isinstance(batch, Columns)):
            raise unknown("column (inputs= names those that the module is called with)", name, batch)
    return tuple(batch[name] for name in names)


def begin_at(values: Any) -> Any:
    """A copy of the values that a module came with. A copy is needed because training may donate their
    memory."""
    return jax.tree_util.tree_map(jnp.array, values)


def full_precision(outputs: Any) -> Any:
    """Outputs of a module that computes in 16 bits, as 32 bits, because losses and their sums need these."""
    return jax.tree_util.tree_map(
        lambda x: x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x, outputs
    )


def following(before: Mapping[str, jax.Array], after: Mapping[str, jax.Array]) -> jax.Array:
    """Return 0, with a gradient that moves statistics from their old values towards those of the batch.

    It is added to the loss, and changes only the gradient.
    """
    distance = jnp.zeros(())
    for path, now in after.items():
        distance = distance + 0.5 * jnp.sum(jnp.square(before[path] - jax.lax.stop_gradient(now)))
    return distance - jax.lax.stop_gradient(distance)


def check_values(values: Mapping[str, Any], what: str) -> None:
    """Raise `UserError` if there are no values, or if one is not floating-point, because only such leaves
    have gradients."""
    if not values:
        raise UserError(
            f"this {what} has no parameters, so there is nothing to learn: give one that has, and that is built "
            f"already (called on an input, where its layers wait for one)"
        )
    for path, value in values.items():
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise UserError(
                f"'{path}' of this {what} holds {value.dtype}, and parameters are floating-point numbers: "
                f"keep it out of the {what}'s variables (a plain attribute is a constant)"
            )
