"""The picture of a sweep: lines for one key, a heat map for two, bars for more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from partwise.runs.picture import INK, QUIET, RED, save_picture

MOST_BARS = 30


def draw_sweep(path: Path, result: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]) -> None:
    """Draw the metric of validation clients over the grid, with the spread over seeds. The best is marked."""
    keys = [key for key, values in grid.items() if len(values) > 1]
    draw = {1: _line, 2: _map}.get(len(keys), _bars)
    height = 3.8 if draw is not _bars else 1.4 + 0.3 * min(len(result["rows"]), MOST_BARS)
    figure = Figure(figsize=(6.5, height), layout="constrained")
    draw(figure.subplots(), result, keys, grid)
    seeds = len(result["rows"][0]["seeds"])
    told = "one seed" if seeds == 1 else f"mean of {seeds} seeds"
    figure.suptitle(
        f"{result['task']}: validation {result['metric']}, {told} ({result['better']} is better)", fontsize=10
    )
    save_picture(path, figure)


def _line(
    axes: Axes, result: Mapping[str, Any], keys: Sequence[str], grid: Mapping[str, Sequence[Any]]
) -> None:
    key = keys[0]
    rows = {str(row["settings"][key]): row for row in result["rows"]}
    places, labels = _places(grid[key])
    found = [rows[str(value)]["validation"] for value in grid[key]]
    order = np.argsort(places)
    mean = np.array([_number(each["mean"]) for each in found])
    spread = np.array([each["spread"] or 0.0 for each in found])
    axes.errorbar(places[order], mean[order], spread[order], color=INK, marker="o", markersize=4, capsize=3)
    for place, each in zip(places, found, strict=True):
        values = [_number(value) for value in each["values"]]
        axes.plot([place] * len(values), values, ".", color=QUIET, markersize=3, zorder=1)
    best = next((i for i, v in enumerate(grid[key]) if str(v) == _best(result, key)), None)
    if best is not None:
        axes.plot(places[best], mean[best], "o", color=RED, label="best")
        axes.legend(frameon=False, fontsize=8)
    if labels is None:
        _logarithmic(axes, places)
    else:
        axes.set_xticks(places, labels)
    axes.set(xlabel=key, ylabel=f"validation {result['metric']}")


def _map(
    axes: Axes, result: Mapping[str, Any], keys: Sequence[str], grid: Mapping[str, Sequence[Any]]
) -> None:
    across, down = keys
    columns, lines = [str(v) for v in grid[across]], [str(v) for v in grid[down]]
    values = np.full((len(lines), len(columns)), np.nan)
    failed = np.zeros(values.shape, int)
    for row in result["rows"]:
        place = lines.index(str(row["settings"][down])), columns.index(str(row["settings"][across]))
        values[place], failed[place] = _number(row["validation"]["mean"]), len(row["failed"])
    colors = "Blues" if result["better"] == "higher" else "Blues_r"
    shown = axes.imshow(np.ma.masked_invalid(values), cmap=colors, aspect="auto")
    axes.set_facecolor("#e6e6e6")
    middle = np.nanmean([np.nanmin(values), np.nanmax(values)]) if np.isfinite(values).any() else 0.0
    for (line, column), value in np.ndenumerate(values):
        told = "failed" if failed[line, column] else f"{value:.4g}" if np.isfinite(value) else "undefined"
        dark = np.isfinite(value) and (value > middle) == (colors == "Blues")
        color = "white" if dark else "black"
        axes.text(column, line, told, ha="center", va="center", fontsize=8, color=color)
    best = (_best(result, across), _best(result, down))
    if None not in best:
        corner = columns.index(str(best[0])) - 0.5, lines.index(str(best[1])) - 0.5
        axes.add_patch(_frame(corner))
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(lines)), lines)
    axes.set(xlabel=across, ylabel=down)
    if np.isfinite(values).any():
        axes.figure.colorbar(shown, ax=axes)


def _bars(
    axes: Axes, result: Mapping[str, Any], keys: Sequence[str], grid: Mapping[str, Sequence[Any]]
) -> None:
    """The best sets of settings, one bar for each."""
    rows = result["rows"][:MOST_BARS]
    mean = [_number(row["validation"]["mean"]) for row in rows]
    axes.errorbar(
        mean,
        range(len(rows)),
        xerr=[row["validation"]["spread"] or 0.0 for row in rows],
        fmt="o",
        color=INK,
        capsize=3,
    )
    names = [
        ", ".join(f"{key}={row['settings'][key]}" for key in keys) or "settings of the task" for row in rows
    ]
    told = [f"{name} (failed)" if row["failed"] else name for name, row in zip(names, rows, strict=True)]
    axes.set_yticks(range(len(rows)), told, fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel=f"validation {result['metric']}")


def _places(values: Sequence[Any]) -> tuple[np.ndarray, list[str] | None]:
    """Where values are on an axis: numbers at their places, words side by side with labels."""
    try:
        return np.array([float(value) for value in values]), None
    except (TypeError, ValueError):
        return np.arange(len(values), dtype=float), [str(value) for value in values]


def _logarithmic(axes: Axes, places: np.ndarray) -> None:
    """A logarithmic scale with the values as its marks, if they are positive and far apart."""
    if places.min() > 0 and places.max() >= 5 * places.min():
        axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()


def _frame(corner: tuple[float, float]) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, 1, 1, fill=False, edgecolor=RED, linewidth=2)


def _best(result: Mapping[str, Any], key: str) -> str | None:
    return str(result["best"]["settings"][key]) if result["best"] else None


def _number(value: float | None) -> float:
    return np.nan if value is None else value
