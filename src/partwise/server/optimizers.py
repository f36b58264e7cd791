"""The server's optimizers: the mean update as an antigradient into any optax optimizer (Reddi et al., 2021).

With SGD and Adagrad a row that nobody sent keeps its value and its state, so the step may be taken on the
rows of a cohort alone. Momentum, Adam and Yogi go on moving such a row and need to see the whole table every
round; their lazy namesakes are defined on the rows that the cohort asked for, and leave the others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import optax

from partwise.types import Limits, unknown


class ServerOptimizer(NamedTuple):
    """An optax transformation, and which rows of a keyed table it must see.

    all:   every row, because one with a zero gradient moves too
    exact: any rows that hold those which were sent; the others stay exactly as they are anyway
    asked: the rows that some client of the round asked for, and no other: that is what it is defined on
    """

    transform: optax.GradientTransformation
    rows: Literal["all", "exact", "asked"] = "all"


def sgd(rate: Any, momentum: float | None = None) -> ServerOptimizer:
    """g <- g + rate * mean update (FedRecon, Algorithm 1; patent claim 13)."""
    return ServerOptimizer(optax.sgd(rate, momentum), rows="exact" if momentum is None else "all")


def adagrad(rate: Any, initial_accumulator: float = 0.0, epsilon: float = 1e-3) -> ServerOptimizer:
    """FedAdagrad; as optax has it, epsilon is added to the sum of squares, under the root."""
    return ServerOptimizer(optax.adagrad(rate, initial_accumulator, epsilon), rows="exact")


def adam(rate: Any, b1: float = 0.9, b2: float = 0.99, epsilon: float = 1e-3) -> ServerOptimizer:
    """FedAdam with the constants of Reddi et al."""
    return ServerOptimizer(optax.adam(rate, b1, b2, epsilon))


def yogi(
    rate: Any, b1: float = 0.9, b2: float = 0.99, epsilon: float = 1e-3, initial_accumulator: float = 0.0
) -> ServerOptimizer:
    """FedYogi with the constants of Reddi et al. and of FedRecon's language task."""
    scale = optax.scale_by_yogi(b1, b2, epsilon, initial_accumulator_value=initial_accumulator)
    return ServerOptimizer(optax.chain(scale, optax.scale_by_learning_rate(rate)))


def lazy_adam(rate: Any, **settings: Any) -> ServerOptimizer:
    """Adam on the rows that some client of the round asked for; all other rows keep their values and moments.

    What is shared is stepped as in Adam. Bias is corrected for the number of rounds, for every row alike.
    """
    return adam(rate, **settings)._replace(rows="asked")


def lazy_yogi(rate: Any, **settings: Any) -> ServerOptimizer:
    """Yogi on the rows that some client of the round asked for, as `lazy_adam`."""
    return yogi(rate, **settings)._replace(rows="asked")


OPTIMIZERS: Mapping[str, Callable[..., ServerOptimizer]] = {
    "sgd": sgd,
    "adagrad": adagrad,
    "adam": adam,
    "yogi": yogi,
    "lazy_adam": lazy_adam,
    "lazy_yogi": lazy_yogi,
}


# What the optimizers' own settings may be; a decay of 1 would never forget, and move nothing.
_FIRST, _SMALL = {"initial_accumulator": Limits(0, 1e6)}, {"epsilon": Limits(1e-12, 1e6)}
_DECAYS = {"b1": Limits(0, 0.9999), "b2": Limits(0, 0.999999)}
SETTINGS: Mapping[str, Mapping[str, Limits]] = {
    "sgd": {"momentum": Limits(0, 0.9999)},
    "adagrad": _FIRST | _SMALL,
    "adam": _DECAYS | _SMALL,
    "lazy_adam": _DECAYS | _SMALL,
    "yogi": _DECAYS | _SMALL | _FIRST,
    "lazy_yogi": _DECAYS | _SMALL | _FIRST,
}


def make_optimizer(name: str, rate: Any, **settings: Any) -> ServerOptimizer:
    """An optimizer by name, with its settings."""
    if name not in OPTIMIZERS:
        raise unknown("server optimizer", name, OPTIMIZERS)
    for setting, value in settings.items():
        if setting not in SETTINGS[name]:
            raise unknown(f"setting of the server optimizer '{name}'", setting, SETTINGS[name])
        SETTINGS[name][setting].check(f"server.settings.{setting}", value)
    return OPTIMIZERS[name](rate, **settings)
