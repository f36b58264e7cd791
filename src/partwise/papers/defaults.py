"""Every algorithm with its default settings on the tasks that offer it, beside a baseline that learns no vectors.

A default is good if no seed diverges and the mean over seeds beats the baseline. What is compared by defaults must
not depend on which algorithm they were made for.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from partwise.algorithms.registry import ALGORITHMS, prepare, settings_for
from partwise.client.split import Split, everything
from partwise.config.parts import make_evaluation_split
from partwise.data.ragged import owners
from partwise.data.store import ClientStore
from partwise.papers.study import once, own_row
from partwise.runs.picture import save_picture
from partwise.runs.resolve import resolve
from partwise.runs.train import OnStatus, Status, train
from partwise.tasks import Task
from partwise.types import RunWarning, UserError

BASELINE = "baseline"
RIDGE = 5.0  # ratings of an imagined user or item without a bias
WITHOUT_MODEL = ("count_heat",)


class OnTask(NamedTuple):
    """A task of the table: its metric, whether higher is better, and what it reaches without learned vectors.

    baseline: (task, split of an evaluated client) -> the metric on the test clients
    """

    metric: str
    higher: bool
    baseline: Callable[[Task, Split], float]
    settings: Mapping[str, Any] = {}
    quick: Mapping[str, Any] = {}


def biases(task: Task, split: Split) -> float:
    """The RMSE of mean + user + item, fitted by least squares with a pull to zero. Unseen users fit theirs to
    what they know."""
    user, item, rating = _ratings(task.train, everything)
    mean, items = rating.mean(), np.zeros(task.train.num_keys("item"))
    fit = lambda group, left, size: _sums(group, left, size) / (_sums(group, None, size) + RIDGE)
    users = np.zeros(task.train.num_clients)
    for _ in range(20):
        items = fit(item, rating - mean - users[user], len(items))
        users = fit(user, rating - mean - items[item], len(users))
    if task.seen:
        user, item, rating = _ratings(task.test, everything)
        users = users[task.train.places(task.test.client_ids)]
    else:
        user, item, rating = _ratings(task.test, split.support)
        users = fit(user, rating - mean - items[item], task.test.num_clients)
        user, item, rating = _ratings(task.test, split.query)
    return float(np.sqrt(np.mean((mean + users[user] + items[item] - rating) ** 2)))


def popularity(task: Task, split: Split) -> float:
    """NDCG@10 if all are recommended the items that most training events name, without those that they had."""
    _, item, _ = _columns(task.train, everything, "item")
    counts = np.bincount(item, minlength=task.train.num_keys("item")).astype(float)
    again, gains = bool(task.options["again"]), []
    for place in range(task.test.num_clients):
        items = task.test.examples(place)["item"]
        support, query = (_rows(part, len(items)) for part in split)
        for row in query.tolist():
            scores = counts.copy()
            scores[[] if again else items[support]] = -1
            rank = int((scores > scores[items[row]]).sum())
            gains.append(1 / np.log2(rank + 2) if rank < 10 else 0.0)
    return float(np.mean(gains))


def commonest_class(task: Task, split: Split) -> float:
    """The accuracy of always answering the commonest class."""
    _, label, _ = _columns(task.train, everything, "label")
    _, tested, _ = _columns(task.test, everything, "label")
    return float(np.mean(tested == np.bincount(label).argmax()))


def commonest_tags(task: Task, split: Split) -> float:
    """Recall@5 if every post gets the five commonest tags."""
    _, tags, _ = _columns(task.train, everything, "tags")
    _, tested, _ = _columns(task.test, everything, "tags")
    five = np.argsort(-np.bincount(tags[tags >= 0]))[:5]
    return float(np.isin(tested, five).sum() / (tested >= 0).sum())


SMALL = {"rounds": 10, "cohort.size": 5, "simulation.lanes": 5, "simulation.evaluate_every": 10}
FEW = {"data.num_clients": 60, "data.num_items": 30, "data.mean_examples": 14, "data.dim": 2}
RELEASE = {"data.size": "100k"}
TASKS: Mapping[str, OnTask] = {
    "planted": OnTask("rmse", False, biases, quick=SMALL | FEW),
    "movielens": OnTask("rmse", False, biases, RELEASE, SMALL | {"data.max_examples": 20}),
    "movielens-seen": OnTask("rmse", False, biases, RELEASE, SMALL | {"data.max_examples": 20}),
    "events-planted": OnTask("ndcg@10", True, popularity, quick=SMALL | {"data.num_clients": 60}),
    "tags-planted": OnTask("recall_at_5", True, commonest_tags, quick=SMALL | {"data.num_clients": 30}),
    "writers": OnTask("accuracy", True, commonest_class, quick=SMALL | {"data.num_clients": 30}),
}


def defaults(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """The metric of every algorithm on every task, and whether its mean over seeds beats the baseline."""
    rows: list[dict[str, Any]] = []
    for name, judged in TASKS.items():
        settings = {**judged.settings, **(judged.quick if quick else {})}
        rows += _of_task(name, judged, settings, data, out, seeds, progress)
    _draw(out / "defaults.png", rows, quick)
    return {"rows": rows}


def _of_task(
    name: str,
    judged: OnTask,
    settings: Mapping[str, Any],
    data: str | None,
    out: Path,
    seeds: Sequence[int],
    progress: OnStatus,
) -> list[dict[str, Any]]:
    """The rows of one task."""
    task, config = resolve(name, data if name.startswith("movielens") else None, settings)
    changes = {key: value for key, value in settings.items() if not key.startswith("data.")}
    metric = f"{name}: {judged.metric}"
    floor = judged.baseline(task, make_evaluation_split(config))
    rows = [own_row(BASELINE, metric, [floor])]
    for algorithm in offered(task, changes):
        values = []
        for seed in seeds:
            given = {**changes, "algorithm": algorithm, "seed": seed}
            make = partial(_trained, task, given, judged.metric, progress)
            values.append(once(out, (task, given, settings_for(task.defaults, algorithm)), make))
        row = own_row(algorithm, metric, values)
        rows.append(row | {"beats_baseline": bool((row["ours"] > floor) == judged.higher)})
    return rows


def offered(task: Task, changes: Mapping[str, Any]) -> list[str]:
    """The algorithms that train a model for this task."""
    found = []
    for algorithm in ALGORITHMS:
        with contextlib.suppress(UserError):
            prepare(*resolve(task, None, {**changes, "algorithm": algorithm}))
            found.append(algorithm)
    return [each for each in found if each not in WITHOUT_MODEL]


def _trained(task: Task, changes: Mapping[str, Any], metric: str, progress: OnStatus) -> float:
    """The metric of a training on the test clients; not a number if it diverged."""
    part = f"{task.name}, {changes['algorithm']}, seed {changes['seed']}"
    progress(Status(0, 0, float("nan"), None)._replace(part=part))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RunWarning)
            return float(train(task, changes=changes).test[metric])
    except UserError:
        return float("nan")


def _columns(store: ClientStore, part: Any, *names: str) -> tuple[np.ndarray, ...]:
    """The client (its place) and two columns of every example of a part of each client's examples."""
    every = store.gather(np.arange(store.num_clients))
    rows = np.concatenate(
        [
            start + _rows(part, count)
            for start, count in zip(every.starts.tolist(), every.counts.tolist(), strict=True)
        ]
    )
    columns = [every.columns[name][rows] for name in (*names, *names)[:2]]
    return owners(every.counts)[rows], *columns


def _ratings(store: ClientStore, part: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    user, item, rating = _columns(store, part, "item", "rating")
    return user, item, rating.astype(np.float64)


def _rows(part: Any, count: int) -> np.ndarray:
    """The rows of a client that are in the part."""
    return np.asarray(part.index(np.arange(part.count(count)), count), np.int64)


def _sums(group: np.ndarray, values: np.ndarray | None, size: int) -> np.ndarray:
    return np.bincount(group, values, size)


def _draw(path: Path, rows: Sequence[Mapping[str, Any]], quick: bool) -> None:
    """A panel for every task: the algorithms with their spread over seeds, and the baseline as a line."""
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    figure = Figure(figsize=(10, 3.2 * -(-len(metrics) // 3)), layout="constrained")
    panels = np.atleast_1d(figure.subplots(-(-len(metrics) // 3), 3)).ravel()
    for axes, metric in zip(panels, metrics, strict=False):
        mine = [row for row in rows if row["metric"] == metric]
        learned = [row for row in mine if row["row"] != BASELINE][::-1]
        axes.errorbar(
            [row["ours"] for row in learned],
            range(len(learned)),
            xerr=[row["spread"] for row in learned],
            fmt="o",
            markersize=4,
            capsize=2,
        )
        axes.axvline(mine[0]["ours"], color="0.5", linewidth=1, linestyle="--")
        axes.set_yticks(range(len(learned)), [row["row"] for row in learned], fontsize=7)
        axes.set_title(metric, fontsize=9)
    for axes in panels[len(metrics) :]:
        axes.set_visible(False)
    save_picture(path, figure, quick)
