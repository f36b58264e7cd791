"""The charts of a page, as data for its script: curves by round, a metric by bytes, epsilon, heat."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from partwise.data.heat import Heat, histogram
from partwise.pages.run_groups import Curve, Group, by_bytes, by_look, by_round, metric_names, thinned
from partwise.runs.run_view import RunView

POINTS, FEWEST = 6_000, 120  # points of all lines of a chart; of one line at least
FAR, USUAL = 10, 0.5  # losses are far apart if the largest is so many times this quantile of them
SCALES = {
    "linear": "",
    "log": " The scale is logarithmic.",
    "asinh": " The scale is logarithmic away from zero.",
}
UNTOLD = "its bytes are not told"
ROWS = 40  # of a chart's table


class Chart(NamedTuple):
    """One chart.

    key:    its id in the page
    title:  its heading
    about:  what is drawn, in words
    x, y:   names of the axes
    curves: number of the group -> its curve
    level:  a horizontal line: its name and value
    scale:  of the values: linear, log, or asinh, which is logarithmic away from zero
    steps:  whether values hold from one point to the next
    """

    key: str
    title: str
    about: str
    x: str
    y: str
    curves: Mapping[int, Curve]
    level: tuple[str, float] | None = None
    scale: str = "linear"
    steps: bool = False

    def drawn(self) -> Chart:
        """The chart with curves of a bounded size."""
        most = max(POINTS // max(len(self.curves), 1), FEWEST)
        thin = {number: thinned(curve, most) for number, curve in self.curves.items()}
        rounds = max((len(curve.x) for curve in self.curves.values()), default=0)
        if rounds <= most:
            return self
        about = f"{self.about} Of {rounds:,} rounds, the lowest and the highest of every stretch are drawn."
        return self._replace(curves=thin, about=about)

    def told(self) -> dict[str, Any]:
        """For the page's script."""
        curves = {number: [_numbers(each) for each in curve] for number, curve in self.curves.items()}
        kept = ("key", "title", "x", "y", "scale", "steps")
        return {name: getattr(self, name) for name in kept} | {
            "curves": curves,
            "level": self.level and {"name": self.level[0], "value": self.level[1]},
        }

    def rows(self) -> tuple[list[float], int]:
        """The x values of the chart's table, and of how many they are."""
        found = sorted({float(x) for curve in self.curves.values() for x in curve.x})
        if len(found) <= ROWS:
            return found, len(found)
        places = np.unique(np.linspace(0, len(found) - 1, ROWS).round().astype(int))
        return [found[place] for place in places], len(found)


def _numbers(values: np.ndarray) -> list[float | int | None]:
    """Numbers with six digits, which are more than a chart shows."""
    return [_short(float(value)) for value in values]


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.6g}")


def training_chart(groups: Sequence[Group]) -> Chart | None:
    """The training loss by round."""
    curves, left_out = _curves(groups, lambda group: by_round(group, lambda run: run.series.losses))
    scale = _scale(curves)
    about = f"Loss of the clients that trained, in every round.{SCALES[scale]}{left_out}"
    return _chart("training", "Training loss", about, "round", "training loss", curves, scale=scale)


def validation_charts(groups: Sequence[Group]) -> list[Chart]:
    """Every metric of the validation clients by round, the main one first."""
    charts = []
    for metric in metric_names(run for group in groups for run in group.runs):
        curves, left_out = _curves(groups, lambda group, metric=metric: by_look(group, metric))
        about = f"{metric} of the validation clients.{left_out}"
        chart = _chart(f"validation-{metric}", f"Validation {metric}", about, "round", metric, curves)
        charts += [chart._replace(level=_best(groups, metric))] if chart else []
    return charts


def bytes_chart(groups: Sequence[Group]) -> Chart | None:
    """The main metric of the validation clients by bytes."""
    for metric in metric_names(run for group in groups for run in group.runs):
        curves, left_out = _curves(groups, lambda group, metric=metric: by_bytes(group, metric), UNTOLD)
        about = (
            f"{metric} of the validation clients, after all clients together had fetched and sent so much."
        )
        about += left_out
        chart = _chart("bytes", f"Validation {metric} by megabytes", about, "megabytes", metric, curves)
        if chart:
            return chart._replace(level=_best(groups, metric))
    return None


def privacy_chart(groups: Sequence[Group]) -> Chart | None:
    """Epsilon by round."""
    curves, _ = _curves(groups, lambda group: by_round(group, lambda run: run.series.epsilons))
    about = (
        "What has been spent after each round. Between evaluations, epsilon is that of a few more rounds, so it "
        "grows in steps."
    )
    return _chart("epsilon", "Epsilon by round", about, "round", "epsilon", curves, steps=True)


def heat_charts(groups: Sequence[Group]) -> list[Chart]:
    """For every key space, how many keys have how many holders."""
    spaces = dict.fromkeys(space for group in groups for space in group.first.heats)
    charts = []
    for space in spaces:
        heats = {group.place: group.first.heats.get(space) for group in groups}
        curves = {number: _holders(heat) for number, heat in heats.items() if heat}
        by = next(heat.by for heat in heats.values() if heat)
        what = "clients that hold it" if by == "clients" else "samples of the clients that hold it"
        about = f"Keys of '{space}' by the number of {what}, in powers of two."
        charts.append(Chart(f"heat-{space}", f"Heat of {space}", about, what, "keys", curves, steps=True))
    return charts


def clients_charts(groups: Sequence[Group]) -> list[Chart]:
    """For every metric of which each test client's value is known, the clients from the lowest to the highest."""
    names = dict.fromkeys(name for group in groups for name in group.first.clients)
    shares = np.linspace(0, 100, 101)
    charts = []
    for name in names:
        known = {group.place: group.first.clients.get(name) for group in groups}
        found = {number: values for number, values in known.items() if values is not None and len(values)}
        lines = {number: np.nanpercentile(values, shares) for number, values in found.items()}
        curves = {number: Curve(shares, line, line, line) for number, line in lines.items()}
        about = f"{name} of every test client, from the lowest to the highest (seed {_seeds(groups)})."
        chart = _chart(f"clients-{name}", f"{name} over clients", about, "% of clients", name, curves)
        charts += [chart] if chart else []
    return charts


def _seeds(groups: Sequence[Group]) -> str:
    return ", ".join(dict.fromkeys(str(group.first.settings.get("seed", "-")) for group in groups))


def _holders(heat: Heat) -> Curve:
    bins = histogram(heat)
    x = np.array([each.low for each in bins] + [each.high + 1 for each in bins[-1:]], float)
    keys = np.array([each.keys for each in bins] + [each.keys for each in bins[-1:]], float)
    return Curve(x, keys, keys, keys)


def _curves(
    groups: Sequence[Group], make: Callable[[Group], Curve], missing: str = "it has no values"
) -> tuple[dict[int, Curve], str]:
    """The curves of the groups that have any finite value, and a sentence about those that have none."""
    found = [(group, make(group)) for group in groups]
    drawn = {group.place: curve for group, curve in found if np.isfinite(curve.mean).any()}
    told = [
        f"{group.label} ({_why(group, curve, missing)})" for group, curve in found if group.place not in drawn
    ]
    return drawn, f" Left out: {', '.join(told)}." if told else ""


def _why(group: Group, curve: Curve, missing: str) -> str:
    """Why a group has no curve."""
    if len(curve.x):
        return "none of its values is finite"
    return "it failed before it was evaluated" if group.first.state == "failed" else missing


def _chart(
    key: str, title: str, about: str, x: str, y: str, curves: Mapping[int, Curve], **more: Any
) -> Chart | None:
    return Chart(key, title, about, x, y, curves, **more) if curves else None


def _best(groups: Sequence[Group], metric: str) -> tuple[str, float] | None:
    """The best that any method can reach, if all runs that know it say the same."""
    runs: list[RunView] = [run for group in groups for run in group.runs]
    found = {run.summary["best"][metric] for run in runs if metric in (run.summary.get("best") or {})}
    return ("best reachable on test clients", found.pop()) if len(found) == 1 else None


def _scale(curves: Mapping[int, Curve]) -> str:
    """The scale on which values that are far apart can be told apart."""
    values = np.concatenate([np.zeros(0), *(curve.mean for curve in curves.values())])
    values = values[np.isfinite(values)]
    usual = np.quantile(np.abs(values), USUAL) if len(values) else 0
    if not usual * FAR < np.abs(values).max(initial=0):
        return "linear"
    return "log" if values.min() > 0 else "asinh"
