"""How a metric differs between test clients: a strip for each run, from the 5th to the 95th percentile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partwise.pages.numbers import number, plain_table, swatch, text
from partwise.pages.run_groups import Group, metric_names, spread_of

PERCENTILES = ("p5", "p25", "p50", "p75", "p95")
READ = (
    "Line: from the 5th to the 95th percentile of the clients. Box: the middle half. Tick: median. Dot: mean."
)
Row = tuple[Group, Mapping[str, float]]
WORDS = ("5 %", "25 %", "median", "75 %", "95 %", "mean")


def spread_strips(groups: Sequence[Group]) -> str:
    """A strip for each run and metric, and a table of the same numbers."""
    names = metric_names(run for group in groups for run in group.runs)
    found = {name: _of_metric(groups, name) for name in names}
    figures = "".join(_figure(name, rows) for name, rows in found.items() if rows)
    return f'<div class="grid small">{figures}</div>' if figures else ""


def _of_metric(groups: Sequence[Group], metric: str) -> list[Row]:
    """Percentiles by group, as means over its runs."""
    rows = []
    for group in groups:
        told = [run.summary.get("test", {}).get("over_clients", {}).get(metric, {}) for run in group.runs]
        means = {name: spread_of(each.get(name) for each in told) for name in (*PERCENTILES, "mean")}
        if all(means.values()):
            rows.append((group, {name: each.mean for name, each in means.items() if each}))
    return rows


def _figure(metric: str, rows: Sequence[Row]) -> str:
    low = min(row["p5"] for _, row in rows)
    high = max(row["p95"] for _, row in rows)
    margin = 0.04 * (high - low) or 1.0
    scale = lambda value: 100 * (value - low + margin) / (high - low + 2 * margin)
    scaled = lambda row: {name: scale(value) for name, value in row.items()}
    strips = "".join(
        f'<li><span class="name">{swatch(group.place)} {text(group.label)}</span><span class="number">median '
        f"{number(row['p50'])}</span>{_strip(group.place, scaled(row))}</li>"
        for group, row in rows
    )
    cells = [
        [text(group.label), *(number(row[name]) for name in (*PERCENTILES, "mean"))] for group, row in rows
    ]
    table = plain_table(f"{text(metric)} over test clients", ["run", *WORDS], cells)
    ends = f'<div class="ends"><span>{number(low)}</span><span>{number(high)}</span></div>'
    return (
        f'<figure class="strips"><h3>{text(metric)}</h3><ul>{strips}</ul>{ends}'
        f"<details><summary>Values</summary>{table}</details></figure>"
    )


def _strip(place: int, at: Mapping[str, float]) -> str:
    """A box with whiskers. Places are in percent of the width, so that nothing is stretched."""
    width = at["p75"] - at["p25"]
    return (
        f'<svg class="strip c{place % 8}" width="100%" height="26" aria-hidden="true">'
        f'<line class="whisker" x1="{at["p5"]:.2f}%" x2="{at["p95"]:.2f}%" y1="13" y2="13"/>'
        f'<line class="whisker" x1="{at["p5"]:.2f}%" x2="{at["p5"]:.2f}%" y1="8" y2="18"/>'
        f'<line class="whisker" x1="{at["p95"]:.2f}%" x2="{at["p95"]:.2f}%" y1="8" y2="18"/>'
        f'<rect x="{at["p25"]:.2f}%" y="4" width="{width:.2f}%" height="18" rx="3"/>'
        f'<line class="tick" x1="{at["p50"]:.2f}%" x2="{at["p50"]:.2f}%" y1="4" y2="22"/>'
        f'<circle cx="{at["mean"]:.2f}%" cy="13" r="3"/></svg>'
    )
