"""Comparisons and sweeps, in tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from partwise.cli.show import out, say
from partwise.types import counted

MOST_ROWS = 40
METRICS = 3  # in the first table of a comparison; the others are in a second, or 80 characters would not do


def sweep(result: Mapping[str, Any], folder: Path) -> None:
    """The rows of a sweep, the best first, and where it is."""
    rows, metric = result["rows"], result["metric"]
    keys = list(rows[0]["settings"])
    tested = list(dict.fromkeys(name for row in rows for name in row["test"]))
    number = counted(len(rows), "set of settings", "sets of settings")
    title = f"{result['task']}: {number}, {result['better']} {metric} first"
    table = _table(title, keys, [f"validation {metric}", *(f"test {name}" for name in tested), "seeds"])
    for column in table.columns[: len(keys)]:
        column.no_wrap = len(keys) <= 3
    for row in rows[:MOST_ROWS]:
        test = [told_spread(row["test"].get(name)) for name in tested]
        values = [str(row["settings"][key]) for key in keys]
        table.add_row(*map(Text, values), told_spread(row["validation"]), *test, _seeds(row))
    out.print(table)
    if len(rows) > MOST_ROWS:
        say(f"{len(rows) - MOST_ROWS} more rows are in sweep.json.")
    for row in rows:
        for name, reason in row["failed"].items():
            say(f"{name} failed: {reason}")
    say(
        "Mean ± standard deviation over seeds. Settings are chosen by validation clients; test clients choose "
        "nothing."
    )
    if result["best"] is None:
        say("No settings ended with every seed, so there is no best.")
        return
    if result["privacy"]:
        say(_private(result["privacy"]))
    say(
        f"Recorded in {folder} (sweep.json, sweep.png, best.toml). Train the best with: partwise train --config "
        f"{folder / 'best.toml'}"
    )


def _private(privacy: Mapping[str, Any]) -> str:
    return (
        f"All runs of the sweep together: epsilon {privacy['epsilon']:.3g} at delta {privacy['delta']:.1e}. A "
        f"run of best.toml costs its clients more."
    )


def _seeds(row: Mapping[str, Any]) -> str:
    total, failed = len(row["seeds"]), len(row["failed"])
    return f"{total} ({failed} failed)" if failed else str(total)


def told_spread(value: Mapping[str, Any] | None) -> str:
    """Mean and spread in words."""
    if value is None or value["mean"] is None:
        return "-"
    return f"{value['mean']:.4f}" + (f" ±{value['spread']:.4f}" if value["spread"] is not None else "")


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def comparison(result: Mapping[str, Any], folder: str | None) -> None:
    """Rows, what differs in their settings, and the differences of their metric."""
    rows = result["rows"]
    tested = list(dict.fromkeys(name for row in rows for name in row["test"]))
    for number, row in enumerate(rows, 1):
        say(f"{number}: {row['name']}")
        for run, state in row["unfinished"].items():
            say(f"   {run} {state}")
    _print_metrics(rows, tested[:METRICS], costs=True)
    if tested[METRICS:]:
        _print_metrics(rows, tested[METRICS:], costs=False)
    say("s: seconds of one run. kB: what a client fetched and sent in a round.")
    _settings(result)
    _differences(result)
    for note in result["notes"]:
        say(f"Note: {note}.")
    if folder:
        say(f"Picture and JSON are in {folder}.")


def _print_metrics(rows: Sequence[Mapping[str, Any]], metrics: Sequence[str], costs: bool) -> None:
    more = ["seeds", "rounds", "s", "kB"] if costs else []
    table = _table("test clients, mean ± standard deviation over seeds", ["row"], [*metrics, *more])
    for column in table.columns[1 + len(metrics) :]:
        column.no_wrap = True  # a metric and its spread can be in two lines
    for number, row in enumerate(rows, 1):
        told = [told_spread(row["test"].get(name)) for name in metrics]
        table.add_row(str(number), *told, *(_cells(row) if costs else []))
    out.print(table)


def _cells(row: Mapping[str, Any]) -> list[str]:
    number = lambda value, form: "-" if value is None else format(value, form)
    down, up = (row[f"bytes_{way}_per_client"] for way in ("down", "up"))
    moved = "-" if down is None or up is None else f"{down / 1e3:,.1f}+{up / 1e3:,.1f}"
    return [str(len(row["seeds"])), number(row["rounds"], ",.0f"), number(row["seconds"], ",.1f"), moved]


def _settings(result: Mapping[str, Any]) -> None:
    if not result["settings"]:
        say(
            "The settings are the same."
            if len(result["rows"]) > 1
            else "All runs have the same settings but the seed."
        )
        return
    table = _table("settings that differ", ["key", *(f"row {i + 1}" for i in range(len(result["rows"])))], [])
    for key, values in result["settings"].items():
        table.add_row(key, *(Text("-" if value is None else str(value)) for value in values))
    out.print(table)


def _differences(result: Mapping[str, Any]) -> None:
    if not result["differences"]:
        return
    for number, each in enumerate(result["differences"], 2):
        say(f"Row {number} minus row 1: test {result['metric']} {_told(each)}")


def _told(each: Mapping[str, Any]) -> str:
    if each["difference"] is None:
        return f"not compared: {each['why']}."
    told = f"{each['difference']:+.4f}"
    if each["low"] is None:
        return f"{told}; no interval: {each['why']}."
    p = "" if each["p"] is None or math.isnan(each["p"]) else f", p = {each['p']:.2g}"
    return f"{told}, 95 % interval {each['low']:+.4f} to {each['high']:+.4f}{p} ({each['method']})."
