"""What stands behind the results of runs: heat, the promise to clients, settings, versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partwise.pages.chart_figure import chart_grid
from partwise.pages.charts import Chart
from partwise.pages.numbers import brief, number, part, plain_table, section, swatch, text
from partwise.pages.run_groups import Group
from partwise.runs.seed_groups import ALONE
from partwise.types import counted

NOT_SET = "-"


def heat(groups: Sequence[Group], charts: Sequence[Chart], task: str) -> str:
    """How many clients hold each key."""
    return section("heat", "Heat", chart_grid(charts, groups), task=task)


def privacy(groups: Sequence[Group], charts: Sequence[Chart]) -> str:
    """What clients are promised, what it rests on, and what it is made of."""
    promised = [(group, group.first.summary.get("privacy")) for group in groups]
    told = "".join(_promise(group, each) for group, each in promised if each)
    return section("privacy", "Privacy", chart_grid(charts, groups) + (part("promise", told) if told else ""))


def _promise(group: Group, told: Mapping[str, Any]) -> str:
    warned = "<b>Simulated: nobody is protected.</b> " if told.get("simulated") else ""
    rests = "".join(f"<li>{text(each)}</li>" for each in told.get("rests_on", ()))
    heat = f"<p>Heat: {text(told['heat'])}.</p>" if told.get("heat") else ""
    unit, relation, uncovered = (text(told.get(name, "")) for name in ("unit", "relation", "not_covered"))
    return (
        f'<div class="promise"><h3>{swatch(group.place)} {text(group.label)}</h3><p>{warned}Epsilon '
        f"<b>{number(told.get('epsilon'))}</b> at delta <b>{brief(told.get('delta'))}</b> for {unit} ({relation}), "
        f"if</p><ul>{rests}</ul>{heat}<p>Not covered: {uncovered}.</p>{_ledger(group, told)}</div>"
    )


def _ledger(group: Group, told: Mapping[str, Any]) -> str:
    rows = [
        [
            text(entry.get("what", "")),
            number(entry.get("epsilon_alone")),
            brief(entry.get("noise")),
            text(entry.get("mechanism", "")),
        ]
        for entry in told.get("ledger", ())
    ]
    caption = f"Ledger of {text(group.label)}: what is released, and what it would cost alone"
    return plain_table(caption, ["what", "epsilon alone", "noise", "mechanism"], rows, "words")


def settings(groups: Sequence[Group]) -> str:
    """Settings in which the trainings differ, then all of them, folded."""
    known = [group.first.settings for group in groups]
    keys = list(dict.fromkeys(key for each in known for key in each if key not in ALONE))
    differ = [key for key in keys if len({str(each.get(key, NOT_SET)) for each in known}) > 1]
    head = ["setting", *(f"{swatch(group.place)} {text(group.label)}" for group in groups)]
    row = lambda key: [f"<code>{text(key)}</code>", *(text(each.get(key, NOT_SET)) for each in known)]
    table = lambda caption, chosen: plain_table(caption, head, [row(key) for key in chosen], "words")
    first = table("Settings in which the runs differ", differ) if differ else ""
    folded = f"<details><summary>All {len(keys)} settings</summary>{table('All settings', keys)}</details>"
    return section("settings", "Settings", f"{first}{_seeds(groups)}{folded if keys else ''}")


def _seeds(groups: Sequence[Group]) -> str:
    named = [
        f"{text(group.label)}: {', '.join(text(run.settings.get('seed', NOT_SET)) for run in group.runs)}"
        for group in groups
        if group.first.settings
    ]
    return f'<p class="about">Seeds of {"; of ".join(named)}.</p>' if named else ""


def versions(groups: Sequence[Group]) -> str:
    """What the results may depend on besides settings."""
    runs = [run for group in groups for run in group.runs if run.summary.get("versions")]
    names = list(dict.fromkeys(name for run in runs for name in run.summary["versions"]))
    rows = [
        [
            text(run.name),
            text(run.summary.get("device", "")),
            *(text(run.summary["versions"].get(name, NOT_SET)) for name in names),
        ]
        for run in runs
    ]
    table = plain_table("What the runs were made with", ["run", "device", *map(text, names)], rows, "words")
    folded = (
        f"<details><summary>Versions and devices of {counted(len(runs), 'run')}</summary>{table}</details>"
    )
    return section("versions", "Versions", folded if runs else "")
