"""Pictures of runs and tables, as PNG files."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from partwise.checkpoint import write_file

INK, QUIET = "#1f4e79", "#8a8a8a"
QUICK = "quick check of the machinery, not the reproduction"


def learning_curve(path: Path, records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Training loss by round, and the main metric of the validation clients."""
    evaluated = [record for record in records if record["evaluation"]]
    metric = next(iter(set(summary["best"]) & set(summary["test"])), None) or _first_metric(summary["test"])
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([r["round"] for r in records], [r["train"]["loss"] for r in records], color=INK, linewidth=0.8)
    left.set(xlabel="round", ylabel="training loss", yscale="log")
    rounds, values = [r["round"] for r in evaluated], [_plotted(r["evaluation"][metric]) for r in evaluated]
    right.plot(rounds, values, color=INK, marker="o", markersize=3, label="validation clients")
    if summary["test"][metric] is not None:
        right.axhline(summary["test"][metric], color=QUIET, linewidth=0.8, label="test clients, at the end")
    if metric in summary["best"]:
        best = summary["best"][metric]
        right.axhline(best, color="#b03a2e", linestyle="--", label="best reachable on test clients")
    right.set(xlabel="round", ylabel=metric)
    right.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{summary['algorithm']} on {summary['task']}, seed {summary['seed']}", fontsize=10)
    save_picture(path, figure)


def _plotted(value: float | None) -> float:
    """A metric that is undefined leaves a gap."""
    return math.nan if value is None else value


def _first_metric(test: Mapping[str, Any]) -> str:
    return next(name for name in test if name != "loss")


def save_picture(path: Path, figure: Figure, quick: bool = False) -> None:
    """A PNG, whole or not at all; a quick one says so."""
    if quick:
        figure.suptitle(QUICK, fontsize=10, color="#b03a2e")
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=130)
    write_file(path, data.getvalue())


def bars_beside(
    path: Path, rows: Sequence[Mapping[str, Any]], label: str, most: float, quick: bool = False
) -> None:
    """The paper's figures beside ours, a pair of bars a row; bars longer than `most` are cut and labelled."""
    figure = Figure(figsize=(7.5, 0.45 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    for i, row in enumerate(rows):
        for offset, name, color in ((-0.18, "paper", QUIET), (0.18, "ours", INK)):
            if row[name] is not None:
                axes.barh(i + offset, min(row[name], most), 0.34, color=color, label=name if i == 0 else None)
                axes.text(min(row[name], most), i + offset, f" {row[name]:.3f}", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [row["row"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel=label, xlim=(0.7, most * 1.05))
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    save_picture(path, figure, quick)
