"""What came of runs: metrics of the test clients beside others' figures, how clients differ, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from partwise.pages.chart_figure import chart_grid
from partwise.pages.charts import Chart
from partwise.pages.client_spread import READ, spread_strips
from partwise.pages.numbers import (
    duration,
    number,
    part,
    plain_table,
    section,
    size,
    spread,
    swatch,
    text,
    whole,
)
from partwise.pages.published import published_rows
from partwise.pages.run_groups import Group, metric_names, spread_of, test_metric

DEVIATION = "&plusmn; is the standard deviation between seeds. "
ALIGNED = '<small class="pm"></small>'  # where another row has a deviation
BORROWED = "The settings of a paper's row may differ from the run's."


def tests(groups: Sequence[Group], task: str) -> str:
    """Metrics of the test clients: ours, the best that can be reached, what papers report."""
    names = metric_names(run for group in groups for run in group.runs)
    names = [name for name in names if any(test_metric(group, name) for group in groups)]
    if not names:
        return ""
    rows = [
        [
            f"{swatch(group.place)} {text(group.label)}",
            str(len(group.runs)),
            *(_metric(group, name) for name in names),
        ]
        for group in groups
    ]
    best, published = _best(groups, names), _published(groups)
    others = best + [_row(f"paper: {text(row)}", dict(metrics), names) for _, row, metrics in published]
    caption = "Metrics of the test clients, over all their examples"
    several = DEVIATION if any(len(group.runs) > 1 for group in groups) else ""
    head, kind = ["run", "seeds", *map(text, names)], "deviations" if several else ""
    table = plain_table(caption, head, rows + others, kind, muted=len(others))
    sources = "; ".join(dict.fromkeys(text(source) for source, _, _ in published))
    cited = f" Published: {sources}. {BORROWED}" if sources else ""
    about = f'<p class="about">{several}{_judged(groups)}{cited}</p>'
    return section("tests", "Results", part(f"tests {task}", table + about), task=task)


def _metric(group: Group, name: str) -> str:
    found = test_metric(group, name)
    return spread(found) + ("" if found and found.deviation is not None else ALIGNED)


def _row(name: str, known: Mapping[str, float], names: Sequence[str]) -> list[str]:
    return [name, "", *(number(known[metric]) + ALIGNED if metric in known else "" for metric in names)]


def _best(groups: Sequence[Group], names: Sequence[str]) -> list[list[str]]:
    """The best that any method can reach, if it is known. With other options of the data, it may be another."""
    found: dict[str, Group] = {}
    for group in groups:
        if group.first.summary.get("best"):
            found.setdefault(str(group.first.summary["best"]), group)
    of = lambda group: f" for {text(group.label)}" if len(found) > 1 else ""
    return [
        _row(f"best reachable{of(group)}", group.first.summary["best"], names) for group in found.values()
    ]


def _published(groups: Sequence[Group]) -> list[tuple[str, str, Any]]:
    """(source, row, metrics) of what papers report for these tasks, each once."""
    rows = [row for group in groups for row in published_rows(group.first.settings)]
    return list(dict.fromkeys((each.source, each.row, tuple(each.metrics.items())) for each in rows))


def _judged(groups: Sequence[Group]) -> str:
    """How the test clients were judged, if all were in the same way."""
    ways = [group.first.summary.get("test", {}).get("judged") for group in groups]
    known = [way for way in ways if way]
    if not known or any(way != known[0] for way in known):
        return ""
    clients, local, others = (text(known[0].get(name, "?")) for name in ("clients", "local", "others"))
    rebuilt = "" if local == "none" else f" Local parameters: {local}."
    return f"Evaluated on {clients} clients.{rebuilt} Other parameters: {others}."


def over_clients(groups: Sequence[Group], charts: Sequence[Chart], task: str) -> str:
    """How a metric differs between the test clients."""
    strips = spread_strips(groups)
    inside = (part(f"clients {task}", strips) if strips else "") + chart_grid(charts, groups)
    return section("clients", "Over clients", inside, READ if strips else "", task)


def costs(groups: Sequence[Group], charts: Sequence[Chart], task: str) -> str:
    """Bytes against the metric, and what the runs took; nothing before the first round."""
    rows = [_cost(group) for group in groups if any(run.series.rounds for run in group.runs)]
    if not rows:
        return ""
    head = ["run", "fetched", "sent", "in all", "a round", "whole run", "dropped out", "broken"]
    caption = (
        "What a client fetches and sends in a round; bytes of the whole run; time; clients that were lost"
    )
    table = part(f"costs {task}", plain_table(caption, head, rows))
    return section("costs", "Costs", chart_grid(charts, groups) + table, task=task)


def _total(counts: Sequence[int | None]) -> str:
    """The sum over the runs of a group."""
    told = [count for count in counts if count is not None]
    return whole(sum(told)) if len(told) == len(counts) else "not told"


def _cost(group: Group) -> list[str]:
    mean = lambda name: getattr(spread_of(run.summary.get(name) for run in group.runs), "mean", None)
    seconds = [value for run in group.runs for value in run.series.seconds if math.isfinite(value)]
    sent = [run.series.sent for run in group.runs if run.series.sent is not None]
    lost = [run.series.lost for run in group.runs]
    broken = [run.series.counts["broken"] for run in group.runs]
    return [
        f"{swatch(group.place)} {text(group.label)}",
        size(mean("bytes_down_per_client")),
        size(mean("bytes_up_per_client")),
        size(float(np.mean(sent))) if len(sent) == len(group.runs) else "not told",
        duration(float(np.median(seconds)) if seconds else None),
        duration(mean("seconds_total")),
        _total(lost),
        _total(broken),
    ]
