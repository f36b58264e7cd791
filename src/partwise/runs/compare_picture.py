"""Learning curves of runs that are compared, with their spread over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from partwise.runs.picture import save_picture
from partwise.runs.run_view import RunView

if TYPE_CHECKING:
    from partwise.runs.compare import Compared

# Colours that are told apart with any kind of sight (Okabe and Ito), then shapes of lines.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
LINES = ("-", "--", ":")


def draw_comparison(path: Path, compared: Compared) -> None:
    """The metric of validation clients by round: the mean over seeds, and a band from the lowest to the highest.
    At the right, the test clients of every run."""
    result, metric = compared.result, compared.result["metric"]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1 + 0.15 * len(compared.rows)))
    for number, runs in enumerate(compared.runs):
        style = {
            "color": COLORS[number % len(COLORS)],
            "linestyle": LINES[number // len(COLORS) % len(LINES)],
        }
        name, seeds = compared.rows[number]["name"], len(runs)
        _draw_curve(
            left, runs, metric, f"{number + 1}: {name}" + (f" ({seeds} seeds)" if seeds > 1 else ""), style
        )
        _draw_tests(right, number, compared.rows[number], metric, style["color"])
    left.set(xlabel="round", ylabel=f"validation {metric}")
    left.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    right.set_xticks(range(len(compared.rows)), [str(i + 1) for i in range(len(compared.rows))])
    right.set(ylabel=f"test {metric}", xlabel="row", xlim=(-0.6, len(compared.rows) - 0.4))
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", frameon=False, fontsize=8, ncols=2
    )
    tasks = ", ".join(dict.fromkeys(str(row["task"]) for row in result["rows"]))
    figure.suptitle(f"{tasks}: mean over seeds, band from the lowest to the highest", fontsize=10)
    save_picture(path, figure)


def _draw_curve(
    axes: Axes, runs: Sequence[RunView], metric: str, label: str, style: Mapping[str, Any]
) -> None:
    """The rounds at which all seeds were evaluated; a run alone has all of its own."""
    curves = [{look.round: look.metrics.get(metric, np.nan) for look in run.series.looks} for run in runs]
    curves = [curve for curve in curves if curve]
    rounds = sorted(set.intersection(*map(set, curves))) if curves else []
    values = np.array([[curve[number] for number in rounds] for curve in curves]).reshape(
        len(curves), len(rounds)
    )
    if not len(values):
        axes.plot([], [], label=f"{label}: not evaluated", **style)
        return
    axes.plot(rounds, values.mean(axis=0), label=label, marker="o", markersize=3, linewidth=1.2, **style)
    if len(values) > 1:
        axes.fill_between(
            rounds, values.min(axis=0), values.max(axis=0), color=style["color"], alpha=0.2, linewidth=0
        )


def _draw_tests(axes: Axes, number: int, row: Mapping[str, Any], metric: str, color: str) -> None:
    found = row["test"].get(metric)
    values = [_number(value) for value in found["values"]] if found else []
    axes.plot([number] * len(values), values, "o", color=color, markersize=4, alpha=0.6)
    if found and found["mean"] is not None:
        axes.plot([number - 0.25, number + 0.25], [found["mean"]] * 2, color=color, linewidth=2)


def _number(value: float | None) -> float:
    return np.nan if value is None else value
