"""The picture of `partwise fleet`: a day of a fleet, how stale reports are, bytes, and what the model learned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from partwise.runs.picture import INK, QUIET, RED, save_picture

LIGHT = "#9db8d2"
PARTS = (("bytes_from_server", "from the server", INK), ("bytes_to_server", "to the server", LIGHT))
UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6))
CDN = ("bytes_from_cdn", "from the CDN", QUIET)


def draw_fleet(path: Path, result: Mapping[str, Any]) -> None:
    """Versions and devices by the hour, staleness, bytes by the hour, and the metric by the hour if trained."""
    trained = result.get("trained")
    figure = Figure(figsize=(13 if trained else 10.5, 3.3), layout="constrained")
    axes = figure.subplots(1, 4 if trained else 3)
    _draw_day(axes[0], result)
    _draw_staleness(axes[1], result)
    _draw_bytes(axes[2], result)
    if trained:
        _draw_learning(axes[3], trained)
    figure.suptitle(_title(result), fontsize=10)
    save_picture(path, figure)


def _title(result: Mapping[str, Any]) -> str:
    rules, day = result["rules"], result["per_day"]
    how = (
        f"a buffer of {rules['buffer']:,}, {rules['concurrency']:,} tasks at a time"
        if result["mode"] == "buffer"
        else f"rounds of {rules['cohort']:,}"
    )
    made_up = " (made-up devices)" if result["trace"] == "synthetic" else ""
    return (
        f"{result['task']}, {result['devices']:,} devices{made_up}, {how}: {day['versions']:,.0f} versions and "
        f"{day['used']:,.0f} used reports a day"
    )


def _draw_day(axes: Axes, result: Mapping[str, Any]) -> None:
    hours = [line["hour"] for line in result["by_hour"]]
    axes.bar(hours, [line["versions"] for line in result["by_hour"]], 0.9, align="edge", color=LIGHT)
    axes.set(xlabel="hour (UTC)", ylabel="versions an hour")
    there = np.array(result["available_by_hour"])[np.array(hours) % 24]
    beside = axes.twinx()
    beside.plot(np.array(hours) + 0.5, there / result["devices"] * 100, color=INK, marker="o", markersize=2.5)
    beside.set_ylabel("devices available, % of all", color=INK)
    beside.set_ylim(0, 110 * there.max() / result["devices"])
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))


def _draw_staleness(axes: Axes, result: Mapping[str, Any]) -> None:
    """Shares of the used reports by age."""
    counts, found = np.array(result["staleness_counts"]), result["staleness"]
    axes.bar(range(len(counts)), counts / max(counts.sum(), 1) * 100, 0.9, color=LIGHT)
    for name, color in (("p50", INK), ("p99", RED)):
        axes.axvline(found[name], color=color, linewidth=1, linestyle="--", label=f"{name}: {found[name]:g}")
    axes.plot([], [], " ", label=f"mean: {found['mean']:.3g}")
    axes.set(xlabel="versions that a used report is old", ylabel="% of used reports")
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.legend(frameon=False, fontsize=8, loc="center right")


def _draw_bytes(axes: Axes, result: Mapping[str, Any]) -> None:
    lines = result["by_hour"]
    parts = (*PARTS, CDN) if result["caches"] else PARTS
    most = max(line[name] for line in lines for name, _, _ in parts)
    unit, size = next(((unit, size) for unit, size in UNITS if most >= size), UNITS[-1])
    for name, label, color in parts:
        axes.plot(
            [line["hour"] + 0.5 for line in lines],
            [line[name] / size for line in lines],
            color=color,
            marker="o",
            markersize=2.5,
            label=label,
        )
    axes.set(xlabel="hour (UTC)", ylabel=f"{unit} an hour")
    axes.set_ylim(0, 1.1 * most / size)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.legend(frameon=False, fontsize=8)


def _draw_learning(axes: Axes, trained: Mapping[str, Any]) -> None:
    curve, metric = trained["curve"], trained["metric"]
    values = [np.nan if each["value"] is None else each["value"] for each in curve]
    axes.plot([each["hours"] for each in curve], values, color=INK, marker="o", markersize=3)
    axes.set(xlabel="hours on the virtual clock", ylabel=f"validation {metric}")
    axes.set_xlim(0)
