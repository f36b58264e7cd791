"""The few names that every layer shares."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

# A pytree of arrays. Nested dicts in practice; any pytree with dict-like paths works.
Params = Any


class UserError(ValueError):
    """Something the user can mend: the message says what was given, what was expected and what to do.

    The command line prints it as one paragraph, without a traceback, and exits with code 2.
    """


class RunWarning(Warning):
    """Something went wrong that a run survives, and that its user should know. The command line prints it as a
    sentence."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """Words for an error message: the known names that look most like `name`, or all of them if few."""
    names = [str(k) for k in known]
    if not names:
        return "there are none"
    close = difflib.get_close_matches(str(name), names, n=count, cutoff=0.5)
    if close:
        return "nearest: " + ", ".join(close)
    shown = ", ".join(sorted(names)[:12])
    return f"known: {shown}" + (", ..." if len(names) > 12 else "")


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The one way to say that a name is not known."""
    return UserError(f"unknown {kind} '{name}' ({nearest(name, known)})")
