"""Groups of runs over seeds on a page: a line that is their mean, and a band from the smallest to the largest."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from partwise.runs.run_view import RunView
from partwise.runs.seed_groups import group_over_seeds
from partwise.runs.series import is_number, metrics_of

UNKNOWN = "an unknown task"  # of a run whose settings are not there, or cannot be read


class Group(NamedTuple):
    """Runs that differ in the seed alone, under one name. Its place among all groups of the page is its colour."""

    label: str
    runs: Sequence[RunView]
    place: int = 0

    @property
    def first(self) -> RunView:
        """One of the runs: what is learned is set as in all."""
        return self.runs[0]

    @property
    def task(self) -> str:
        """What was trained."""
        return str(self.first.settings.get("task", UNKNOWN))


class Curve(NamedTuple):
    """Values of a group by round, or by another number that grows: mean, smallest and largest of the runs."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Spread(NamedTuple):
    """A number of several runs: mean, and standard deviation between the runs (None: of one run)."""

    mean: float
    deviation: float | None


def group_runs(runs: Iterable[RunView]) -> list[Group]:
    """Groups over seeds. A run that has not ended, or is damaged, is drawn by itself, behind the others of its
    group: in a mean, it would end their line where its own ends."""
    labels: dict[str, int] = {}
    drawn = [part for group in group_over_seeds(runs) for part in _finished_together(group)]
    return [Group(_unused(_label(part), labels), part, place) for place, part in enumerate(drawn)]


def by_task(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """The groups of every task. A metric of one task says nothing about another, whatever its name."""
    tasks: dict[str, list[Group]] = {}
    for group in groups:
        tasks.setdefault(group.task, []).append(group)
    return tasks


def _finished_together(runs: Sequence[RunView]) -> Iterator[list[RunView]]:
    if finished := [run for run in runs if run.state == "finished"]:
        yield finished
    yield from ([run] for run in runs if run.state != "finished")


def _label(runs: Sequence[RunView]) -> str:
    """What the names of the folders have in common, without the seed."""
    names = [run.name for run in runs]
    if len(names) == 1:
        return names[0]
    stem = re.sub(r"[-_., ]*(seed|s)?[-_.= ]*\d*$", "", _common(names))
    return stem or f"{names[0]} and {len(names) - 1} more"


def _common(names: Sequence[str]) -> str:
    """How all names begin."""
    least, most = min(names), max(names)
    ends = (place for place, letter in enumerate(least) if most[place : place + 1] != letter)
    return least[: next(ends, len(least))]


def _unused(label: str, used: dict[str, int]) -> str:
    used[label] = used.get(label, 0) + 1
    return label if used[label] == 1 else f"{label} ({used[label]})"


def together(points: Sequence[Mapping[float, float]]) -> Curve:
    """The curve of several runs, each {x: value}, where all of them have a value."""
    shared = sorted(set.intersection(*(set(each) for each in points))) if points else []
    values = np.array([[each[x] for x in shared] for each in points], float).reshape(len(points), len(shared))
    if not values.size:
        return Curve(*(np.zeros(0) for _ in range(4)))
    return Curve(np.array(shared, float), values.mean(0), values.min(0), values.max(0))


def by_round(group: Group, values: Callable[[RunView], Sequence[float]]) -> Curve:
    """The curve of something that every round has."""
    return together([dict(zip(run.series.rounds, values(run), strict=True)) for run in group.runs])


def by_look(group: Group, metric: str) -> Curve:
    """The curve of a metric of the validation clients."""
    return together([_looks(run, metric) for run in group.runs])


def _looks(run: RunView, metric: str) -> dict[float, float]:
    return {look.round: look.metrics[metric] for look in run.series.looks if metric in look.metrics}


def by_bytes(group: Group, metric: str) -> Curve:
    """The same metric by the megabytes that all clients together had sent and fetched until then, as a mean over
    the runs."""
    curve = by_look(group, metric)
    sent = together([{look.round: _known(look.sent) for look in run.series.looks} for run in group.runs])
    megabytes = dict(zip(sent.x, sent.mean / 1e6, strict=True))
    curve = curve._replace(x=np.array([megabytes[x] for x in curve.x]))
    told = np.isfinite(curve.x)
    return Curve(*(each[told] for each in curve))


def _known(sent: int | None) -> float:
    return math.nan if sent is None else float(sent)


def test_metric(group: Group, metric: str) -> Spread | None:
    """A metric of the test clients; None if no run of the group has it."""
    return spread_of(run.summary.get("test", {}).get(metric) for run in group.runs)


def metric_names(runs: Iterable[RunView]) -> list[str]:
    """All metrics of these runs, the main one first and the loss last."""
    found: dict[str, None] = {}
    for run in runs:
        best = run.summary.get("best") or {}
        names = [name for name, _ in metrics_of(run.summary.get("test") or {})]
        names += [name for look in run.series.looks for name in look.metrics]
        found |= dict.fromkeys(sorted(names, key=lambda name: name not in best))
    return sorted(found, key=lambda name: name == "loss")


def spread_of(values: Iterable[Any]) -> Spread | None:
    """Mean and deviation of the numbers among these values; None if there are none."""
    known = [float(value) for value in values if is_number(value)]
    if not known:
        return None
    return Spread(float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else None)


def thinned(curve: Curve, most: int) -> Curve:
    """At most about so many points. Of every stretch of rounds, the first, the last, the lowest and the highest
    stay, so that no peak is lost. All points that stay are true ones."""
    if len(curve.x) <= most:
        return curve
    kept = {0, len(curve.x) - 1}
    for part in np.array_split(np.arange(len(curve.x)), max(most // 4, 1)):
        low, high = curve.low[part], curve.high[part]
        kept |= {int(part[0]), int(part[-1])}
        if np.isfinite(low).any():
            kept |= {int(part[np.nanargmin(low)]), int(part[np.nanargmax(high)])}
    chosen = sorted(kept)
    return Curve(*(each[chosen] for each in curve))
