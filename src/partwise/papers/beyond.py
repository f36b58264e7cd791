"""MovieLens beyond the papers: what each step from the defaults to the preset `informed` gives, and one more, on
unseen users.

Users are cut 80/10/10. A judged user is rebuilt from its support half and judged on its query half. Of the query
half a prediction uses one item, the one that is predicted: which other items are in it is not known to the model.
Rates and sizes were chosen with validation users. Test users are judged once, after training.

Two steps change no training. An ensemble is the mean of the predictions of all seeds' models of one step, the one
with the lowest error for validation users, each with a user rebuilt for it. Calibrated rounding is for accuracy
alone: it counts a prediction as right if it is rounded to the rating, and where ratings are cut is fitted to the
predictions for validation users, not at the halves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from partwise.algorithms.registry import prepare
from partwise.config.settings import Config
from partwise.model.spec import Pooled
from partwise.papers.study import Variant, once, own_row, telling_release
from partwise.runs.backends import make_evaluator, make_simulation
from partwise.runs.picture import INK, QUIET, save_picture
from partwise.runs.resolve import resolve
from partwise.runs.train import OnStatus, Status
from partwise.simulation.evaluator import Evaluator
from partwise.tasks import Task
from partwise.tasks.movielens import INFORMED

TASK, LEVELS, BINS, PAPERS_BEST = "movielens", (1, 2, 3, 4, 5), 500, {"rmse": 0.883, "accuracy %": 44.1}
QUICK = {"data.size": "100k", "rounds": 3, "simulation.lanes": 4}
OF_THROUGH = (
    "data.dim",
    "split.kind",
    "update.method",
    "update.rate",
    "server.rate",
    "server.settings.initial_accumulator",
)


def steps() -> list[Variant]:
    """The trainings, each with what it adds to the one before."""
    added = {
        "own options": {key: INFORMED[key] for key in ("rounds", "data.max_examples")},
        "+ update through the reconstruction": {key: INFORMED[key] for key in OF_THROUGH},
        "+ genres and years": {"data.movies": True},
        "+ gender, age, occupation": {"data.users": True},
        "+ items pulled to their genres": {"data.item_pull": INFORMED["data.item_pull"]},
        "+ attention to ratings": {"data.attention": True},
        "+ which items were rated": {"data.signals": True},
    }
    variants: list[Variant] = []
    changes: dict[str, Any] = {}
    for name, more in added.items():
        changes = {**changes, **more}
        variants.append(Variant(name, changes))
    return variants


class Predicted(NamedTuple):
    """Predictions of the query sets of validation and test users, and their ratings, in the same order."""

    validation: np.ndarray
    validation_ratings: np.ndarray
    test: np.ndarray
    test_ratings: np.ndarray


def beyond(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """RMSE and accuracy of unseen users, step by step."""
    rows: list[dict[str, Any]] = []
    best, told = np.inf, []
    users: dict[str, int] = {}
    for variant in steps():
        with telling_release(quick):
            task, config = resolve(TASK, data, {**variant.changes, **(QUICK if quick else {})})
        shown = lambda status, name=variant.name: progress(status._replace(part=name))
        trained = _train(task, config, out, seeds, shown)
        rows += _rows(variant.name, trained, variant.changes)
        error = float(np.mean(rows[-2]["validation"]))
        best, told = min((best, told), (error, trained), key=lambda pair: pair[0])
        users = {"validation": task.validation.num_clients, "test": task.test.num_clients}
    whole = Predicted(*(np.mean(part, axis=0) for part in zip(*told, strict=True)))
    rows += _rows(f"+ ensemble of {len(told)} models", [whole], {})
    for name, each in (("calibrated rounding", told), ("calibrated rounding of the ensemble", [whole])):
        cuts = [best_cuts(one.validation, one.validation_ratings) for one in each]
        found = [
            100 * rounded_right(one.test, one.test_ratings, c) for one, c in zip(each, cuts, strict=True)
        ]
        rows.append({**own_row(name, "accuracy %", found), "cuts": np.round(cuts, 3).tolist()})
    _draw(out / "movielens-beyond.png", rows, quick)
    return {"rows": rows, "users": users}


def _train(
    task: Task, config: Config, out: Path, seeds: Sequence[int], progress: OnStatus
) -> list[Predicted]:
    """What the models that were trained with each seed predict. A finished training is not made again."""
    programs = functools.cache(
        lambda: (make_simulation(prepare(task, config), config), _judges(task, config))
    )

    def make(seed: int) -> dict[str, Any]:
        simulation, judges = programs()
        simulation.restart(seed)
        for records in simulation.run(config.rounds):
            progress(Status(simulation.round, config.rounds, records[-1].loss, None))
        arrays = [array for judge in judges for array in judge(simulation.state.params)]
        return {
            name: np.round(array, 4).tolist() for name, array in zip(Predicted._fields, arrays, strict=True)
        }

    parts = [once(out, [config.to_toml(), task, seed], lambda seed=seed: make(seed)) for seed in seeds]
    return [Predicted(**{name: np.array(values) for name, values in part.items()}) for part in parts]


Judge = Callable[[Mapping[str, Any]], tuple[np.ndarray, np.ndarray]]


def _judges(task: Task, config: Config) -> list[Judge]:
    """For validation and for test users: parameters -> predictions of the query sets, each user rebuilt from its
    support set; and the ratings."""
    found: list[tuple[np.ndarray, np.ndarray]] = []

    def keep(scores: np.ndarray, labels: np.ndarray) -> float:
        found.append((np.asarray(scores, np.float64), np.asarray(labels, np.float64)))
        return 0.0

    pairs = Pooled(lambda outputs, batch: outputs, lambda batch: batch["rating"], keep)
    model = task.personal.model._replace(metrics={"pairs": pairs})
    prepared = prepare(task._replace(personal=task.personal._replace(model=model)), config)
    validation = make_evaluator(prepared, config, task.validation, task.test)
    test = validation.of(task.test.select(prepared.evaluated.columns))

    def judge(params: Mapping[str, Any], evaluate: Evaluator) -> tuple[np.ndarray, np.ndarray]:
        evaluate(params)
        return found.pop()

    return [functools.partial(judge, evaluate=each) for each in (validation, test)]


def best_cuts(predicted: np.ndarray, ratings: np.ndarray) -> list[float]:
    """Where to cut predictions into levels so that most are right, by dynamic programming over a grid."""
    grid = np.linspace(predicted.min(), predicted.max() + 1e-6, BINS + 1)
    below = np.stack([np.searchsorted(np.sort(predicted[ratings == level]), grid) for level in LEVELS])
    best, places = below[0], []  # how many are right below each place of the grid, with the levels so far
    for number in below[1:]:
        gain = best - number
        at = np.maximum.accumulate(np.where(gain == np.maximum.accumulate(gain), np.arange(len(grid)), 0))
        places.append(at)
        best = gain[at] + number
    cuts, place = [], BINS
    for at in reversed(places):
        place = at[place]
        cuts.append(float(grid[place]))
    return cuts[::-1]


def rounded_right(predicted: np.ndarray, ratings: np.ndarray, cuts: Sequence[float]) -> float:
    """The share of predictions whose level is the rating."""
    return float(np.mean(LEVELS[0] + np.searchsorted(cuts, predicted) == ratings))


def _rows(name: str, told: Sequence[Predicted], changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """RMSE and accuracy of test users, with those of validation users beside them."""
    rmse = lambda predicted, ratings: float(np.sqrt(np.mean(np.square(predicted - ratings))))
    right = lambda predicted, ratings: 100 * float(np.mean(np.abs(predicted - ratings) <= 0.5))
    return [
        {
            **own_row(name, metric, [of(each.test, each.test_ratings) for each in told]),
            "validation": [of(each.validation, each.validation_ratings) for each in told],
            "changes": dict(changes),
        }
        for metric, of in (("rmse", rmse), ("accuracy %", right))
    ]


def _draw(path: Path, rows: Sequence[Mapping[str, Any]], quick: bool) -> None:
    """Both metrics by step, with the spread over seeds and the paper's best."""
    names = list(dict.fromkeys(row["row"] for row in rows))[::-1]
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    for axes, (metric, best) in zip(figure.subplots(1, 2, sharey=True), PAPERS_BEST.items(), strict=True):
        here = [row for row in rows if row["metric"] == metric]
        places = [names.index(row["row"]) for row in here]
        values, spread = ([row[part] for row in here] for part in ("ours", "spread"))
        axes.errorbar(
            values, places, xerr=spread, color=INK, marker="o", markersize=4, linewidth=0, elinewidth=1
        )
        axes.axvline(best, color=QUIET, linewidth=1, linestyle="--", label="paper's best")
        axes.set(xlabel=f"{metric} of test users", yticks=range(len(names)), yticklabels=names)
        axes.legend(frameon=False, fontsize=8)
    save_picture(path, figure, quick)
