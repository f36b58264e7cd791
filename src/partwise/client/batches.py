"""A client's examples, and the only loop over batches in the library.

Clients run side by side in lanes. What differs between lanes (where a client's rows begin, how many it has)
is data. The number of loop steps must be the same for all lanes. It comes from `longest`, the size of the
largest client among them. A lane that is done earlier continues with empty batches, which change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partwise.client.split import Subset
from partwise.model.spec import Batch
from partwise.selection.slices import Keys
from partwise.types import UserError


class Examples(NamedTuple):
    """One client's examples: rows `start : start + count` of every column.

    Columns that hold keys are not in `columns` but in `positions`. A position is the number of a key among
    the client's own keys; `keys` maps it to a row of a table.
    """

    columns: Mapping[str, jax.Array]
    positions: Mapping[str, jax.Array]
    keys: Mapping[str, Keys]
    start: jax.Array
    count: jax.Array
    longest: jax.Array  # the largest `count` among the clients that run side by side
    most: int | None = None  # the largest `count` of any client at all; None: the number of rows

    @property
    def capacity(self) -> int:
        """The largest number of examples that any client can have."""
        arrays = {**self.columns, **self.positions}
        return next(iter(arrays.values())).shape[0] if self.most is None else self.most


class Batches(NamedTuple):
    """How long to iterate over batches: this many epochs, and at most this many steps. Either may be None. With
    `anywhere`, a client begins with one of its batches at random, so that few steps of every round see all of them
    in the long run."""

    batch_size: int
    epochs: int | None = 1
    max_steps: int | None = None
    anywhere: bool = False

    def check(self, name: str) -> Batches:
        """Return itself. Raises `UserError` if the numbers are invalid; `name` is used in the message."""
        if self.batch_size < 1:
            raise UserError(f"{name}: the batch size must be at least 1, not {self.batch_size}")
        if self.epochs is None and self.max_steps is None:
            raise UserError(f"{name}: give epochs, max_steps or both; without either it would never end")
        for field, value in (("epochs", self.epochs), ("max_steps", self.max_steps)):
            if value is not None and value < 0:
                raise UserError(f"{name}: {field} must not be negative, not {value}")
        return self

    def num_steps(self, count: jax.Array) -> jax.Array:
        """Number of steps for a client with `count` examples; 0 if it has no examples."""
        limits = []
        if self.epochs is not None:
            limits.append(self.epochs * self.steps_per_epoch(count))
        if self.max_steps is not None:
            limits.append(jnp.where(count > 0, self.max_steps, 0))
        return limits[0] if len(limits) == 1 else jnp.minimum(*limits)

    def steps_per_epoch(self, count: jax.Array) -> jax.Array:
        """Number of batches that hold `count` examples. The last batch may be only partly full."""
        return -(-count // self.batch_size)


class Drawn(NamedTuple):
    """One batch: its columns, the positions of its key columns, and which of its examples are real."""

    batch: Batch
    positions: Mapping[str, jax.Array]
    mask: jax.Array  # [B] bool


def draw(
    examples: Examples, subset: Subset, schedule: Batches, step: jax.Array, begin: jax.Array | int = 0
) -> Drawn:
    """Batch number `step` of the subset, counted from batch `begin` on. The batches repeat in every epoch."""
    count = subset.count(examples.count)
    epoch_steps = jnp.maximum(schedule.steps_per_epoch(count), 1)
    j = ((begin + step) % epoch_steps) * schedule.batch_size + jnp.arange(schedule.batch_size)
    mask = (j < count) & (step < schedule.num_steps(count))
    index = jnp.where(mask, subset.index(j, examples.count), 0)
    rows = examples.start + index
    batch = {name: column[rows] for name, column in examples.columns.items()}
    positions = {name: column[rows] for name, column in examples.positions.items()}
    return Drawn(batch, positions, mask)


def over_batches(
    body: Callable[[jax.Array, Drawn, Any], Any],
    carry: Any,
    examples: Examples,
    subset: Subset,
    schedule: Batches,
    begin: jax.Array | int = 0,
) -> Any:
    """Run `carry = body(step, batch, carry)` for every step of the schedule. This is the library's only
    training loop.

    It runs as many steps as the largest client needs. A body must not change its carry if the mask is empty.
    """
    num_steps = schedule.num_steps(subset.count(examples.longest))
    return jax.lax.fori_loop(
        0, num_steps, lambda i, c: body(i, draw(examples, subset, schedule, i, begin), c), carry
    )
