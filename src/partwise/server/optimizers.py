"""The server's optimizers: any optax optimizer, with the negative mean update as its gradient (Reddi et al.,
2021).

With SGD and Adagrad, a row that no client sent keeps its value and its state. So the step may be taken on the
rows of a cohort alone. Momentum, Adam and Yogi keep moving such a row, so they need the whole table in every
round. Their lazy variants are defined on the rows that the cohort asked for, and do not change the other
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import optax

from partwise.types import Limits, unknown


class ServerOptimizer(NamedTuple):
    """An optax transformation, and which rows of a keyed table it needs.

    all:   every row, because a row with a zero gradient moves too
    exact: any set of rows that includes the rows that were sent; the other rows do not change in any case
    asked: exactly the rows that some client of the round asked for, because the optimizer is defined on these
    """

    transform: optax.GradientTransformation
    rows: Literal["all", "exact", "asked"] = "all"


def sgd(rate: Any, momentum: float | None = None) -> ServerOptimizer:
    """g <- g + rate * mean update (FedRecon, Algorithm 1; patent claim 13)."""
    return ServerOptimizer(optax.sgd(rate, momentum), rows="exact" if momentum is None else "all")


def adagrad(rate: Any, initial_accumulator: float = 0.0, epsilon: float = 1e-3) -> ServerOptimizer:
    """FedAdagrad. As in optax, epsilon is added to the sum of squares, under the root."""
    return ServerOptimizer(optax.adagrad(rate, initial_accumulator, epsilon), rows="exact")


def adam(
    rate: Any, b1: float = 0.9, b2: float = 0.99, epsilon: float = 1e-3, decay: float = 0.0
) -> ServerOptimizer:
    """FedAdam with the constants of Reddi et al. With a decay, AdamW: every step also takes away rate * decay of
    each parameter."""
    return ServerOptimizer(
        optax.adamw(rate, b1, b2, epsilon, weight_decay=decay) if decay else optax.adam(rate, b1, b2, epsilon)
    )


def yogi(
    rate: Any, b1: float = 0.9, b2: float = 0.99, epsilon: float = 1e-3, initial_accumulator: float = 0.0
) -> ServerOptimizer:
    """FedYogi with the constants of Reddi et al. and of FedRecon's language task."""
    scale = optax.scale_by_yogi(b1, b2, epsilon, initial_accumulator_value=initial_accumulator)
    return ServerOptimizer(optax.chain(scale, optax.scale_by_learning_rate(rate)))


def lazy_adam(rate: Any, **settings: Any) -> ServerOptimizer:
    """Adam on the rows that some client of the round asked for. All other rows keep their values and moments.

    Shared leaves are updated as in Adam. The bias correction uses the number of rounds, the same for every
    row.
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


# The allowed values of the optimizers' own settings. A decay of 1 is not allowed: it would never forget, and move
# nothing.
_FIRST, _SMALL = {"initial_accumulator": Limits(0, 1e6)}, {"epsilon": Limits(1e-12, 1e6)}
_SHRINKING = {"decay": Limits(0, 1e6)}
_DECAYS = {"b1": Limits(0, 0.9999), "b2": Limits(0, 0.999999)}
SETTINGS: Mapping[str, Mapping[str, Limits]] = {
    "sgd": {"momentum": Limits(0, 0.9999)},
    "adagrad": _FIRST | _SMALL,
    "adam": _DECAYS | _SMALL | _SHRINKING,
    "lazy_adam": _DECAYS | _SMALL | _SHRINKING,
    "yogi": _DECAYS | _SMALL | _FIRST,
    "lazy_yogi": _DECAYS | _SMALL | _FIRST,
}


def make_optimizer(name: str, rate: Any, **settings: Any) -> ServerOptimizer:
    """Make the optimizer with this name, learning rate and settings. Raises `UserError` for an unknown name
    or setting."""
    if name not in OPTIMIZERS:
        raise unknown("server optimizer", name, OPTIMIZERS)
    for setting, value in settings.items():
        if setting not in SETTINGS[name]:
            raise unknown(f"setting of the server optimizer '{name}'", setting, SETTINGS[name])
        SETTINGS[name][setting].check(f"server.settings.{setting}", value)
    return OPTIMIZERS[name](rate, **settings)
