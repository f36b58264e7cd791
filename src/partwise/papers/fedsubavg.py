"""Federated Submodel Averaging's Tables 2 and 3, Figures 3 and 4: rounds to a target, by algorithm and by
cohort.

Every algorithm is tuned with the same number of settings, each with one trial of all rounds. The setting that
reaches the target first is taken. If none does, the setting that comes nearest is taken. A target is the
paper's if the data is the paper's, otherwise the best that CentralSGD reaches (the paper's own rule, section
5.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from partwise.algorithms.registry import configuration, prepare, settings_for
from partwise.config.settings import Config
from partwise.papers.study import once
from partwise.runs.backends import make_evaluator, make_simulation
from partwise.runs.picture import draw_band, save_picture
from partwise.runs.sweep_plan import RATES
from partwise.runs.train import OnStatus, Status
from partwise.simulation.backend import Backend
from partwise.simulation.evaluator import Evaluator
from partwise.tasks import PAPER, Task, load_task
from partwise.types import UserError

ALGORITHMS = {
    "central": "CentralSGD",
    "fed_avg": "FedAvg",
    "fed_prox": "FedProx",
    "scaffold": "Scaffold",
    "fed_adam": "FedAdam",
    "fed_sub_avg": "FedSubAvg",
}

WORST = (0.0, 1e9)  # of metrics that rise, and of others


class PaperTask(NamedTuple):
    """One task of the paper.

    metric:  the metric
    part:    the part of the data on which it is evaluated
    tuned:   the part of the data by which rates are chosen
    targets: of the metric; None: the best of CentralSGD
    paper:   rounds to the target by algorithm (missing: not reached, or other data)
    cohorts: rounds to the target of FedSubAvg, by the number of clients in a round
    rates:   the clients' rates that are tried
    adam:    for Adam, the same number of pairs of clients' and server's rates
    options: of the task's data
    """

    name: str
    task: str
    metric: str
    part: str
    tuned: str
    targets: tuple[float | None, ...]
    paper: Mapping[str, int]
    cohorts: Mapping[int, int | None]
    every: int
    rates: tuple[float, ...]
    adam: tuple[tuple[float, float], ...]
    scaffold: str = "clients"
    options: Mapping[str, Any] = {}

    @property
    def rises(self) -> bool:
        """Whether larger values are better."""
        return self.metric != "loss"

    @property
    def word(self) -> str:
        """The metric in words."""
        return f"{self.part} {self.metric.replace('auc', 'AUC')}"

    @property
    def worst(self) -> float:
        """The value for a run that has diverged."""
        return WORST[0] if self.rises else WORST[1]

    def best(self, curve: Sequence[float]) -> float:
        """The best value during training."""
        return max(curve) if self.rises else min(curve)

    def first(self, rounds: Sequence[int], curve: Sequence[float], target: float) -> float:
        """The first round whose value is at the target or better; infinite if there is none."""
        good = [value >= target if self.rises else value <= target for value in curve]
        return float(rounds[good.index(True)]) if any(good) else float("inf")


CASES = (
    PaperTask(
        name="MovieLens",
        task="movielens-liked",
        metric="loss",
        part="train",
        tuned="train",
        targets=(
            0.65,
            None,
        ),  # the paper's 0.325 is its CentralSGD's best, and half a cross-entropy (docs/papers.md)
        paper={
            "central": 180,
            "fed_avg": 170,
            "fed_prox": 170,
            "scaffold": 180,
            "fed_adam": 170,
            "fed_sub_avg": 100,
        },
        cohorts={10: 100, 30: 110, 50: 100},
        every=5,
        rates=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
        adam=((0.1, 0.003), (0.1, 0.01), (0.1, 0.03), (1.0, 0.003), (1.0, 0.01), (1.0, 0.03)),
    ),
    PaperTask(
        name="sentiment",
        task="sentiment",
        metric="loss",
        part="train",
        tuned="train",
        targets=(None,),  # Amazon reviews stand in for the paper's tweets
        paper={},
        cohorts=dict.fromkeys((10, 30, 50)),
        every=10,
        rates=(0.3, 1.0, 3.0),
        adam=((0.3, 0.01), (1.0, 0.003), (1.0, 0.01)),
    ),
    PaperTask(
        name="Amazon electronics",
        task="clicks",
        metric="auc",
        part="test",
        tuned="validation",
        targets=(0.6,),
        paper={"central": 20, "fed_adam": 16, "fed_sub_avg": 53},
        cohorts={20: 95, 60: 57, 100: 53},
        every=5,
        rates=(0.03, 0.1, 0.3),
        adam=((0.03, 0.01), (0.1, 0.003), (0.1, 0.01)),
        scaffold="server",  # as in the paper: the model is too large for control variates on clients
    ),
)
ROUNDS = 200
QUICK = {"cohort.size": 4, "update.max_steps": 2, "simulation.lanes": 1}
QUICK_ROUNDS, QUICK_CLIENTS, QUICK_EXAMPLES = 4, 24, 12


class Curves(NamedTuple):
    """The result of one algorithm on one task: its metric by round and trial, and what was tuned."""

    rounds: list[int]
    values: list[list[float]]  # [trials][evaluations]
    rates: Mapping[str, float]
    tried: list[dict[str, Any]]
    seconds_per_round: float


Panel = tuple[Mapping[str, Curves], float]  # curves by name, and the target


class Comparison:
    """One case with its data."""

    def __init__(self, case: PaperTask, data: str | None, out: Path, quick: bool, progress: OnStatus):
        self.case, self.out, self.quick, self.progress = case, out, quick, progress
        self.target: float | None = None
        self.task: Task = load_task(case.task, data, preset=PAPER, **case.options)
        self.rounds = list(
            range(2, QUICK_ROUNDS + 1, 2) if quick else range(case.every, ROUNDS + 1, case.every)
        )
        if quick:
            few = lambda store: store.take(np.arange(min(QUICK_CLIENTS, store.num_clients)))
            parts = {part: few(getattr(self.task, part)) for part in ("train", "validation", "test")}
            self.task = self.task._replace(
                **{name: store.cap(QUICK_EXAMPLES) for name, store in parts.items()}
            )

    def train(self, algorithm: str, seeds: Sequence[int], **changes: Any) -> Curves:
        """Tune on the first seed. Then train every seed with the chosen rates."""
        config = self._config(algorithm, changes)
        trial = TrainedCurve(self, config)
        what = [config.to_toml(), self.task, self.rounds]
        look = lambda rates: once(
            self.out,
            [*what, rates, seeds[0], self.case.tuned],
            lambda: trial(seeds[0], rates, self.case.tuned),
        )
        tried = [(rates, look(rates)["curve"]) for rates in self._grid(algorithm)]
        rates = min(tried, key=lambda each: self._rank(each[1]))[0]
        done = [
            once(self.out, [*what, rates, s, self.case.part], lambda s=s: trial(s, rates, self.case.part))
            for s in seeds
        ]
        told = [
            {**each, "first": self._rank(found)[0], "best": self.case.best(found)} for each, found in tried
        ]
        seconds = float(np.median([each["seconds_per_round"] for each in done]))
        return Curves(self.rounds, [each["curve"] for each in done], rates, told, seconds)

    def _config(self, algorithm: str, changes: Mapping[str, Any]) -> Config:
        config = configuration(self.task.name, settings_for(self.task.defaults, algorithm))
        config = config.changed({"rounds": self.rounds[-1], **(QUICK if self.quick else {}), **changes})
        if algorithm == "scaffold":
            return config.changed({"scaffold.control": self.case.scaffold})
        return config.changed(self._pooled(config)) if algorithm == "central" else config

    def _pooled(self, config: Config) -> dict[str, Any]:
        """CentralSGD: the batches of a cohort together as one batch, for as many steps as a client takes on
        average."""
        store, size = self.task.train, config.update.batch_size
        steps = max(round(store.num_examples / store.num_clients / size), 1)
        return {"update.batch_size": size * config.cohort.size, "update.max_steps": steps}

    def _grid(self, algorithm: str) -> list[dict[str, float]]:
        if algorithm == "fed_adam":
            grid = [{"update.rate": client, "server.rate": server} for client, server in self.case.adam]
        else:
            grid = [{"update.rate": rate} for rate in self.case.rates]
        return grid[len(grid) // 2 :][:1] if self.quick else grid

    def _rank(self, curve: Sequence[float]) -> tuple[float, float]:
        """A rank, lower is better: rounds to the target, then the best value."""
        reached = float("inf") if self.target is None else self.case.first(self.rounds, curve, self.target)
        return reached, -self.case.best(curve) if self.case.rises else self.case.best(curve)

    def set_target(self, target: float | None, seeds: Sequence[int]) -> None:
        """Set the target. None means the best of CentralSGD, as a mean over the trials."""
        self.target = target
        if target is None:
            self.progress = _named(self.progress, f"{self.case.name}, CentralSGD")
            central = self.train("central", seeds)
            self.target = float(np.mean([self.case.best(curve) for curve in central.values]))

    def row(self, line: Line, curves: Curves) -> dict[str, Any]:
        """Rounds to the target, and the best value during training. If a trial does not reach the target,
        there is no mean."""
        target = self.target or 0.0
        first = [self.case.first(curves.rounds, curve, target) for curve in curves.values]
        reached = bool(np.isfinite(first).all())
        return {
            "row": f"{self.case.name}, {line.name}",
            "metric": f"rounds to {self.case.word} {target:.4g}",
            "paper": line.paper,
            "ours": float(np.mean(first)) if reached else None,
            "spread": float(np.std(first)) if reached else None,
            "beyond": None if reached else curves.rounds[-1],
            "seeds": len(first),
            "best": float(np.mean([self.case.best(curve) for curve in curves.values])),
            **curves._asdict(),
        }


def _value(found: float | None) -> float:
    return np.nan if found is None else float(found)


class TrainedCurve:
    """One algorithm on one task, compiled when it is first run: (seed, rates, part) -> the metric of that
    part."""

    def __init__(self, comparison: Comparison, config: Config):
        self.comparison, self.config = comparison, config
        self._made: tuple[Backend, Evaluator, Any] | None = None

    def __call__(self, seed: int, rates: Mapping[str, float], part: str) -> dict[str, Any]:
        """The curve, with the worst value after a divergence, and the median time of a round."""
        simulation, evaluate, columns = self._made = self._made or self._make()
        look = evaluate.of(getattr(self.comparison.task, part).select(columns))
        simulation.restart(seed, {RATES[key]: value for key, value in rates.items()})
        case, rounds = self.comparison.case, self.comparison.rounds
        found, spent = [], []
        for stop in rounds:
            try:
                for records in simulation.run(stop - simulation.round):
                    spent += [record.seconds for record in records]
                    self.comparison.progress(Status(simulation.round, rounds[-1], records[-1].loss, None))
                value = _value(look(simulation.state.params)[case.metric])
            except UserError:
                break
            found.append(value if np.isfinite(value) else case.worst)
        if case.worst in found:
            simulation.restart(seed)
            if not np.isfinite(_value(look(simulation.state.params)[case.metric])):
                raise UserError(
                    f"{case.name}: the {part} clients have no {case.metric}, because nothing of theirs is judged: "
                    "look at the data, or give more"
                )
        found += [case.worst] * (len(rounds) - len(found))
        return {"curve": found, "seconds_per_round": float(np.median(spent))}

    def _make(self) -> tuple[Backend, Evaluator, Any]:
        prepared = prepare(self.comparison.task, self.config)
        simulation = make_simulation(prepared, self.config)
        stores = dict.fromkeys((self.comparison.case.part, self.comparison.case.tuned))
        evaluate = make_evaluator(
            prepared, self.config, *(getattr(self.comparison.task, part) for part in stores)
        )
        return simulation, evaluate, prepared.evaluated.columns


def table2(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """Table 2 and Figure 3: every algorithm on every task."""
    lines = lambda case: [Line(name, a, {}, case.paper.get(a)) for a, name in ALGORITHMS.items()]
    return _table(out / "fedsubavg-figure3.png", data, seeds, quick, progress, lines)


def table3(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """Table 3 and Figure 4: FedSubAvg with fewer clients in a round, tuned each time."""
    sizes = lambda case: {2: None, 4: None} if quick else case.cohorts
    lines = lambda case: [
        Line(f"K = {size}", "fed_sub_avg", {"cohort.size": size}, paper)
        for size, paper in sizes(case).items()
    ]
    return _table(out / "fedsubavg-figure4.png", data, seeds, quick, progress, lines)


class Line(NamedTuple):
    """A row of a table for every target, and a line of a picture."""

    name: str
    algorithm: str
    changes: Mapping[str, Any]
    paper: int | None


def _table(
    picture: Path,
    data: str | None,
    seeds: Sequence[int],
    quick: bool,
    progress: OnStatus,
    lines_of: Callable[[PaperTask], list[Line]],
) -> dict[str, Any]:
    rows, panels = [], {}
    for case in CASES:
        comparison = Comparison(case, data, picture.parent, quick, progress)
        more, panels[f"{case.name}: {case.word}"] = compare(comparison, lines_of(case), seeds)
        rows += more
    draw(picture, panels, quick)
    return {"rows": rows}


def compare(comparison: Comparison, lines: Sequence[Line], seeds: Sequence[int]) -> tuple[list[Any], Panel]:
    """Train what the lines say, for every target. Returns the rows, and what is drawn."""
    case, progress, rows, found = comparison.case, comparison.progress, [], {}
    for target in case.targets:
        comparison.set_target(target, seeds)
        for line in lines:
            comparison.progress = _named(progress, f"{case.name}, {line.name}")
            found[line.name] = comparison.train(line.algorithm, seeds, **line.changes)
            rows.append(comparison.row(line, found[line.name]))
    return rows, (found, comparison.target or 0.0)


def _named(progress: OnStatus, part: str) -> OnStatus:
    return lambda status: progress(status._replace(part=part))


def draw(path: Path, panels: Mapping[str, Panel], quick: bool) -> None:
    """Mean over trials by round, with the standard deviation shaded; a panel for each task. The target is a
    dashed line. A line ends where a trial has diverged."""
    figure = Figure(figsize=(4.2 * len(panels) + 0.6, 3.6), layout="constrained")
    all_axes = np.atleast_1d(figure.subplots(1, len(panels)))
    for axes, (title, (lines, target)) in zip(all_axes, panels.items(), strict=True):
        for name, curves in lines.items():
            values = np.where(np.isin(curves.values, WORST), np.nan, curves.values)
            draw_band(axes, curves.rounds, values, label=name)
        axes.axhline(target, color="#8a8a8a", linestyle="--", linewidth=0.8)
        axes.set(xlabel="round", title=title)
        axes.legend(frameon=False, fontsize=7)
    save_picture(path, figure, quick)
