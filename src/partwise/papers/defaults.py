"""Every algorithm with its default settings on the tasks that offer it, beside a baseline that learns no vectors.

A default is good if no seed diverges and the mean over seeds beats the baseline. What is compared by defaults must
not depend on which algorithm they were made for. Ratings have a reference in one place too.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from partwise.algorithms.registry import ALGORITHMS, prepare, settings_for
from partwise.client.split import Split
from partwise.config.parts import make_evaluation_split
from partwise.papers.baselines import biases, commonest_class, commonest_tags, least_squares, popularity
from partwise.papers.study import once, own_row
from partwise.runs.picture import save_picture
from partwise.runs.resolve import resolve
from partwise.runs.train import OnStatus, train
from partwise.tasks import Task
from partwise.types import RunWarning, UserError

BASELINE, REFERENCE = "baseline", "least squares"
WITHOUT_MODEL = ("count_heat",)


class ComparedTask(NamedTuple):
    """A task of the table: its metric, whether higher is better, and what it reaches without learned vectors.

    baseline: (task, split of an evaluated client) -> the metric on the test clients
    reference: the same for what is reached in one place, if there is such a reference
    """

    metric: str
    higher: bool
    baseline: Callable[[Task, Split], float]
    settings: Mapping[str, Any] = {}
    quick: Mapping[str, Any] = {}
    reference: Callable[[Task, Split], float] | None = None


SMALL = {"rounds": 10, "cohort.size": 5, "simulation.lanes": 5, "simulation.evaluate_every": 10}
FEW = {"data.num_clients": 60, "data.num_items": 30, "data.mean_examples": 14, "data.dim": 2}
RELEASE, SHORT = {"data.size": "100k"}, {"data.max_examples": 20}
TAGS = {"data.num_clients": 500, "data.num_words": 2000, "data.num_tags": 50, "rounds": 100}
TASKS: Mapping[str, ComparedTask] = {
    "planted": ComparedTask("rmse", False, biases, quick=SMALL | FEW, reference=least_squares),
    "movielens": ComparedTask("rmse", False, biases, RELEASE, SMALL | SHORT, least_squares),
    "movielens-seen": ComparedTask("rmse", False, biases, RELEASE, SMALL | SHORT, least_squares),
    "events-planted": ComparedTask("ndcg@10", True, popularity, quick=SMALL | {"data.num_clients": 60}),
    "tags-planted": ComparedTask("recall_at_5", True, commonest_tags, TAGS, SMALL | {"data.num_clients": 30}),
    "writers": ComparedTask(
        "accuracy", True, commonest_class, {"rounds": 100}, SMALL | {"data.num_clients": 30}
    ),
}


def defaults(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """The metric of every algorithm on every task, and whether its mean over seeds beats the baseline."""
    settings = {name: {**each.settings, **(each.quick if quick else {})} for name, each in TASKS.items()}
    source = lambda name: data if name.startswith("movielens") else None
    loaded = {name: resolve(name, source(name), each) for name, each in settings.items()}
    rows: list[dict[str, Any]] = []
    for name, (task, config) in loaded.items():
        changes = {key: value for key, value in settings[name].items() if not key.startswith("data.")}
        fixed = _fixed(task, TASKS[name], make_evaluation_split(config))
        rows += fixed
        for algorithm in offered(task, changes):
            given = {**changes, "algorithm": algorithm}
            found = [_run(task, given | {"seed": seed}, TASKS[name].metric, out, progress) for seed in seeds]
            row = own_row(algorithm, fixed[0]["metric"], [value for value, _ in found])
            better = bool((row["ours"] > fixed[0]["ours"]) == TASKS[name].higher)
            seconds = float(np.median([seconds for _, seconds in found]))
            rows.append(row | {"beats_baseline": better, "seconds": seconds})
    _draw(out / "defaults.png", rows, quick)
    return {"rows": rows}


def _fixed(task: Task, compared: ComparedTask, split: Split) -> list[dict[str, Any]]:
    """The rows that need no training: the baseline, and the reference if there is one."""
    metric = f"{task.name}: {compared.metric}"
    rows = [own_row(BASELINE, metric, [compared.baseline(task, split)])]
    return rows + (
        [own_row(REFERENCE, metric, [compared.reference(task, split)])] if compared.reference else []
    )


def _run(task: Task, given: Mapping[str, Any], metric: str, out: Path, progress: OnStatus) -> Sequence[float]:
    """The metric of a training, and its seconds. A change of the defaults makes it anew."""
    usual = settings_for(task.defaults, given["algorithm"])
    return once(out, (task, given, usual), lambda: _trained(task, given, metric, progress))


def offered(task: Task, changes: Mapping[str, Any]) -> list[str]:
    """The algorithms that train a model for this task."""
    found = []
    for algorithm in ALGORITHMS:
        with contextlib.suppress(UserError):
            prepare(*resolve(task, None, {**changes, "algorithm": algorithm}))
            found.append(algorithm)
    return [each for each in found if each not in WITHOUT_MODEL]


def _trained(task: Task, changes: Mapping[str, Any], metric: str, progress: OnStatus) -> tuple[float, float]:
    """The metric of a training on the test clients (not a number if it diverged), and its seconds."""
    part = f"{task.name}, {changes['algorithm']}, seed {changes['seed']}"
    shown = lambda status: progress(status._replace(part=part))
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RunWarning)
            found = float(train(task, changes=changes, progress=shown).test[metric])
    except UserError:
        found = math.nan
    return found, time.perf_counter() - began


def _draw(path: Path, rows: Sequence[Mapping[str, Any]], quick: bool) -> None:
    """A panel for every task: the algorithms with their spread over seeds; baseline and reference are lines."""
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    figure = Figure(figsize=(10, 3.2 * -(-len(metrics) // 3)), layout="constrained")
    panels = np.atleast_1d(figure.subplots(-(-len(metrics) // 3), 3)).ravel()
    for axes, metric in zip(panels, metrics, strict=False):
        mine = [row for row in rows if row["metric"] == metric]
        fixed = {row["row"]: row["ours"] for row in mine if row["row"] in (BASELINE, REFERENCE)}
        learned = [row for row in mine if row["row"] not in fixed][::-1]
        axes.errorbar(
            [row["ours"] for row in learned],
            range(len(learned)),
            xerr=[row["spread"] for row in learned],
            fmt="o",
            markersize=4,
            capsize=2,
        )
        for name, style in ((BASELINE, "--"), (REFERENCE, ":")):
            if name in fixed:
                axes.axvline(fixed[name], color="0.5", linewidth=1, linestyle=style, label=name)
        axes.legend(frameon=False, fontsize=7)
        axes.set_yticks(range(len(learned)), [row["row"] for row in learned], fontsize=7)
        axes.set_title(metric, fontsize=9)
    for axes in panels[len(metrics) :]:
        axes.set_visible(False)
    save_picture(path, figure, quick)
