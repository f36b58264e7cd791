"""Runs side by side: their test metrics over seeds, what differs in their settings, and by how much.

Runs that differ in the seed alone are one row. Only the files of the runs are read; no task, no data and no JAX.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from partwise.checkpoint import save_json
from partwise.runs.document import to_plain
from partwise.runs.lock import check_place
from partwise.runs.run_view import RunView, read_runs, whole
from partwise.runs.seed_groups import group_over_seeds, is_compared
from partwise.runs.series import main_metric
from partwise.runs.significance import Difference, difference, holm
from partwise.runs.sweep_result import spread_of
from partwise.types import UserError, counted, unknown

LONGEST_NAME = 80  # characters of a row's name


class Compared(NamedTuple):
    """Runs that were compared.

    Attributes:
        result: The rows, the settings that differ, the differences of the metric, and notes. The content of
            compare.json.
        runs: The runs of every row.
    """

    result: Mapping[str, Any]
    runs: list[list[RunView]]

    def __repr__(self) -> str:
        return f"Compared({counted(len(self.rows), 'row')} by test {self.result['metric']})"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every row: its name, seeds, test metrics (mean, spread, values), rounds, seconds and bytes."""
        return self.result["rows"]

    @property
    def settings(self) -> Mapping[str, list[Any]]:
        """The settings that differ: {dotted key: value in every row}."""
        return self.result["settings"]

    @property
    def differences(self) -> list[dict[str, Any]]:
        """How every other row differs from the first in the metric, with a 95 % interval over seeds."""
        return self.result["differences"]


def compare(
    runs: Sequence[str | Path] | str | Path, *, metric: str | None = None, out: str | Path | None = None
) -> Compared:
    """Compare runs, by their files alone.

    Args:
        runs: Folders of runs. The folder of a sweep stands for all its runs.
        metric: The metric of test clients of which differences are told (default: the model's first).
        out: A folder for compare.png and compare.json. Without it, nothing is written.

    Returns:
        A row for every set of settings, with mean and spread over its seeds.

    Raises:
        UserError: A folder holds no run, a file is damaged, or no run has the metric.
    """
    found = read_runs([runs] if isinstance(runs, str | os.PathLike) else runs)
    rows = group_over_seeds(map(whole, found))
    metric = _metric(rows, metric)
    names = _names(rows)
    told = [_row(name, each) for name, each in zip(names, rows, strict=True)]
    result = {
        "metric": metric,
        "rows": told,
        "settings": _differing([each[0].settings for each in rows]),
        "differences": _differences(names, rows, metric),
        "notes": _notes(names, rows),
    }
    compared = Compared(to_plain(result), rows)
    if out is not None:
        _write(compared, check_place(out))
    return compared


def _write(compared: Compared, out: Path) -> None:
    from partwise.runs.compare_picture import draw_comparison

    save_json(out / "compare.json", dict(compared.result))
    draw_comparison(out / "compare.png", compared)


def _metric(rows: Sequence[Sequence[RunView]], metric: str | None) -> str:
    """The metric, or the first that a run has. Raises `UserError` if no run has it."""
    known = list(dict.fromkeys(name for row in rows for run in row for name in _judged_by(run)))
    if not known:
        failed = [f"'{run.path}' {_state(run)}" for row in rows for run in row if run.failed]
        raise UserError(
            f"none of these runs has been evaluated yet: {'; '.join(failed)}"
            if failed
            else "none of these runs has been evaluated yet: wait until one has, or go on with --resume"
        )
    if metric is not None and metric not in known:
        raise unknown("metric", metric, known)
    return metric or main_metric(known)


def _judged_by(run: RunView) -> Iterable[str]:
    """The metrics of the test clients; of a run that has not ended, the last ones of the validation clients."""
    if run.summary:
        return run.summary["test"]["over_clients"]
    return run.series.looks[-1].metrics if run.series.looks else ()


def _names(rows: Sequence[Sequence[RunView]]) -> list[str]:
    """Names of the rows: the settings that differ if they are few, otherwise folders."""
    settings = _differing([row[0].settings for row in rows])
    if 0 < len(settings) <= 3:
        told = [", ".join(f"{k}={v[i]}" for k, v in settings.items()) for i in range(len(rows))]
        if len(set(told)) == len(rows) and max(map(len, told)) <= LONGEST_NAME:
            return told
    return [str(row[0].path) for row in rows]


def _row(name: str, runs: Sequence[RunView]) -> dict[str, Any]:
    summaries = [run.summary for run in runs if run.summary]
    tested = list(dict.fromkeys(name for each in summaries for name in each["test"]["over_clients"]))
    mean = lambda values: statistics.fmean(values) if values and None not in values else None
    every = lambda key: mean([each.get(key) for each in summaries])
    return {
        "name": name,
        "runs": [str(run.path) for run in runs],
        "seeds": [run.seed for run in runs if run.summary],
        "unfinished": {str(run.path): _state(run) for run in runs if not run.summary},
        "task": runs[0].settings.get("task"),
        "algorithm": runs[0].settings.get("algorithm"),
        "test": {key: spread_of([each["test"].get(key) for each in summaries]) for key in tested},
        "rounds": every("rounds"),
        "seconds": every("seconds_total"),
        "seconds_per_round": every("seconds_per_round"),
        "bytes_down_per_client": every("bytes_down_per_client"),
        "bytes_up_per_client": every("bytes_up_per_client"),
    }


def _state(run: RunView) -> str:
    """Why a run has no test metrics."""
    done = f"round {run.series.done:,} of {run.rounds:,}"
    if run.failed:
        return f"failed ({run.failed})"
    return f"has ended without a test ({done})" if run.ended else f"has not ended ({done})"


def _differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """{key: values} of the keys whose values are not all the same; None where there is no such key."""
    keys = dict.fromkeys(key for each in settings for key in each if is_compared(key))
    values = {key: [each.get(key) for each in settings] for key in keys}
    return {key: found for key, found in values.items() if len(set(map(str, found))) > 1}


def _differences(
    names: Sequence[str], rows: Sequence[Sequence[RunView]], metric: str
) -> list[dict[str, Any]]:
    """Every other row against the first. With several, p values are corrected for their number."""
    by_seed = [{run.seed: run.summary["test"].get(metric) for run in row if run.summary} for row in rows]
    found = []
    for row, values in zip(rows[1:], by_seed[1:], strict=True):
        same = _tested_on(row[0]) == _tested_on(rows[0][0])
        why = "the test clients are not the same"
        found.append(difference(by_seed[0], values) if same else Difference(None, why=why))
    corrected = holm([each.p for each in found])
    return [
        {"row": name, **each._replace(p=p)._asdict()}
        for name, each, p in zip(names[1:], found, corrected, strict=True)
    ]


def _tested_on(run: RunView) -> Any:
    """The fingerprint of the test clients, and how they were judged."""
    data = run.begun.get("data") or {}
    test = data.get("test", {})
    return [test.get(name) for name in ("clients", "examples", "ids", "sizes")]


def _notes(names: Sequence[str], rows: Sequence[Sequence[RunView]]) -> list[str]:
    notes = []
    if len({run.settings.get("task") for row in rows for run in row}) > 1:
        notes.append(
            "the runs are of different tasks, so a metric of the same name may not be the same thing"
        )
    if len({str(_tested_on(run)) for row in rows for run in row}) > 1:
        notes.append("the runs were tested on different clients")
    beside = [run.summary.get("side_by_side", 1) for row in rows for run in row if run.summary]
    if any(number > 1 for number in beside):
        notes.append("some runs were trained side by side, and their seconds are a share of those of all")
    judged = {str(run.summary["test"].get("judged")) for row in rows for run in row if run.summary}
    if len(judged) > 1:
        notes.append("the test clients were judged in different ways (summary.json, test.judged)")
    if len(rows) > 2:
        notes.append("p values are corrected for the number of comparisons (Holm); intervals are not")
    if any(len(row) > 1 for row in rows):
        notes.append("seeds change the training, not the data: intervals say nothing about other clients")
    return notes
