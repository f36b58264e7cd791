"""What a sweep runs: every combination of the grid's values, with every seed, each in a folder of its own."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from partwise.types import UserError, counted, unknown

# Settings that are values in a compiled program, and their names in an algorithm's rates.
RATES = {
    "reconstruct.rate": "reconstruct",
    "reconstruct.pull": "pull",
    "update.rate": "update",
    "server.rate": "server",
    "fine_tune.rate": "fine_tune",
}
LONGEST_NAME = 150  # characters of a folder's name
MOST_SEED = 2**32 - 1


class SweepCell(NamedTuple):
    """One run of a sweep."""

    changes: Mapping[str, Any]  # its values, by key of the grid
    seed: int
    name: str  # of its folder


class SweepPlan(NamedTuple):
    """What was asked for.

    Attributes:
        task: The name of the task.
        data: Where its data is.
        preset: A named set of settings of the task.
        recorded: All settings of another run, to which the others are applied.
        changes: Settings of all runs, as dotted keys.
        grid: {dotted key: values to try}.
        seeds: With which every combination is run.
        metric: The metric of validation clients by which settings are sorted; None: the first of the model.
    """

    task: str
    data: str | None
    preset: str | None
    recorded: Mapping[str, Any]
    changes: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]
    seeds: Sequence[int]
    metric: str | None

    def cells(self) -> list[SweepCell]:
        """All runs: combination by combination, and of each, seed by seed."""
        pairs = [(changes, seed) for changes in grid_of(self.grid) for seed in self.seeds]
        names = [_name(changes, seed) for changes, seed in pairs]
        if len(set(names)) < len(names) or max(map(len, names)) > LONGEST_NAME:
            names = [f"{number:04d}-seed={seed}" for number, (_, seed) in enumerate(pairs)]
        return [SweepCell(changes, seed, name) for (changes, seed), name in zip(pairs, names, strict=True)]

    def families(self) -> list[list[SweepCell]]:
        """The runs, those together that differ in rates and seeds alone: they may be values in one program."""
        found: dict[str, list[SweepCell]] = {}
        for cell in self.cells():
            fixed = {key: value for key, value in cell.changes.items() if key not in RATES}
            found.setdefault(str(fixed), []).append(cell)
        return list(found.values())


def grid_of(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the choices."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def _name(changes: Mapping[str, Any], seed: int) -> str:
    told = ",".join(f"{key}={value}" for key, value in {**changes, "seed": seed}.items())
    return re.sub(r"[^\w.,=+-]", "_", told)


def parse_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """`["server.rate=0.1,0.3", ...]` as {key: values}."""
    grid: dict[str, list[str]] = {}
    for text in texts:
        key, sign, values = (part.strip() for part in text.partition("="))
        if not sign or not key:
            raise UserError(f"--grid takes dotted.key=value,value,..., not '{text}'")
        if key in grid:
            raise UserError(f"--grid {key} was given twice: give all its values at once, as in {key}=0.1,0.3")
        grid[key] = [value.strip() for value in values.split(",")]
    return grid


def check_grid(grid: Mapping[str, Sequence[Any]], changes: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The grid as lists. Raises `UserError` if a key has no values, has one twice, or has one already."""
    if "seed" in grid:
        raise UserError(
            "the seed is no key of a grid: say how many with --seeds 3 (seeds=3, or seeds=[5, 7])"
        )
    if "task" in grid:
        raise UserError("a sweep is of one task: sweep others into folders of their own (--out, out=)")
    for key, values in grid.items():
        if isinstance(values, str) or (
            not isinstance(values, Sequence | range) and not hasattr(values, "tolist")
        ):
            raise UserError(
                f"the grid's values of {key} must be a list, as in {{'{key}': [0.1, 0.3]}}, not {values!r}"
            )
        told = [str(value) for value in values]
        if not told or "" in told:
            raise UserError(f"the grid has an empty value of {key}: give its values as in {key}=0.1,0.3")
        if len(set(told)) < len(told):
            raise UserError(f"the grid has a value of {key} twice: {', '.join(told)}")
        if key in changes:
            raise UserError(f"{key} is in the grid and also set to {changes[key]}: leave one of the two out")
    return {key: list(getattr(values, "tolist", lambda v=values: v)()) for key, values in grid.items()}


def check_seeds(seeds: int | str | Sequence[int], first: Any = None) -> list[int]:
    """The seeds: those that are given, or so many from `first` on (default: 0)."""
    if isinstance(seeds, Sequence) and not isinstance(seeds, str):
        return _checked([_whole(seed, "a seed") for seed in seeds], first)
    count, start = _whole(seeds, "the number of seeds"), _whole(first or 0, "a seed")
    if count < 1:
        raise UserError(f"a sweep needs at least one seed, not {count} (--seeds, seeds=)")
    return _checked(list(range(start, start + count)), None)


def _checked(seeds: list[int], first: Any) -> list[int]:
    if first is not None:
        raise UserError(f"seed = {first} and seeds = {seeds} were given: leave one of the two out")
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0 or max(seeds) > MOST_SEED:
        raise UserError(f"seeds must be different whole numbers from 0 to {MOST_SEED:,}, not {seeds}")
    return seeds


def _whole(value: Any, what: str) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise UserError(f"{what} must be a whole number, not {str(value)!r} (--seeds, seeds=)") from None


def to_document(plan: SweepPlan) -> dict[str, Any]:
    """The plan for JSON."""
    return plan._asdict()


def from_document(document: Mapping[str, Any]) -> SweepPlan:
    """The inverse of `to_document`."""
    return SweepPlan(**{name: document[name] for name in SweepPlan._fields})


def check_same(before: SweepPlan, now: SweepPlan, where: Any) -> None:
    """Raise `UserError` if a sweep is resumed with another plan."""
    for name in SweepPlan._fields:
        was, is_now = getattr(before, name), getattr(now, name)
        if name not in ("data", "metric") and _told(was) != _told(is_now):
            raise UserError(
                f"the sweep in '{where}' has {name} {_told(was)}, and was asked to go on with {_told(is_now)}: "
                f"give the same, or begin another in another folder (--out, out=)"
            )


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_told(inner)}" for key, inner in sorted(value.items())) or "none"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


def find_family(plan: SweepPlan, number: int) -> list[SweepCell]:
    """The family with this number."""
    families = plan.families()
    if not 0 <= number < len(families):
        raise unknown(f"family of {counted(len(families), 'family', 'families')}", str(number), [])
    return families[number]
