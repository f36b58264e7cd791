"""What a benchmark is made of: cases, and the columns of its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Case(NamedTuple):
    """One line of a benchmark. `measure` is what measures it, if not `bench.trainings.measure`."""

    name: str
    task: str
    changes: Mapping[str, Any]
    rounds: int = 100
    measure: Callable[[Case, str | None], dict[str, Any]] | None = None


Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]  # title -> what a line says there
