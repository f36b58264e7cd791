"""Schedules of rates: optax's own by name, as factors of a rate, and functions of Python by their values.

A schedule is a function of the round (0, 1, 2, ...) and gives the factor by which a rate is multiplied. As text it
is a name with numbers, `warmup_cosine:20`. A function is written as its values in all rounds of the run, so that a
run's configuration says everything: a resumed run, or a device far away, has the same rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from partwise.config.settings import Config, to_number
from partwise.types import Limits, UserError, unknown

CONSTANT, VALUES = "constant", "values"
KEYS = ("server.schedule", "update.schedule", "reconstruct.schedule")
MOST_VALUES = 100_000  # rounds of a run whose schedule is a function
SHARE, FACTOR, ROUNDS = Limits(0, 1e6), Limits(0, 10), Limits(1, 10**8)


class NamedSchedule(NamedTuple):
    """A schedule by name: how it is made of the run's rounds and of its numbers, the limits of these, how many of
    them must be said, and whether it depends on the number of rounds."""

    make: Callable[..., optax.Schedule]
    limits: tuple[Limits, ...] = ()
    needed: int = 0
    spans: bool = True


def _warmup(rounds: int, warm: float) -> optax.Schedule:
    return optax.warmup_constant_schedule(_first(warm), 1.0, int(warm))


def _warmup_cosine(rounds: int, warm: float, end: float = 0.0) -> optax.Schedule:
    if warm >= rounds:
        raise UserError(
            f"a warmup of {int(warm)} rounds leaves nothing of the run's {rounds} for the cosine: give fewer, or "
            f"use warmup:{int(warm)}"
        )
    return optax.warmup_cosine_decay_schedule(_first(warm), 1.0, int(warm), rounds, end)


def _first(warm: float) -> float:
    """The factor in the first round, such that the rate rises evenly and is never 0."""
    return 1 / (warm + 1)


SCHEDULES: Mapping[str, NamedSchedule] = {
    CONSTANT: NamedSchedule(lambda rounds: optax.constant_schedule(1.0), spans=False),
    "cosine": NamedSchedule(
        lambda rounds, end=0.0: optax.cosine_decay_schedule(1.0, max(rounds, 1), end), (SHARE,)
    ),
    "linear": NamedSchedule(
        lambda rounds, end=0.0: optax.linear_schedule(1.0, end, max(rounds, 1)), (SHARE,)
    ),
    "polynomial": NamedSchedule(
        lambda rounds, power, end=0.0: optax.polynomial_schedule(1.0, end, power, max(rounds, 1)),
        (Limits(0.01, 100), SHARE),
        needed=1,
    ),
    "exponential": NamedSchedule(
        lambda rounds, factor: optax.exponential_decay(1.0, 1, factor), (FACTOR,), needed=1, spans=False
    ),
    "warmup": NamedSchedule(_warmup, (ROUNDS,), needed=1, spans=False),
    "warmup_cosine": NamedSchedule(_warmup_cosine, (ROUNDS, SHARE), needed=1),
}
PIECEWISE = "piecewise"  # pairs ROUND=FACTOR
NAMES = (*SCHEDULES, PIECEWISE)


def make_schedule_of_rate(key: str, text: str, rounds: int) -> optax.Schedule | None:
    """The schedule that a setting names, for a run of so many rounds; None if the rate stays."""
    name, _, rest = text.partition(":")
    if name == PIECEWISE:
        return optax.piecewise_constant_schedule(1.0, _pieces(key, text, rest))
    if name == VALUES:
        return _by_values(np.array([to_number(key, each) for each in rest.split(",")], np.float32))
    if name not in SCHEDULES:
        raise unknown(f"value of {key}", text, NAMES)
    known, numbers = SCHEDULES[name], [each for each in rest.split(":") if rest]
    if not known.needed <= len(numbers) <= len(known.limits):
        raise UserError(f"{key} = {text} should have {_usage(known)}, as in {_example(name)}")
    values = [to_number(key, each) for each in numbers]
    for limits, value in zip(known.limits, values, strict=False):
        limits.check(key, value)
    return None if name == CONSTANT else known.make(rounds, *values)


def _usage(known: NamedSchedule) -> str:
    least, most = known.needed, len(known.limits)
    if not most:
        return "no numbers"
    return f"{most} number{'s' * (most > 1)}" if least == most else f"{least} to {most} numbers"


def _example(name: str) -> str:
    examples = {"exponential": "exponential:0.99", "polynomial": "polynomial:2", "warmup": "warmup:20"}
    return examples.get(name, "warmup_cosine:20" if name.startswith("warmup") else name)


def _pieces(key: str, text: str, rest: str) -> dict[int, float]:
    """The factors by which a rate is multiplied, by the round from which they hold."""
    pieces = {}
    for each in rest.split(","):
        number, sign, factor = each.partition("=")
        if not sign or number.strip().isalpha():
            raise UserError(
                f"{key} = {text} should have ROUND=FACTOR, as in piecewise:100=0.1,200=0.1: from round 100 on, a "
                f"tenth of the rate, and from round 200 on a tenth of that"
            )
        at, by = to_number(key, number, "int"), to_number(key, factor)
        ROUNDS.check(key, at)
        FACTOR.check(key, by)
        pieces[int(at)] = by
    return pieces


def _by_values(values: np.ndarray) -> optax.Schedule:
    return lambda count: jnp.asarray(values)[jnp.minimum(count, len(values) - 1)]


def spans_rounds(config: Config) -> list[str]:
    """The schedules of a configuration that depend on its number of rounds, by their keys."""
    settings = config.flat()
    name_of = {key: str(settings[key]).partition(":")[0] for key in KEYS}
    spans = lambda name: name == VALUES or (name in SCHEDULES and SCHEDULES[name].spans)
    return [key for key, name in name_of.items() if spans(name)]


def written(settings: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Settings with schedules that are functions of the round written as their values."""
    return {
        key: _values(key, value, rounds) if key in KEYS and callable(value) else value
        for key, value in settings.items()
    }


def _values(key: str, function: Callable[[int], Any], rounds: int) -> str:
    if rounds > MOST_VALUES:
        raise UserError(
            f"{key} is a function, which is recorded by its values in all {rounds:,} rounds; with more than "
            f"{MOST_VALUES:,}, give a schedule by name ({', '.join(NAMES)})"
        )
    try:
        values = [np.float32(function(number)) for number in range(rounds)]
    except Exception as error:
        raise UserError(
            f"{key} must be a function of the round that gives a number, as optax's schedules are; called with "
            f"a round it raises {type(error).__name__}: {error}"
        ) from None
    wrong = [number for number, value in enumerate(values) if not (np.isfinite(value) and value >= 0)]
    if wrong:
        raise UserError(
            f"{key} gives {values[wrong[0]]} in round {wrong[0]}; expected a factor of at least 0 in every round"
        )
    return f"{VALUES}:{','.join(str(value) for value in values)}"
