"""Pictures of runs and tables, as PNG files."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from partwise.checkpoint import write_file
from partwise.runs.series import main_metric

INK, QUIET, RED = "#1f4e79", "#8a8a8a", "#b03a2e"
FEW = 20  # up to this many rounds are drawn with dots
QUICK = "quick check of the machinery, not the reproduction"


def learning_curve(path: Path, records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Training loss by round, and the main metric of the validation clients."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_training(left, records)
    _draw_validation(right, [record for record in records if record["evaluation"]], summary)
    for axes in (left, right):
        _mark_rounds(axes, max((record["round"] for record in records), default=1))
    figure.suptitle(f"{summary['algorithm']} on {summary['task']}, seed {summary['seed']}", fontsize=10)
    save_picture(path, figure)


def _draw_training(axes: Axes, records: Sequence[Mapping[str, Any]]) -> None:
    """The training loss, on a logarithmic scale if all losses are positive and far apart."""
    losses = [_plotted(record["train"]["loss"]) for record in records]
    finite = [loss for loss in losses if math.isfinite(loss)]
    axes.plot([r["round"] for r in records], losses, color=INK, linewidth=0.8, **_dots(losses))
    axes.set_ylabel("training loss")
    if not finite:
        _say_nothing(axes, "no training loss that is a finite number")
    elif 0 < 10 * min(finite) < max(finite):
        axes.set_yscale("log")


def _draw_validation(axes: Axes, evaluated: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    metric = next(
        (name for name in summary["best"] if name in summary["test"]),
        main_metric(summary["test"]["over_clients"]),
    )
    values = [_plotted(record["evaluation"][metric]) for record in evaluated]
    axes.set_ylabel(f"validation {metric}")
    if any(map(math.isfinite, values)):
        rounds = [record["round"] for record in evaluated]
        axes.plot(rounds, values, color=INK, marker="o", markersize=3, label="validation clients")
    lines: tuple[tuple[float | None, str, dict[str, Any]], ...] = (
        (summary["test"][metric], "test clients, at the end", {"color": QUIET, "linewidth": 0.8}),
        (summary["best"].get(metric), "best reachable on test clients", {"color": RED, "linestyle": "--"}),
    )
    for value, label, style in lines:
        if math.isfinite(_plotted(value)):
            axes.axhline(_plotted(value), label=label, **style)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)
    else:
        _say_nothing(axes, f"{metric} has no value that is a finite number")


def _dots(values: Sequence[float]) -> dict[str, Any]:
    """Draw dots too if there are few values, because a line needs two values."""
    return {"marker": "o", "markersize": 3} if len(values) <= FEW else {}


def _say_nothing(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=8, color=QUIET)
    axes.set_yticks([])


def _mark_rounds(axes: Axes, last: int) -> None:
    """Whole numbers on the axis of rounds, with room for all rounds of the run."""
    axes.set(xlabel="round", xlim=(min(0.5, 1 - 0.03 * last), last + max(0.5, 0.03 * last)))
    if last <= FEW // 2:
        axes.set_xticks(range(1, last + 1))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))


def _plotted(value: float | None) -> float:
    """The value to draw. An undefined metric leaves a gap."""
    return math.nan if value is None else value


def save_picture(path: Path, figure: Figure, quick: bool = False) -> None:
    """Write a PNG file, completely or not at all. A quick picture has a title that says so."""
    if quick:
        figure.suptitle(QUICK, fontsize=10, color=RED)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=130)
    write_file(path, data.getvalue())


def draw_band(axes: Axes, x: Any, values: Any, **look: Any) -> None:
    """The mean of curves [trials, points], with their standard deviation shaded."""
    mean, spread = np.mean(values, axis=0), np.std(values, axis=0)
    (line,) = axes.plot(x, mean, **{"linewidth": 1.2, **look})
    axes.fill_between(x, mean - spread, mean + spread, color=line.get_color(), alpha=0.2, linewidth=0)


def bars_beside(
    path: Path, rows: Sequence[Mapping[str, Any]], label: str, most: float, quick: bool = False
) -> None:
    """The paper's numbers beside ours with their spread: a pair of bars for each row. Bars longer than `most` are
    cut and labelled."""
    figure = Figure(figsize=(7.5, 0.45 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    for i, row in enumerate(rows):
        for offset, name, color in ((-0.18, "paper", QUIET), (0.18, "ours", INK)):
            if row[name] is not None:
                end, spread = min(row[name], most), row["spread"] if name == "ours" else 0
                look = {"color": color, "label": name if i == 0 else None}
                axes.barh(i + offset, end, 0.34, xerr=spread, error_kw={"ecolor": RED}, **look)
                axes.text(end + spread, i + offset, f" {row[name]:.3f}", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [row["row"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel=label, xlim=(0.7, most * 1.05))
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    save_picture(path, figure, quick)
