"""Metrics of single clients for `partwise evaluate`: as a file, and how fairly they are spread."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from partwise.cli.show import out, say
from partwise.types import counted

COLUMNS = ("clients", "mean", "p50", "worst_tenth", "best_tenth", "gap")


def by_client(options: argparse.Namespace) -> dict[str, Any]:
    """The result of an evaluation with `fairness`; clients' metrics are written if --per-client names a file."""
    from partwise.config.settings import parse_assignments
    from partwise.runs.evaluation import judge_run
    from partwise.runs.per_client import check_file, fairness, parse_groups, write_clients

    if options.per_client:
        check_file(options.per_client)
    groups = parse_groups(options.group) if options.group else None
    changes = parse_assignments(options.set)
    judged = judge_run(options.run_folder, options.split, changes, options.data, options.task, options.model)
    table = judged.table(groups)
    if options.per_client:
        write_clients(options.per_client, table)
        if not options.json:
            say(f"The metrics of {counted(table.num_rows, 'client')} are in {options.per_client}.")
    return {**judged.metrics, "fairness": fairness(table), "per_client": options.per_client}


def show_fairness(told: Mapping[str, Any]) -> None:
    """The spread of every metric over clients, and over those of each group."""
    groups = {"all": told, **told.get("groups", {})}
    table = Table()
    for name in ("metric", "clients of", *COLUMNS):
        table.add_column(
            name.replace("_", " "), justify="left" if name in ("metric", "clients of") else "right"
        )
    for metric in (name for name in told if name not in ("groups", "group_gap")):
        for name, spreads in groups.items():
            table.add_row(metric, name, *(_cell(spreads[metric].get(column)) for column in COLUMNS))
    out.print(table)
    if "group_gap" in told:
        gaps = (f"{name} {_cell(gap)}" for name, gap in told["group_gap"].items())
        say(f"Between the best and the worst group's mean: {', '.join(gaps)}.")


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
