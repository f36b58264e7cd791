"""What a promise to clients costs in accuracy: MovieLens, unseen users, at several epsilons (`docs/privacy.md`).

Two mechanisms keep the promise: independent noise with Poisson cohorts (DP-FedAvg, McMahan et al. 2018), and
correlated noise where clients wait between their rounds (BLT-DP-FTRL, McMahan et al. 2024). Beside them: no
privacy, clipping without noise, and the noise that cohorts of 1,000 would need, which protects nobody. The clip and
the server's rate are chosen for each line by the validation clients, with the first seed; these trials are not in
the epsilons.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from partwise.algorithms.registry import prepare
from partwise.config.settings import Config
from partwise.papers.study import once, telling_release
from partwise.runs.backends import Backend, make_evaluator, make_simulation
from partwise.runs.picture import INK, QUIET, RED, save_picture
from partwise.runs.resolve import resolve
from partwise.runs.train import OnStatus, Status
from partwise.simulation.evaluator import Evaluator
from partwise.tasks import Task
from partwise.types import UserError

TASK, METRIC = "movielens", "rmse"
ROUNDS, EVERY, COHORT, WAIT, LARGER = 500, 25, 100, 48, 1000
EPSILONS, CLIPS, FACTORS = (8.0, 4.0, 1.0), (0.3, 1.0, 3.0), (0.3, 1.0)
FIRST_RATINGS = {"data.max_examples": 300, "update.begin": "first"}  # as in the paper's setting
QUICK = {
    "data.size": "100k",
    "rounds": 4,
    "cohort.size": 5,
    "simulation.evaluate_every": 2,
    "simulation.lanes": 4,
}
POISSON = {"cohort.sampling": "poisson"}
STYLES = ("-", "--", ":")  # of epsilons


class Promised(NamedTuple):
    """A way to train, its colour in the picture, and what differs from the task's settings."""

    name: str
    color: str
    changes: Mapping[str, Any]
    epsilon: float | None = None

    @property
    def words(self) -> str:
        """Its name in tables."""
        return self.name if self.epsilon is None else f"{self.name}, epsilon {self.epsilon:g}"


class Found(NamedTuple):
    """What came of a line: what was chosen for it, and RMSEs by seed."""

    clip: float | None
    factor: float  # of the server's rate
    rounds: list[int]
    curves: list[list[float]]  # of validation clients
    tests: list[float]


def private_ratings(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """RMSE of unseen users by epsilon and mechanism."""
    usual = {"rounds": ROUNDS, "cohort.size": COHORT, "simulation.evaluate_every": EVERY, **FIRST_RATINGS}
    with telling_release(quick):
        task, config = resolve(
            TASK, data, {**usual, **(QUICK if quick else {}), "server.weighting": "uniform"}
        )
    lines, rows = lines_of(config, task.train.num_clients, quick), []
    evaluate = make_evaluator(prepare(task, config), config, task.validation, task.test)
    for number, line in enumerate(lines, 1):
        part = f"{line.words} ({number} of {len(lines)})"
        shown = lambda status, part=part: progress(status._replace(part=part))
        told = once(
            out,
            [config.to_toml(), task, line, list(seeds)],
            lambda line=line, shown=shown: train_line(
                task, config, line, seeds, CLIPS[1:2] if quick else CLIPS, shown, evaluate
            )._asdict(),
        )
        rows.append(_row(line, Found(**told)))
    _draw(out / "privacy-movielens.png", lines, rows, quick)
    return {"rows": rows, "clients": task.train.num_clients, "cohort": config.cohort.size}


def lines_of(config: Config, num_clients: int, quick: bool) -> list[Promised]:
    """The lines of the table. A wait is at most so long that every group has a cohort."""
    wait = min(WAIT, num_clients // config.cohort.size)
    apart = {"cohort.sampling": f"apart:{wait}", "privacy.mechanism": "blt"}
    larger = {**POISSON, "privacy.noise_cohort": min(LARGER, num_clients)}
    lines = [
        Promised("without privacy", QUIET, POISSON),
        Promised("clipped, no noise", "#3a7d44", {**POISSON, "privacy.noise": 0.0}),
    ]
    for epsilon in EPSILONS[:1] if quick else EPSILONS:
        budget = {"privacy.epsilon": epsilon}
        lines += [
            Promised("Poisson", INK, {**POISSON, **budget}, epsilon),
            Promised("BLT", RED, {**apart, **budget}, epsilon),
            Promised("noise of cohorts of 1,000 (simulation)", "#b8860b", {**larger, **budget}, epsilon),
        ]
    return lines


def train_line(
    task: Task,
    config: Config,
    line: Promised,
    seeds: Sequence[int],
    clips: Sequence[float],
    progress: OnStatus,
    evaluate: Evaluator,
) -> Found:
    """Choose the clip and the rate with the first seed, and train with every seed."""
    promised = "privacy.noise" in line.changes or line.epsilon is not None
    tried: list[tuple[float, float | None, float]] = []
    simulations: dict[float | None, Backend] = {}
    for clip, factor in itertools.product(clips if promised else (None,), FACTORS):
        if clip not in simulations:
            changes = {**line.changes, **({} if clip is None else {"privacy.clip": clip})}
            changed = config.changed(changes)
            simulations[clip] = make_simulation(prepare(task, changed), changed)
        curve = _train(simulations[clip], config, seeds[0], factor, progress, evaluate)
        tried.append((curve[-1], clip, factor))
    _, clip, factor = min(tried, key=lambda each: each[0])
    chosen, curves, tests = simulations[clip], [], []
    judge = evaluate.of(task.test.select(prepare(task, config).evaluated.columns))
    for seed in seeds:
        curves.append(_train(chosen, config, seed, factor, progress, evaluate))
        tests.append(float(judge(chosen.state.params)[METRIC]))
    every = config.simulation.evaluate_every
    rounds = [min(first + every, config.rounds) for first in range(0, config.rounds, every)]
    return Found(clip, factor, rounds, curves, tests)


def _train(
    simulation: Backend,
    config: Config,
    seed: int,
    factor: float,
    progress: OnStatus,
    evaluate: Evaluator,
) -> list[float]:
    """RMSEs of validation clients during a training. One that diverges has an infinite one."""
    simulation.restart(seed, {"server": config.server.rate * factor})
    curve = []
    while simulation.round < config.rounds:
        most = min(config.simulation.evaluate_every, config.rounds - simulation.round)
        try:
            loss = [records[-1].loss for records in simulation.run(most)][-1]
        except UserError:  # diverged
            return [*curve, float("inf")]
        found = evaluate(simulation.state.params)
        curve.append(float(found[METRIC]))
        progress(Status(simulation.round, config.rounds, loss, found))
    return curve


def _row(line: Promised, found: Found) -> dict[str, Any]:
    """A row as in `reproduce --json`."""
    return {
        "row": line.words,
        "metric": METRIC,
        "paper": None,
        "ours": float(np.mean(found.tests)),
        "spread": float(np.std(found.tests)),
        "seeds": len(found.tests),
        "epsilon": line.epsilon,
        "clip": found.clip,
        "rate_factor": found.factor,
        "rounds": found.rounds,
        "validation": np.round(found.curves, 4).tolist(),
        "changes": dict(line.changes),
    }


def _draw(path: Path, lines: Sequence[Promised], rows: Sequence[Mapping[str, Any]], quick: bool) -> None:
    """RMSE of validation clients by round, and of test clients by epsilon."""
    figure = Figure(figsize=(10.5, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for line, row in zip(lines, rows, strict=True):
        curves = np.array(row["validation"])
        style = STYLES[EPSILONS.index(line.epsilon)] if line.epsilon else "-"
        look: dict[str, Any] = {"color": line.color, "linestyle": style, "linewidth": 1.2}
        left.plot(row["rounds"], curves.mean(0), **look)
        left.fill_between(
            row["rounds"], curves.min(0), curves.max(0), color=line.color, alpha=0.12, linewidth=0
        )
    for name in dict.fromkeys(line.name for line in lines):
        mine = [(line, row) for line, row in zip(lines, rows, strict=True) if line.name == name]
        ours, spread = ([row[part] for _, row in mine] for part in ("ours", "spread"))
        look = {"color": mine[0][0].color, "label": name}
        if mine[0][0].epsilon is None:
            right.axhline(ours[0], **look)
        else:
            epsilons = [line.epsilon for line, _ in mine]
            right.errorbar(epsilons, ours, spread, marker="o", markersize=4, capsize=2, **look)
    left.set(xlabel="round", ylabel="RMSE of validation clients")
    left.set_title("full lines: epsilon 8, dashed: 4, dotted: 1", fontsize=9)
    right.set(xlabel="epsilon", ylabel="RMSE of test clients", xscale="log")
    right.set_xticks(EPSILONS, [f"{each:g}" for each in EPSILONS])
    right.minorticks_off()
    right.legend(frameon=False, fontsize=8)
    save_picture(path, figure, quick)
