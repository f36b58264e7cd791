"""Schedules of rates as text: a name with numbers, `warmup_cosine:20`; a function of Python by its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from partwise.config.settings import Config, to_number
from partwise.parts.declare import find, names
from partwise.schedules import Piecewise, Schedule, Spanning, Values
from partwise.types import Limits, UserError, unknown

CONSTANT, VALUES, PIECEWISE = "constant", "values", "piecewise"
KEYS = ("server.schedule", "update.schedule", "reconstruct.schedule")
ROUNDS, FACTOR = Limits(1, 10**8), Limits(0, 10)


class Wording(NamedTuple):
    """How a schedule is written: the fields that its numbers are, and how many of them must be said."""

    fields: tuple[str, ...] = ()
    needed: int = 0


FORMS: Mapping[str, Wording] = {
    CONSTANT: Wording(),
    "cosine": Wording(("end",)),
    "linear": Wording(("end",)),
    "polynomial": Wording(("power", "end"), 1),
    "exponential": Wording(("base",), 1),
    "warmup": Wording(("warmup",), 1),
    "warmup_cosine": Wording(("warmup", "end"), 1),
}


def read_schedule(key: str, text: str, rounds: int) -> Schedule | None:
    """The schedule that a setting names, for a run of so many rounds; None if the rate stays."""
    name, _, rest = text.partition(":")
    if name == PIECEWISE:
        pieces = _pieces(key, text, rest)
        return Piecewise(tuple(pieces), tuple(pieces.values()))
    if name == VALUES:
        return Values(tuple(to_number(key, each) for each in rest.split(",")))
    if name not in FORMS:
        raise unknown(f"value of {key}", text, [CONSTANT, *names(Schedule)])
    form, given = FORMS[name], [each for each in rest.split(":") if rest]
    if not form.needed <= len(given) <= len(form.fields):
        raise UserError(f"{key} = {text} should have {_usage(form)}, as in {_example(name)}")
    if name == CONSTANT:
        return None
    found = find(Schedule, name)
    values: dict[str, Any] = {at: to_number(key, each) for at, each in zip(form.fields, given, strict=False)}
    if issubclass(found, Spanning):
        values["rounds"] = rounds
    try:
        return found(**values)  # pyright: ignore[reportReturnType]
    except UserError as error:
        raise UserError(f"{key} = {text}: {error}") from None


def _usage(form: Wording) -> str:
    least, most = form.needed, len(form.fields)
    if not most:
        return "no numbers"
    return f"{most} number{'s' * (most > 1)}" if least == most else f"{least} to {most} numbers"


def _example(name: str) -> str:
    examples = {"exponential": "exponential:0.99", "polynomial": "polynomial:2", "warmup": "warmup:20"}
    return examples.get(name, "warmup_cosine:20" if name.startswith("warmup") else name)


def _pieces(key: str, text: str, rest: str) -> dict[float, float]:
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
        pieces[at] = by
    return pieces


def spans_rounds(config: Config) -> list[str]:
    """The schedules of a configuration that depend on its number of rounds, by their keys."""
    settings = config.flat()
    schedules = {key: read_schedule(key, str(settings[key]), config.rounds) for key in KEYS}
    return [key for key, found in schedules.items() if isinstance(found, Spanning | Values)]


def written(settings: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Settings with schedules that are functions of the round written as their values."""
    return {
        key: _values(key, value, rounds) if key in KEYS and callable(value) else value
        for key, value in settings.items()
    }


def _values(key: str, function: Any, rounds: int) -> str:
    try:
        found = Values.of(function, rounds)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    return f"{VALUES}:{','.join(map(str, found.factors))}"
