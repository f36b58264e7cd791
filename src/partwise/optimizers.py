"""Optimizers: what makes a step of a gradient, on a client or on the server. They are optax's own.

On the server, the negative mean update is the gradient (Reddi et al., 2021). With SGD and Adagrad, a row that
no client sent keeps its value and its state. So the step may be taken on the rows of a cohort alone. Momentum,
Adam and Yogi keep moving such a row, so they need the whole table in every round. Their lazy variants are defined
on the rows that the cohort asked for, and do not change the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import optax

from partwise.parts import Part, number, part, rate
from partwise.schedules import Schedule, schedule
from partwise.types import UserError

Rows = Literal["all", "exact", "asked"]


class ServerOptimizer(NamedTuple):
    """An optax transformation, and which rows of a keyed table it needs.

    all:   every row, because a row with a zero gradient moves too
    exact: any set of rows that includes the rows that were sent; the other rows do not change in any case
    asked: exactly the rows that some client of the round asked for, because the optimizer is defined on these
    """

    transform: optax.GradientTransformation
    rows: Rows = "all"


Stepping = Any  # of a client: a rate for SGD, or an optax transformation


class Optimizer(Part):
    """What makes a step of a gradient.

    One of your own has the fields `learning_rate` and `schedule`, and a method `transform`.
    """

    learning_rate: Any
    schedule: Schedule | None

    @property
    def rows(self) -> Rows:
        """Which rows of a keyed table it needs on the server (see `ServerOptimizer`)."""
        return "all"

    def transform(self, learning_rate: Any) -> optax.GradientTransformation:
        """The optax transformation with this learning rate, which may be a function of the number of steps."""
        raise NotImplementedError

    def on_server(self) -> ServerOptimizer:
        """It as the server's optimizer. A schedule counts rounds, which are the server's steps."""
        learning_rate = self.learning_rate
        if self.schedule is not None:
            factor = self.schedule.factor()
            learning_rate = lambda count: self.learning_rate * factor(count)
        return ServerOptimizer(self.transform(learning_rate), self.rows)

    def on_client(self) -> Stepping | Callable[[Any], Stepping]:
        """It as a client's optimizer; with a schedule, a function of the round. Without a round, as in an
        evaluation, the rate is as it is."""
        if self.rows == "asked":
            raise UserError(
                f"'{self._name}' is an optimizer of the server, which knows the rows that its clients asked for; "
                f"on a client use {self._name.removeprefix('lazy_')}"
            )
        if self.schedule is None:
            return self._stepping(self.learning_rate)
        factor, usual = self.schedule.factor(), self.learning_rate
        return lambda number: self._stepping(usual if number is None else usual * factor(number))

    def _stepping(self, learning_rate: Any) -> Stepping:
        return self.transform(learning_rate)


@part("sgd")
class Sgd(Optimizer):
    """Plain steps: g <- g + rate * mean update (FedRecon, Algorithm 1; patent claim 13)."""

    learning_rate: float = rate(0.1, "the size of a step")
    momentum: float | None = number(None, "share of the last step that is kept", 0, 0.9999)
    schedule: Schedule | None = schedule()

    @property
    def rows(self) -> Rows:
        return "exact" if self.momentum is None else "all"

    def transform(self, learning_rate: Any) -> optax.GradientTransformation:
        return optax.sgd(learning_rate, self.momentum)

    def _stepping(self, learning_rate: Any) -> Stepping:
        return learning_rate if self.momentum is None else self.transform(learning_rate)


@part("adagrad")
class Adagrad(Optimizer):
    """FedAdagrad on the server. As in optax, epsilon is added to the sum of squares, under the root."""

    learning_rate: float = rate(0.1, "the size of a step")
    initial_accumulator: float = number(0.0, "the sum of squares at first", 0, 1e6)
    epsilon: float = number(1e-3, "added to the sum of squares", 1e-12, 1e6)
    schedule: Schedule | None = schedule()

    @property
    def rows(self) -> Rows:
        return "exact"

    def transform(self, learning_rate: Any) -> optax.GradientTransformation:
        return optax.adagrad(learning_rate, self.initial_accumulator, self.epsilon)


@part("adam")
class Adam(Optimizer):
    """FedAdam on the server, with the constants of Reddi et al. With a decay, AdamW: every step also takes away
    rate * decay of each parameter."""

    learning_rate: float = rate(0.01, "the size of a step")
    b1: float = number(0.9, "decay of the mean", 0, 0.9999)
    b2: float = number(0.99, "decay of the mean of squares", 0, 0.999999)
    epsilon: float = number(1e-3, "added to the root of the mean of squares", 1e-12, 1e6)
    decay: float = number(0.0, "share of each parameter that a step of size 1 takes away", 0, 1e6)
    schedule: Schedule | None = schedule()

    def transform(self, learning_rate: Any) -> optax.GradientTransformation:
        constants = (self.b1, self.b2, self.epsilon)
        if self.decay:
            return optax.adamw(learning_rate, *constants, weight_decay=self.decay)
        return optax.adam(learning_rate, *constants)


@part("lazy_adam")
class LazyAdam(Adam):
    """Adam on the rows that some client of the round asked for. All other rows keep their values and moments.

    Shared leaves are updated as in Adam. The bias correction uses the number of rounds, the same for every row.
    """

    @property
    def rows(self) -> Rows:
        return "asked"


@part("yogi")
class Yogi(Optimizer):
    """FedYogi on the server, with the constants of Reddi et al. and of FedRecon's language task."""

    learning_rate: float = rate(0.01, "the size of a step")
    b1: float = number(0.9, "decay of the mean", 0, 0.9999)
    b2: float = number(0.99, "decay of the mean of squares", 0, 0.999999)
    epsilon: float = number(1e-3, "added to the root of the mean of squares", 1e-12, 1e6)
    initial_accumulator: float = number(0.0, "the mean of squares at first", 0, 1e6)
    schedule: Schedule | None = schedule()

    def transform(self, learning_rate: Any) -> optax.GradientTransformation:
        first = self.initial_accumulator
        scale = optax.scale_by_yogi(self.b1, self.b2, self.epsilon, initial_accumulator_value=first)
        return optax.chain(scale, optax.scale_by_learning_rate(learning_rate))


@part("lazy_yogi")
class LazyYogi(Yogi):
    """Yogi on the rows that some client of the round asked for, as `lazy_adam`."""

    @property
    def rows(self) -> Rows:
        return "asked"
