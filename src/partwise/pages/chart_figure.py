"""The place of a chart in the page: heading, tools, a table of its values. The page's script draws it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from partwise.pages.charts import Chart
from partwise.pages.numbers import number, part, plain_table, section, swatch, text
from partwise.pages.run_groups import Curve, Group
from partwise.types import counted

FIRST_CHARTS = 3  # shown at once; those of more metrics are folded
TOOLS = (("in", "Zoom in", "+"), ("out", "Zoom out", "&minus;"), ("all", "Show all", "&#x2922;"))
BANDS = "Lines are means over seeds, bands go from the smallest to the largest."
KEYS = "Arrow keys move from point to point, plus and minus zoom. The table below has the values."


def make_legend(groups: Sequence[Group]) -> str:
    """Buttons that show and hide groups in all charts."""
    if len(groups) < 2:
        return ""
    buttons = "".join(
        f'<button type="button" class="chip" data-group="{group.place}" aria-pressed="true">{swatch(group.place)}'
        f"<span>{text(group.label)}</span></button>"
        for group in groups
    )
    return f'<nav class="legend" aria-label="Runs that the charts show">{buttons}</nav>'


def chart_grid(charts: Sequence[Chart], groups: Sequence[Group]) -> str:
    """The places of charts; empty if there are none."""
    figures = "".join(chart_figure(chart, groups) for chart in charts)
    return f'<div class="grid">{figures}</div>' if figures else ""


def chart_figure(chart: Chart, groups: Sequence[Group]) -> str:
    """The place of a chart, and a table of what it shows."""
    title, about = text(chart.title), text(chart.about)
    tools = "".join(
        f'<button type="button" data-zoom="{what}" aria-label="{words}, {title}">{sign}</button>'
        for what, words, sign in TOOLS
    )
    values = part(f"values {chart.key}", _values(chart, groups))
    words = f'role="img" aria-label="{title}. {about} {KEYS}"'
    return (
        f'<figure class="chart" data-chart="{text(chart.key)}"><div class="head"><h3>{title}</h3>'
        f'<div class="tools">{tools}</div></div><div class="readout" aria-hidden="true"></div>'
        f'<div class="plot" tabindex="0" {words}></div>'
        f"<figcaption>{part(f'about {chart.key}', about)}</figcaption>"
        f"<details><summary>Values</summary>{values}</details></figure>"
    )


def _values(chart: Chart, groups: Sequence[Group]) -> str:
    """The table of a chart. Of many points, some."""
    xs, of = chart.rows()
    some = f", {len(xs)} of {of:,} points" if len(xs) < of else ""
    places = {place: {x: at for at, x in enumerate(curve.x)} for place, curve in chart.curves.items()}
    rows = [
        [f"{x:,.6g}", *(_point(curve, places[place].get(x)) for place, curve in chart.curves.items())]
        for x in xs
    ]
    labels = {group.place: group.label for group in groups}
    head = [text(chart.x), *(text(labels[place]) for place in chart.curves)]
    return plain_table(f"{text(chart.title)}{some}", head, rows, "values")


def _point(curve: Curve, at: int | None) -> str:
    if at is None:
        return ""
    mean, low, high = curve.mean[at], curve.low[at], curve.high[at]
    if not math.isfinite(mean):
        return "not finite"
    return number(mean) if low == high else f"{number(mean)} <small>({number(low)} to {number(high)})</small>"


def learning(groups: Sequence[Group], charts: Sequence[Chart], task: str) -> str:
    """The curves. Those of further metrics are folded."""
    more = chart_grid(charts[FIRST_CHARTS:], groups)
    words = counted(len(charts) - FIRST_CHARTS, "more metric")
    folded = f'<details class="more"><summary>{words}</summary>{more}</details>' if more else ""
    several = any(len(group.runs) > 1 for group in groups)
    first = chart_grid(charts[:FIRST_CHARTS], groups)
    return section("learning", "Learning", first + folded, BANDS * several, task)
