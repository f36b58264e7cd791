"""The picture of `partwise privacy`: bytes of the options, and private retrieval against broadcast."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from partwise.runs.picture import INK, QUIET, RED, save_picture

LIGHT = "#9db8d2"
BYTES = ("bytes_down", "bytes_up")


def draw_options(path: Path, told: Mapping[str, Any]) -> None:
    """Bars of bytes for every option, and for every key space a curve over the most keys of a client."""
    spaces = told["crossings"]
    figure = Figure(figsize=(5.4 + 4.2 * len(spaces), 3.4), layout="constrained")
    ratios = [1.3, *(1.0 for _ in spaces)]
    (bars, *curves) = figure.subplots(1, 1 + len(spaces), squeeze=False, width_ratios=ratios)[0]
    _draw_bars(bars, told["options"])
    for axes, crossing in zip(curves, spaces, strict=True):
        _draw_curve(axes, crossing)
    figure.suptitle(f"{told['task']}: bytes per client and round", fontsize=10)
    save_picture(path, figure)


def _draw_bars(axes: Axes, options: list[Mapping[str, Any]]) -> None:
    for place, option in enumerate(options):
        for shift, name, color in ((-0.2, "bytes_down", INK), (0.2, "bytes_up", LIGHT)):
            axes.barh(
                place + shift, option[name], 0.38, color=color, label=_label(name) if not place else None
            )
            axes.text(option[name], place + shift, f" {size_words(option[name])}", va="center", fontsize=7)
    axes.set_yticks(
        range(len(options)), [option["name"].replace(", ", ",\n") for option in options], fontsize=8
    )
    axes.invert_yaxis()
    axes.set(xscale="log")
    least, most = (choose(o[name] for o in options for name in BYTES) for choose in (min, max))
    axes.set_xlim(10 ** math.floor(math.log10(max(least, 1)) - 0.1), 4 * most)  # room for the words
    _name_sizes(axes.xaxis)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=2, frameon=False)


def _label(name: str) -> str:
    return name.removeprefix("bytes_")


def _draw_curve(axes: Axes, crossing: Mapping[str, Any]) -> None:
    curve = crossing["curve"]
    axes.plot(
        [each["most"] for each in curve],
        [each["bytes"] for each in curve],
        color=INK,
        label="private retrieval",
    )
    axes.axhline(crossing["broadcast"], color=RED, linestyle="--", linewidth=1, label="broadcast of all rows")
    axes.axvline(
        crossing["most"], color=QUIET, linewidth=0.8, linestyle=":", label=f"here: {crossing['most']:,}"
    )
    if crossing["private_up_to"]:
        at = crossing["private_up_to"], crossing["broadcast"]
        axes.plot(*([each] for each in at), "o", color=RED, markersize=4)
        axes.annotate(f"{at[0]:,} ", at, ha="right", va="bottom", fontsize=8, color=RED)
    words = f"the most keys of '{crossing['space']}' of a client, of {crossing['keys']:,}"
    axes.set(xscale="log", yscale="log", xlabel=words, ylabel="down and up together")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    _name_sizes(axes.yaxis)
    axes.legend(fontsize=7)


def _name_sizes(axis: Axis) -> None:
    axis.set_major_formatter(lambda value, place: size_words(value))
    axis.set_minor_formatter(NullFormatter())


def size_words(number: float) -> str:
    """Bytes in words."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"
