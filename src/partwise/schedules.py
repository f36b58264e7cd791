"""Schedules: the factor by which a learning rate is multiplied, by round (0, 1, 2, ...). They are optax's own.

A part that needs the number of the run's rounds has a field `rounds`. It is written when a run is resolved, so that
a recorded run, or a device far away, has the same rates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from partwise.parts import Part, choice, number, numbers, part, whole
from partwise.types import UserError

MOST_ROUNDS = 10**8
MOST_VALUES = 100_000  # rounds of a run whose schedule is a function


class Schedule(Part, static=True):
    """A factor of a learning rate, by round."""

    def factor(self) -> optax.Schedule:
        """A function of the round that gives the factor."""
        raise NotImplementedError


class Spanning(Schedule):
    """A schedule of which the last round is the run's, unless its own number of rounds is given."""

    rounds: int | None

    @property
    def span(self) -> int:
        """Its number of rounds."""
        if self.rounds is None:
            raise UserError(f"{self._name} needs its number of rounds, as in rounds=500; a run gives its own")
        return max(self.rounds, 1)


def rounds() -> Any:
    """Declares the field `rounds` of a spanning schedule."""
    return whole(None, "rounds until its end; none: those of the run", 0, MOST_ROUNDS)


@part("cosine")
class Cosine(Spanning):
    """Falls along a half wave of the cosine."""

    end: float = number(0.0, "the factor at the end", 0, 1e6)
    rounds: int | None = rounds()

    def factor(self) -> optax.Schedule:
        return optax.cosine_decay_schedule(1.0, self.span, self.end)


@part("linear")
class Linear(Spanning):
    """Falls, or rises, along a line."""

    end: float = number(0.0, "the factor at the end", 0, 1e6)
    rounds: int | None = rounds()

    def factor(self) -> optax.Schedule:
        return optax.linear_schedule(1.0, self.end, self.span)


@part("polynomial")
class Polynomial(Spanning):
    """Falls as a power of the share of rounds that are left."""

    power: float = number(2.0, "the power", 0.01, 100)
    end: float = number(0.0, "the factor at the end", 0, 1e6)
    rounds: int | None = rounds()

    def factor(self) -> optax.Schedule:
        return optax.polynomial_schedule(1.0, self.end, self.power, self.span)


@part("exponential")
class Exponential(Schedule):
    """Is multiplied by the same number in every round."""

    base: float = number(0.99, "the factor from one round to the next", 0, 10)

    def factor(self) -> optax.Schedule:
        return optax.exponential_decay(1.0, 1, self.base)


@part("warmup")
class Warmup(Schedule):
    """Rises evenly to 1 and stays there. It is never 0."""

    warmup: int = whole(20, "rounds until it is 1", 1, MOST_ROUNDS)

    def factor(self) -> optax.Schedule:
        return optax.warmup_constant_schedule(1 / (self.warmup + 1), 1.0, self.warmup)


@part("warmup_cosine")
class WarmupCosine(Spanning):
    """Rises evenly to 1, and falls along a half wave of the cosine until the end."""

    warmup: int = whole(20, "rounds until it is 1", 1, MOST_ROUNDS)
    end: float = number(0.0, "the factor at the end", 0, 1e6)
    rounds: int | None = rounds()

    def validate(self) -> None:
        if self.rounds is not None and self.warmup >= self.rounds:
            raise UserError(
                f"a warmup of {self.warmup} rounds leaves nothing of the run's {self.rounds} for the cosine: give "
                f"fewer, or use warmup"
            )

    def factor(self) -> optax.Schedule:
        first = 1 / (self.warmup + 1)
        return optax.warmup_cosine_decay_schedule(first, 1.0, self.warmup, self.span, self.end)


@part("piecewise")
class Piecewise(Schedule):
    """Is multiplied by a number at some rounds: `at = [100, 200]` and `by = [0.1, 0.1]` is a tenth of the rate from
    round 100 on, and a hundredth from round 200 on."""

    at: tuple[float, ...] = numbers((), "the rounds", 1, MOST_ROUNDS)
    by: tuple[float, ...] = numbers((), "the numbers, one for each", 0, 10)

    def validate(self) -> None:
        if len(self.at) != len(self.by) or any(each % 1 for each in self.at):
            raise UserError(
                f"piecewise needs a number for every round, as in at=100,200 and by=0.1,0.1, not "
                f"at={list(self.at)} and by={list(self.by)}"
            )

    def factor(self) -> optax.Schedule:
        return optax.piecewise_constant_schedule(1.0, dict(zip(map(int, self.at), self.by, strict=True)))


@part("values")
class Values(Schedule):
    """Has a value for every round. After the last, it stays."""

    factors: tuple[float, ...] = numbers((1.0,), "the factors", 0, 1e30)

    def validate(self) -> None:
        if not self.factors:
            raise UserError("values needs at least one factor, as in factors=1,0.5")

    def factor(self) -> optax.Schedule:
        values = np.array(self.factors, np.float32)
        return lambda count: jnp.asarray(values)[jnp.minimum(count, len(values) - 1)]

    @classmethod
    def of(cls, function: Callable[[int], Any], num_rounds: int) -> Values:
        """The values of a function of the round, such as optax's schedules are."""
        if num_rounds > MOST_VALUES:
            raise UserError(
                f"a schedule that is a function is recorded by its values in all {num_rounds:,} rounds; with more "
                f"than {MOST_VALUES:,}, give a schedule by name"
            )
        try:
            found = [np.float32(function(each)) for each in range(num_rounds)]
        except Exception as error:
            raise UserError(
                f"a schedule must be a function of the round that gives a number, as optax's schedules are; called "
                f"with a round it raises {type(error).__name__}: {error}"
            ) from None
        wrong = [each for each, value in enumerate(found) if not (np.isfinite(value) and value >= 0)]
        if wrong:
            raise UserError(
                f"a schedule gives {found[wrong[0]]} in round {wrong[0]}; expected a factor of at least 0 in every "
                f"round"
            )
        return cls(tuple(float(str(value)) for value in found))


def schedule() -> Any:
    """Declares the field `schedule` of what has a learning rate."""
    return choice(None, "the factor of the learning rate by round; none: it stays")
