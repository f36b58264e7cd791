"""The few names that every layer shares."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple

# A pytree of arrays. Nested dicts in practice; any pytree with dict-like paths works.
Params = Any

MOST_NAMES = 30  # listed in one message: enough for all tasks and reproductions, not for a whole vocabulary


class UserError(ValueError):
    """An error that the user can fix. The message says what was given, what was expected and what to do.

    The command line prints it as one paragraph, without a traceback, and exits with code 2.
    """

    everywhere = False  # whether all processes of a run have it, so that the first prints it for all


class DivergedError(UserError):
    """A training went wrong, and its rounds are useless. The folder of the run keeps the reason."""

    everywhere = True


class RunWarning(Warning):
    """A problem that does not stop a run, but that the user should know about. The command line prints it as
    a sentence."""


class Limits(NamedTuple):
    """The smallest and the largest number that a setting may be. Both are allowed values."""

    least: float
    most: float

    def check(self, key: str, value: Any) -> None:
        """Raise `UserError` if `value` is a number outside the limits."""
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and not self.least <= value <= self.most
        ):
            raise UserError(
                f"'{key}' must be between {_number(self.least)} and {_number(self.most)}, not {value}"
            )


def _number(value: float) -> str:
    """Format whole numbers in full and other numbers in short form."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """Words for an error message: the known names that look most like `name`, or all of them if few."""
    names = [str(k) for k in known]
    if not names:
        return "there are none"
    close = difflib.get_close_matches(str(name), names, n=count, cutoff=0.5)
    if close:
        return "nearest: " + ", ".join(close)
    shown = ", ".join(sorted(names)[:MOST_NAMES])
    return f"known: {shown}" + (", ..." if len(names) > MOST_NAMES else "")


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Return the error for a name that is not known. All such errors have this form."""
    return UserError(f"unknown {kind} '{name}' ({nearest(name, known)})")


def counted(number: int, noun: str, nouns: str | None = None) -> str:
    """A number with its noun, for messages: 1 client, 2,000 clients."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"
