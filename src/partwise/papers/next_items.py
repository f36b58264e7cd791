"""Next items, federated beside centralised: Amazon Beauty and check-ins of New York, full ranking (docs/events.md).

The same models are trained three ways: in one place with a table of users' vectors, by clients that rebuild their
own vector in every round (FedRecon), and by clients that keep it (FedPer). Beside them are two baselines without
training: what all clients take most, and what a client itself took most. All are judged by the last event of every
client; the one before it is for validation, and no setting was chosen by the last ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from partwise.algorithms.registry import prepare
from partwise.config.settings import Config
from partwise.papers.study import once
from partwise.runs.backends import make_evaluator, make_simulation
from partwise.runs.picture import INK, QUIET, RED, save_picture
from partwise.runs.resolve import resolve
from partwise.runs.train import OnStatus, Status
from partwise.simulation.backend import Backend
from partwise.simulation.evaluator import Evaluator
from partwise.tasks import Task

METRICS = ("ndcg@10", "hit@10")
# As on an accelerator, wherever it is trained.
WHOLE = {"data.loss": "softmax", "select.item": "all"}
SETS = {"Beauty": ("next-item", {"data.file": "Beauty"}), "New York": ("check-ins", {})}
MODELS = ("two_tower", "transformer")
QUICK = {
    "rounds": 4,
    "cohort.size": 8,
    "data.dim": 4,
    "data.length": 5,
    "data.loss": "sampled:10",
    "data.max_validation": 50,
    "simulation.evaluate_every": 2,
    "simulation.lanes": 4,
}
# SASRec on the same file, with the same events held out and all items ranked: as Zhou et al. (S3-Rec, 2020) trained
# it, in Table 1 of Rajput et al. (Recommender Systems with Generative Retrieval, 2023). It has no vector of a user,
# and a binary loss with one negative.
PUBLISHED = {"Beauty, transformer, in one place": {"ndcg@10": 0.0318, "hit@10": 0.0605}}
COLORS = {"central": QUIET, "fed_recon": INK, "fed_per": RED}


class NextItemLine(NamedTuple):
    """A training: of which data and model, and by which algorithm."""

    data: str
    model: str
    algorithm: str

    @property
    def words(self) -> str:
        """Its name in tables."""
        how = {"central": "in one place", "fed_recon": "own part rebuilt", "fed_per": "own part kept"}
        return f"{self.data}, {self.model.replace('_', '-')}, {how[self.algorithm]}"

    @property
    def changes(self) -> dict[str, Any]:
        """Settings that differ from the task's."""
        seen = {} if self.algorithm == "fed_recon" else {"data.seen": True}
        return {**SETS[self.data][1], **WHOLE, "data.model": self.model, "algorithm": self.algorithm, **seen}


class Ranked(NamedTuple):
    """What came of a training: metrics of validation clients by round, and of test clients."""

    rounds: list[int]
    curve: list[float]
    test: dict[str, float]


def next_items(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """HitRate and NDCG of the last event, by data, model and way of training."""
    rows, curves = [], {}
    for name, (task_name, options) in SETS.items():
        task = resolve(task_name, data, {**options, **(QUICK if quick else {})})[0]
        for own in (False, True) if task.options["again"] else (False,):
            rows += _rows(f"{name}, most taken by {'the client' if own else 'all'}", [baseline(task, own)])
    models = MODELS[:1] if quick else MODELS
    lines = [NextItemLine(name, model, how) for name in SETS for model in models for how in COLORS]
    for number, line in enumerate(lines, 1):
        part = f"{line.words} ({number} of {len(lines)})"
        shown = lambda status, part=part: progress(status._replace(part=part))
        found = train_line(data, out, line, seeds, quick, shown)
        curves[line] = found
        validation = {"validation": [run.curve for run in found], "rounds": found[0].rounds}
        rows += _rows(line.words, [run.test for run in found], **validation)
    _draw(out / "next-items.png", curves, quick)
    return {"rows": rows}


def train_line(
    data: str | None, out: Path, line: NextItemLine, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> list[Ranked]:
    """Train with every seed, in one compiled program."""
    changes = line.changes | (QUICK if quick else {})
    if line.algorithm == "central":
        changes = {key: value for key, value in changes.items() if key not in ("cohort.size", "select.item")}
    task, config = resolve(SETS[line.data][0], data, changes)
    programs = cache(lambda: _programs(task, config))

    def make(seed: int) -> dict[str, Any]:
        simulation, evaluate, judge = programs()
        simulation.restart(seed)
        rounds, curve = [], []
        while simulation.round < config.rounds:
            most = min(config.simulation.evaluate_every, config.rounds - simulation.round)
            loss = [records[-1].loss for records in simulation.run(most)][-1]
            told = evaluate(simulation.state.params, kept=simulation.kept_of)
            rounds.append(simulation.round)
            curve.append(float(told[METRICS[0]]))
            progress(Status(simulation.round, config.rounds, loss, told))
        test = judge(simulation.state.params, kept=simulation.kept_of)
        return Ranked(rounds, curve, {metric: float(test[metric]) for metric in METRICS})._asdict()

    made = [once(out, [config.to_toml(), task, line, seed], partial(make, seed)) for seed in seeds]
    return [Ranked(**each) for each in made]


def _programs(task: Task, config: Config) -> tuple[Backend, Evaluator, Evaluator]:
    """What trains, and what evaluates validation and test clients."""
    prepared = prepare(task, config)
    evaluate = make_evaluator(prepared, config, task.validation, task.test)
    simulation = make_simulation(prepared, config, config.simulation.lanes)
    return simulation, evaluate, evaluate.of(task.test.select(prepared.evaluated.columns))


def baseline(task: Task, own: bool) -> dict[str, float]:
    """The metrics of a ranking by how often all clients took an item in training; with `own`, first by how often
    the client itself did. Items of the history are left out if they are never recommended again."""
    store, again = task.test, bool(task.options["again"])
    popular = np.zeros(store.num_keys("item"))
    for block in task.train.select(["item"]).blocks():
        popular += np.bincount(block.columns["item"], minlength=len(popular))
    popular /= popular.max() + 1  # below 1, so that own counts come first
    ranks = []
    for client in range(store.num_clients):
        items = store.examples(client)["item"]
        if not len(items):
            continue
        mine = np.bincount(items[:-1], minlength=len(popular))
        scores = popular + mine if own and again else np.where((mine > 0) & (not again), -1.0, popular)
        score = scores[items[-1]]
        ranks.append(1 + (scores > score).sum() + ((scores == score).sum() - 1) / 2)
    place = np.array(ranks)
    gain = np.where(place <= 10, 1 / np.log2(1 + place), 0)
    return {"ndcg@10": float(gain.mean()), "hit@10": float((place <= 10).mean())}


def _rows(words: str, tests: Sequence[Mapping[str, float]], **more: Any) -> list[dict[str, Any]]:
    """Rows as in `reproduce --json`, one for each metric."""
    values = {metric: np.array([test[metric] for test in tests]) for metric in METRICS}
    return [
        {
            "row": words,
            "metric": metric,
            "paper": PUBLISHED.get(words, {}).get(metric),
            "ours": float(found.mean()),
            "spread": float(found.std()),
            "seeds": len(found),
            **(more if metric == METRICS[0] else {}),
        }
        for metric, found in values.items()
    ]


def _draw(path: Path, curves: Mapping[NextItemLine, Sequence[Ranked]], quick: bool) -> None:
    """NDCG of validation clients by the share of the rounds, for every data set and model."""
    panels = list(dict.fromkeys((line.data, line.model) for line in curves))
    figure = Figure(figsize=(10.5, 3 * len(panels) / 2), layout="constrained")
    for axes, (name, model) in zip(figure.subplots(len(panels) // 2, 2).ravel(), panels, strict=True):
        for line, found in curves.items():
            if (line.data, line.model) != (name, model):
                continue
            share = 100 * np.array(found[0].rounds) / found[0].rounds[-1]
            values, color = np.array([run.curve for run in found]), COLORS[line.algorithm]
            axes.plot(share, values.mean(0), color=color, linewidth=1.4, label=line.words.split(", ")[-1])
            axes.fill_between(share, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
        axes.set_title(f"{name}, {model.replace('_', '-')}", fontsize=9)
        axes.set(xlabel="rounds, %", ylabel="NDCG@10 of validation clients")
        axes.legend(frameon=False, fontsize=8)
    save_picture(path, figure, quick)
