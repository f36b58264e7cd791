"""What a sweep found: settings sorted by a metric of the validation clients, with the test clients beside it.

Settings are chosen by validation clients alone. The metrics of test clients are told, and choose nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partwise.runs.folder import Folder
from partwise.runs.run_view import RunView, read_run, whole
from partwise.runs.series import main_metric
from partwise.runs.sweep_plan import SweepCell, SweepPlan
from partwise.types import UserError, counted

CHOSEN_BY = "mean over seeds of the validation clients' metric at the end; test clients choose nothing"


def spread_of(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and standard deviation of values of several seeds; None where they cannot be told."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    whole = len(known) == len(values) > 0
    return {
        "mean": statistics.fmean(known) if whole else None,
        "spread": statistics.stdev(known) if whole and len(known) > 1 else None,
        "values": list(values),
    }


def result_of(plan: SweepPlan, out: Path) -> dict[str, Any]:
    """The content of sweep.json, except the plan: rows sorted by the metric, and the best of them."""
    cells = plan.cells()
    begun = [cell.name for cell in cells if (out / cell.name / "summary.json").exists()]
    read = {name: whole(read_run(out / name)) for name in begun}
    runs = {name: run for name, run in read.items() if run.summary}
    first = next((run.summary for run in runs.values() if run.summary), None)
    metric = plan.metric or (main_metric(first["test"]["over_clients"]) if first else "loss")
    higher = bool(first) and first["better"].get(metric) == "higher"
    groups = [cells[i : i + len(plan.seeds)] for i in range(0, len(cells), len(plan.seeds))]
    rows = [_row(group, runs, metric, out) for group in groups]
    rows.sort(key=lambda row: _rank(row["validation"]["mean"], higher))
    best = rows[0] if rows and rows[0]["validation"]["mean"] is not None else None
    return {
        "task": plan.task,
        "metric": metric,
        "better": "higher" if higher else "lower",
        "chosen_by": CHOSEN_BY,
        "rows": rows,
        "best": best and {"settings": best["settings"], "run": best["runs"][0]},
        "privacy": first and first.get("privacy"),
    }


def _rank(value: float | None, higher: bool) -> float:
    return math.inf if value is None else -value if higher else value


def _row(cells: Sequence[SweepCell], runs: Mapping[str, RunView], metric: str, out: Path) -> dict[str, Any]:
    """One set of settings, over its seeds."""
    ended = [runs[cell.name] for cell in cells if cell.name in runs]
    summaries = [run.summary for run in ended if run.summary]
    failed = {cell.name: Folder(out / cell.name).failure() for cell in cells if cell.name not in runs}
    missing = [None] * len(failed)
    tested = list(summaries[0]["test"]["over_clients"]) if summaries else []
    return {
        "settings": dict(cells[0].changes),
        "seeds": [cell.seed for cell in cells],
        "validation": spread_of([*(last_value(run, metric) for run in ended), *missing]),
        "test": {
            name: spread_of([*(each["test"].get(name) for each in summaries), *missing]) for name in tested
        },
        "rounds": max((each["rounds"] for each in summaries), default=None),
        "seconds": sum(each["seconds_total"] for each in summaries),
        "failed": {name: reason or "not run" for name, reason in failed.items()},
        "runs": [cell.name for cell in cells],
    }


def last_value(run: RunView, metric: str) -> float | None:
    """The metric of the validation clients at the last evaluation of a run."""
    return run.series.looks[-1].metrics.get(metric) if run.series.looks else None


def best_config(result: Mapping[str, Any], out: Path) -> str:
    """The content of best.toml: all settings of the best run with the first seed."""
    if result["best"] is None:
        raise UserError("no settings of the sweep ended with every seed, so there is no best")
    row, path = result["rows"][0], out / result["best"]["run"]
    told = (
        ", ".join(f"{key} = {value}" for key, value in row["settings"].items()) or "the task's own settings"
    )
    seeds, number = (
        counted(len(row["seeds"]), "seed"),
        counted(len(result["rows"]), "set of settings", "sets of settings"),
    )
    lines = [
        f"# The best of {number}, by validation {result['metric']}: {told}.",
        f"# Mean over {seeds}: {row['validation']['mean']:.6g}. Train with: partwise train --config best.toml",
    ]
    text = (path / "config.toml").read_text()
    return "\n".join([*lines, text[: text.rindex("#sha256")]])
