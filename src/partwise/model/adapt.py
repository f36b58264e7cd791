"""What the adapters of other frameworks share: `nnx`, `keras` and `torch` make a `Model` of a module.

A module has two ways to be called. In use it is a function of its arrays. In training it may also draw random
numbers (dropout), add penalties to its loss, and move statistics of batches. The first is the model's `predict`,
the second its `train_loss`, which is left out where there is no difference.

Statistics are parameters like any other here, with a path and a role. What they learn is to be near to those of
the batch: their loss is half the squared distance, so a step of SGD with rate r is a running mean that forgets
with momentum 1 - r, and shared statistics are averaged over the cohort as shared weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from partwise.model.spec import Batch
from partwise.types import UserError, unknown

# What a module is called with: the batch itself, a column of it, several, or what a function makes of it.
Inputs = str | Sequence[str] | Callable[[Batch], Any] | None
# Where a module that normalises by batches takes its statistics from in training: from the batch (and moves its
# own to them), or from its own, which stay as they are.
Statistics = Literal["batch", "fixed"]


def check_statistics(statistics: str) -> bool:
    """Whether they are fixed."""
    if statistics not in ("batch", "fixed"):
        raise unknown("statistics of a module", statistics, ("batch", "fixed"))
    return statistics == "fixed"


def arguments(inputs: Inputs, batch: Batch) -> tuple[Any, ...]:
    """What the module is called with."""
    if inputs is None:
        return (dict(batch),)  # frameworks know plain dicts
    if callable(inputs):
        made = inputs(batch)
        return made if isinstance(made, tuple) else (made,)
    names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    for name in names:
        if name not in batch:
            raise unknown("column (inputs= names those that the module is called with)", name, batch)
    return tuple(batch[name] for name in names)


def begin_at(values: Any) -> Any:
    """Values that a module came with, copied: whoever trains them may give their memory away."""
    return jax.tree_util.tree_map(jnp.array, values)


def full_precision(outputs: Any) -> Any:
    """Outputs of a module that computes with 16 bits, as 32: losses and their sums need them."""
    return jax.tree_util.tree_map(
        lambda x: x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x, outputs
    )


def following(before: Mapping[str, jax.Array], after: Mapping[str, jax.Array]) -> jax.Array:
    """0, with a gradient that leads statistics from what they were to what the batch says.

    It is added to the loss, of which it changes nothing but the gradient.
    """
    distance = jnp.zeros(())
    for path, now in after.items():
        distance = distance + 0.5 * jnp.sum(jnp.square(before[path] - jax.lax.stop_gradient(now)))
    return distance - jax.lax.stop_gradient(distance)


def check_values(values: Mapping[str, Any], what: str) -> None:
    """Only floating-point leaves have gradients."""
    if not values:
        raise UserError(
            f"this {what} has no parameters: build it first (call it on an input, or give it one)"
        )
    for path, value in values.items():
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise UserError(
                f"'{path}' of this {what} holds {value.dtype}, and parameters are floating-point numbers: "
                f"keep it out of the {what}'s variables (a plain attribute is a constant)"
            )
