"""A whole page as one file: no network, no scripts but its own."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from partwise import __version__
from partwise.pages import background, results
from partwise.pages import charts as drawing
from partwise.pages.chart_figure import learning, make_legend
from partwise.pages.charts import Chart
from partwise.pages.lead import make_lead, title_of
from partwise.pages.numbers import part, text
from partwise.pages.run_groups import Group, by_task, group_runs
from partwise.runs.run_view import RunView

STYLES = ("vendor/uPlot.min.css", "assets/page.css")
CHARTS, LICENCE, OWN = "vendor/uPlot.iife.min.js", "vendor/LICENSE", "assets/page.js"
HEADER = (
    '<a class="skip" href="#main">Skip to the content</a><header><span class="brand">partwise</span><button '
    'type="button" id="theme">Dark</button></header>'
)


class View(NamedTuple):
    """What a page shows at a moment: the HTML of its main part, and the data of its charts."""

    title: str
    main: str
    data: dict[str, Any]


def make_view(runs: Sequence[RunView], strip: str = "") -> View:
    """The view of runs. `strip` is HTML about what is going on, below the first sentence."""
    groups = group_runs(runs)
    tasks, epsilon = by_task(groups), drawing.privacy_chart(groups)
    told = [_of_task(each, task if len(tasks) > 1 else "") for task, each in tasks.items()]
    private = [epsilon.drawn()] if epsilon else []
    main = (
        f'<section id="lead" aria-label="Summary">{part("lead", make_lead(groups, bool(strip)))}{strip}</section>',
        make_legend(groups),
        *(html for html, _ in told),
        background.privacy(groups, private),
        background.settings(groups),
        background.versions(groups),
    )
    names = [{"label": group.label, "seeds": len(group.runs)} for group in groups]
    charts = [chart.told() for chart in (*(chart for _, charts in told for chart in charts), *private)]
    return View(title_of(groups), "".join(main), {"groups": names, "charts": charts})


def _of_task(groups: Sequence[Group], task: str) -> tuple[str, list[Chart]]:
    """The sections about trainings of one task, and their charts. `task` is named if there are several."""
    key = lambda chart: f"{chart.key}-{task}" if task else chart.key
    charts = {
        name: [chart.drawn()._replace(key=key(chart)) for chart in found]
        for name, found in _charts(groups).items()
    }
    sections = (
        learning(groups, charts["learning"], task),
        results.tests(groups, task),
        results.over_clients(groups, charts["clients"], task),
        results.costs(groups, charts["costs"], task),
        background.heat(groups, charts["heat"], task),
    )
    return "".join(sections), [chart for found in charts.values() for chart in found]


def _charts(groups: Sequence[Group]) -> dict[str, list[Chart]]:
    """The charts of every section. The main metric comes first, then the training loss, then other metrics."""
    main, *others = drawing.validation_charts(groups) or [None]
    given = lambda *charts: [chart for chart in charts if chart]
    return {
        "learning": given(main, drawing.training_chart(groups), *others),
        "clients": drawing.clients_charts(groups),
        "costs": given(drawing.bytes_chart(groups)),
        "heat": drawing.heat_charts(groups),
    }


def make_page(view: View, feed: str = "") -> str:
    """The page as HTML. With `feed`, the address of what is new, it is a live page."""
    styles, scripts = "".join(map(asset, STYLES)), [f"/*! {asset(LICENCE)} */\n" + asset(CHARTS), asset(OWN)]
    policy = content_policy(styles, scripts, bool(feed))
    live = f' data-feed="{text(feed)}"' if feed else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width='
        f'device-width, initial-scale=1"><meta http-equiv="Content-Security-Policy" content="{policy}"><meta '
        f'name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer"><title>'
        f"{text(view.title)} &middot; partwise</title><style>{styles}</style></head><body{live}>{HEADER}"
        f'<main id="main" tabindex="-1">{view.main}</main><footer>Made by partwise {text(__version__)} from the '
        f"files of the runs. Nothing on this page is fetched from elsewhere.</footer>"
        f'<script type="application/json" id="data">{_embedded(view.data)}</script>'
        f"{''.join(f'<script>{each}</script>' for each in scripts)}"
        f"</body></html>\n"
    )


def content_policy(styles: str, scripts: Sequence[str], live: bool) -> str:
    """What the browser may run and fetch: these scripts and styles, and of a live page what its server says."""
    digest = lambda code: f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
    connect = "connect-src 'self'; " if live else ""
    return (
        f"default-src 'none'; script-src {' '.join(map(digest, scripts))}; style-src {digest(styles)}; {connect}"
        f"img-src data:; base-uri 'none'; form-action 'none'"
    )


def _embedded(data: dict[str, Any]) -> str:
    """JSON that cannot end the element that it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


@cache
def asset(name: str) -> str:
    """A file that comes with this package."""
    return (resources.files("partwise.pages") / name).read_text(encoding="utf-8")
