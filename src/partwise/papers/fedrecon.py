"""Tables 1 and 3 and Figures 3 and 4 of Federated Reconstruction, on MovieLens.

Every row is a task with the paper's settings and a few changes. Its rates are searched on the published grid
by the validation clients' RMSE. The best rates are run again with other seeds. The test clients are evaluated
once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from partwise.algorithms.registry import configuration, prepare, settings_for
from partwise.config.settings import Config
from partwise.papers.rate_search import Trial, best_of, search_rates
from partwise.papers.study import telling_release
from partwise.runs.backends import make_evaluator
from partwise.runs.picture import INK, QUIET, bars_beside, draw_band, save_picture
from partwise.runs.sweep_plan import RATES, grid_of
from partwise.runs.train import OnStatus
from partwise.tasks import PAPER, Task, load_task

QUICK_ROUNDS = 100  # so that something is learned with the smallest rates
RECON_GRID = {"server.rate": (0.1, 0.5, 1.0), "reconstruct.rate": (0.1, 0.5), "update.rate": (0.1, 0.5)}
AVERAGE_GRID = {"server.rate": (0.1, 0.5, 1.0), "update.rate": (0.1, 0.5)}
EVALUATION_RATES = (0.1, 0.5)  # of reconstruction, if training has no reconstruction
CENTRAL_GRID = {"update.rate": (0.3, 1.0, 3.0)}
CENTRAL = {"algorithm": "central"}
AUTHORS = {
    "server.rate": 1.0
}  # if no other rate is searched; the preset has a smaller one, which never diverges


class TableRow(NamedTuple):
    """One row of the table."""

    name: str
    rmse: float | None  # the paper's
    accuracy: float | None  # the paper's, in percent
    task: str
    changes: Mapping[str, Any]
    grid: Mapping[str, Sequence[float]]
    evaluation: Mapping[str, Any] = {}  # changes for evaluation only


ROWS = (
    TableRow("Centralized + standard eval", 0.923, 43.2, "movielens-seen", CENTRAL, CENTRAL_GRID),
    TableRow(
        "Centralized + standard eval (unseen)",
        3.80,
        0.0,
        "movielens",
        CENTRAL,
        CENTRAL_GRID,
        {"reconstruct.method": "skip"},
    ),
    TableRow("Centralized + ReconEval", 1.36, 40.8, "movielens", CENTRAL, CENTRAL_GRID),
    TableRow("FedAvg + standard eval", 0.939, 41.5, "movielens-seen", {"algorithm": "fed_avg"}, AVERAGE_GRID),
    TableRow("FedAvg + ReconEval", 0.934, 40.0, "movielens", {"algorithm": "fed_avg"}, AVERAGE_GRID),
    TableRow("FedRecon", 0.907, 43.3, "movielens", {}, RECON_GRID),
    TableRow("FedRecon (no split)", 0.912, 42.5, "movielens", {"split.kind": "none"}, RECON_GRID),
    TableRow("FedRecon (joint training)", 0.915, 42.1, "movielens", {"update.joint": True}, RECON_GRID),
    TableRow("FedRecon (Adagrad)", 0.883, 44.1, "movielens", {"server.optimizer": "adagrad"}, RECON_GRID),
)

# The best result of partwise's own options, chosen on the validation users: a smaller model with biases, users
# solved in closed form towards a learned default, all of a client's examples used twice, a decreasing server rate.
OURS = TableRow(
    "partwise's own options",
    None,
    None,
    "movielens",
    {
        "data.dim": 10,
        "data.biases": True,
        "data.initial": "learned",
        "split.kind": "none",
        "reconstruct.method": "solve",
        "reconstruct.pull": 1.0,
        "server.optimizer": "adagrad",
        "server.settings.initial_accumulator": 0.1,
        "server.settings.epsilon": 1e-7,
        "server.schedule": "cosine",
        "rounds": 1500,
    },
    {"reconstruct.pull": (1.0, 2.0), "server.rate": (0.1, 0.3), "update.rate": (0.1, 0.3)},
)


class RowResult(NamedTuple):
    """The result of a row: the chosen rates, and the test metrics of every seed."""

    row: TableRow
    chosen: Mapping[str, float]
    validation: Mapping[str, float]
    tests: Sequence[Mapping[str, Any]]
    seconds: float


class MovieLensRuns:
    """Loads each task once and runs rows on it."""

    def __init__(self, data: str | None, seeds: Sequence[int], quick: bool, progress: OnStatus):
        self.data, self.seeds, self.quick, self.progress = data, list(seeds), quick, progress
        self.number, self.of = 0, 0  # the current row, and the number of rows
        self._tasks: dict[tuple, Task] = {}
        self._trained: dict[tuple, list[Trial]] = {}

    def show(self, name: str) -> OnStatus:
        """The `OnStatus` of the next row, with its number."""
        self.number += 1
        part = f"row {self.number} of {self.of}: {name}"
        return lambda status: self.progress(status._replace(part=part))

    def prepared(self, row: TableRow) -> tuple[Task, Config]:
        """The row's task and configuration."""
        options = {key.removeprefix("data."): v for key, v in row.changes.items() if key.startswith("data.")}
        if self.quick:
            options["size"] = "100k"
        key = (row.task, *sorted(options.items()))
        if key not in self._tasks:
            with telling_release(self.quick):
                self._tasks[key] = load_task(row.task, self.data, preset=PAPER, **options)
        task = self._tasks[key]
        given = settings_for(task.defaults, row.changes.get("algorithm", "fed_recon"))
        config = configuration(row.task, given | AUTHORS | dict(row.changes))
        return task, config.changed({"rounds": min(config.rounds, QUICK_ROUNDS)}) if self.quick else config

    def train(self, row: TableRow) -> RowResult:
        """Search the grid, run the best rates again with every seed, and evaluate the test clients."""
        began, show = time.perf_counter(), self.show(row.name)
        task, config = self.prepared(row)
        grid = grid_of({key: values[:1] if self.quick else values for key, values in row.grid.items()})
        trials = self._sweep(row, task, config, grid, self.seeds[:1], show)
        evaluated = config.changed(row.evaluation)
        variants = (
            [{}] if "reconstruct.rate" in row.grid else [{"reconstruct.rate": r} for r in EVALUATION_RATES]
        )
        candidates = [
            trial._replace(changes={**trial.changes, **variant}, validation=judged)
            for variant in (variants if not task.seen and config.algorithm != "fed_recon" else [{}])
            for trial, judged in zip(trials, self._judge(task, evaluated, trials, variant), strict=True)
        ]
        best = best_of(candidates, "rmse")
        rates = {key: value for key, value in best.changes.items() if key in row.grid}
        more = self.seeds[1:]
        again = self._sweep(row, task, config, [rates], more, show) if more else []
        evaluate = make_evaluator(prepare(task, evaluated), evaluated, task.test)
        named = {RATES[key]: value for key, value in best.changes.items()}
        tests = [evaluate(trial.params, named) for trial in (best, *again)]
        judged = {metric: best.validation[metric] for metric in ("rmse", "accuracy")}
        return RowResult(row, best.changes, judged, tests, time.perf_counter() - began)

    def _judge(self, task: Task, config: Config, trials: list[Trial], variant: Mapping[str, float]) -> list:
        """Validation metrics of trained trials with a different evaluation."""
        evaluate = make_evaluator(prepare(task, config), config, task.validation)
        named = lambda trial: {RATES[key]: value for key, value in {**trial.changes, **variant}.items()}
        return [evaluate(trial.params, named(trial)) for trial in trials]

    def _sweep(
        self, row: TableRow, task: Task, config: Config, grid: list, seeds: Sequence[int], show: OnStatus
    ) -> list[Trial]:
        """Train, or reuse what was trained before for another way of evaluation."""
        key = (row.task, str(row.changes), str(grid), tuple(seeds))
        if key not in self._trained:
            self._trained[key] = search_rates(task, config, grid, seeds, show)
        return self._trained[key]


def table1(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """Tables 1 and 3: nine rows of the paper, and one of our own."""
    runs = MovieLensRuns(data, seeds, quick, progress)
    runs.of = len(ROWS) + 1
    outcomes = [runs.train(row) for row in (*ROWS, OURS)]
    rows = []
    for outcome in outcomes:
        for metric, scale, paper in (
            ("rmse", 1, outcome.row.rmse),
            ("accuracy", 100, outcome.row.accuracy),
        ):
            values = [scale * test[metric] for test in outcome.tests]
            rows.append(
                {
                    "row": outcome.row.name,
                    "metric": metric if scale == 1 else "accuracy %",
                    "paper": paper,
                    "ours": float(np.mean(values)),
                    "spread": float(np.std(values)),
                    "seeds": len(values),
                    "rates": dict(outcome.chosen),
                    "validation": scale * outcome.validation[metric],
                    "seconds": outcome.seconds,
                }
            )
    errors = [row for row in rows if row["metric"] == "rmse"]
    bars_beside(out / "fedrecon-table1.png", errors, "RMSE (lower is better)", 1.5, quick)
    return {"rows": rows}


STEPS = {"reconstruct.max_steps": (0, 1, 2, 5, 10), "update.max_steps": (1, 2, 5, 10)}


def figure3(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """Accuracy relative to the base for other numbers of reconstruction and update steps (base: 50 of each)."""
    runs = MovieLensRuns(data, seeds, quick, progress)
    base_row = next(row for row in ROWS if row.name == "FedRecon")
    steps_of = {key: values[-1:] if quick else values for key, values in STEPS.items()}
    runs.of = 1 + sum(map(len, steps_of.values()))
    base = runs.train(base_row)
    fixed = {key: (value,) for key, value in base.chosen.items()}
    mean = lambda outcome: float(np.mean([test["accuracy"] for test in outcome.tests]))
    paper = {("reconstruct.max_steps", 0): 0.0}
    rows = []
    for key, values in steps_of.items():
        for steps in values:
            name = f"k_{'r' if key.startswith('recon') else 'u'} = {steps}"
            outcome = runs.train(base_row._replace(name=name, changes={key: steps}, grid=fixed))
            relative = relative_to(mean(base), [test["accuracy"] for test in outcome.tests])
            rows.append(
                {
                    "row": name,
                    "metric": "relative accuracy",
                    "paper": paper.get((key, steps)),
                    "ours": float(np.mean(relative)),
                    "spread": float(np.std(relative)),
                    "seeds": len(relative),
                }
            )
    draw_steps(out / "fedrecon-figure3.png", rows, "accuracy relative to 50 steps", quick)
    return {"rows": rows, "base_accuracy": mean(base), "rates": dict(base.chosen)}


def relative_to(base: float, values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Accuracies relative to that of the base; nan if the base has learned nothing, as a quick check may."""
    return np.array(values) / (base if base > 0 else np.nan)


def draw_steps(path: Path, rows: list[dict[str, Any]], label: str, quick: bool) -> None:
    """Two panels by numbers of steps: of reconstruction (rows `k_r = number`), of the update (`k_u = number`)."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, letter, words in zip(
        figure.subplots(1, 2, sharey=True), "ru", ("reconstruction", "update"), strict=True
    ):
        chosen = [row for row in rows if row["row"].startswith(f"k_{letter}")]
        steps = [int(row["row"].split("=")[1]) for row in chosen]
        axes.errorbar(
            range(len(steps)),
            [r["ours"] for r in chosen],
            [r["spread"] for r in chosen],
            color=INK,
            marker="o",
        )
        axes.axhline(1.0, color=QUIET, linewidth=0.8)
        axes.set(xlabel=f"{words} steps", ylabel=label, ylim=(0, 1.1))
        axes.set_xticks(range(len(steps)), [str(s) for s in steps])
    save_picture(path, figure, quick)


SERVER_RATES = {
    "sgd": (0.1, 0.5, 1.0),
    "adagrad": (0.1, 0.5, 1.0),
    "adam": (0.003, 0.01, 0.03),
    "yogi": (0.003, 0.01, 0.03),
}


def figure4(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """Training loss by round for four server optimizers, each with its best rate of three."""
    runs = MovieLensRuns(data, seeds, quick, progress)
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes, rows = figure.subplots(), []
    runs.of = len(SERVER_RATES)
    for name, rates in SERVER_RATES.items():
        row = TableRow(name, None, None, "movielens", {"server.optimizer": name}, {"server.rate": rates})
        task, config = runs.prepared(row)
        trials = search_rates(task, config, grid_of(row.grid), seeds[:1], runs.show(name))
        best = best_of(trials, "rmse")
        others = search_rates(task, config, [best.changes], seeds[1:], runs.show(name)) if seeds[1:] else []
        each = [best, *others]
        smooth = np.array([np.convolve(one.losses, np.ones(10) / 10, "valid") for one in each])
        label = f"{name}, rate {best.changes['server.rate']:g}"
        draw_band(axes, np.arange(smooth.shape[1]) + 10, smooth, label=label)
        values = [one.validation["loss"] for one in each]
        rows.append(
            {
                "row": name,
                "metric": "validation mean squared error",
                "paper": None,
                "ours": float(np.mean(values)),
                "spread": float(np.std(values)),
                "seeds": len(values),
                "rates": dict(best.changes),
                "losses": np.mean([one.losses for one in each], axis=0).round(5).tolist(),
            }
        )
    axes.set(xlabel="round", ylabel="training loss (mean of 10 rounds)", yscale="log")
    axes.legend(frameon=False, fontsize=8)
    save_picture(out / "fedrecon-figure4.png", figure, quick)
    return {"rows": rows}
