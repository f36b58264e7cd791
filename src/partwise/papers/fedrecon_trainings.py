"""Trains and evaluates what Tables 2 and 4 and the language figures of Federated Reconstruction compare.

A *training* is learned once with every seed, on the same clients in the same rounds as all others. The rows
of the tables are ways to evaluate it on unseen clients. Rates of training are searched at the smallest
vocabulary, for every way of training in the tables. Rates of tuning before evaluation are searched for every
row. Both use the validation clients. On a GPU the model is the paper's; on a CPU it is one that trains in
minutes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from partwise.algorithms.registry import configuration, prepare, settings_for
from partwise.config.settings import Config
from partwise.papers.study import once, tune
from partwise.runs.backends import make_evaluator, make_simulation
from partwise.runs.sweep_plan import RATES, grid_of
from partwise.runs.train import OnStatus, Status
from partwise.simulation.evaluator import Evaluator
from partwise.tasks import PAPER, Task, load_task

TASK, METRIC = "next-word-lstm", "accuracy_no_oov_or_eos"
VOCABULARIES, BUCKETS = (1000, 5000, 10_000), 500
TUNING = {"server.rate": (0.01, 0.03), "update.rate": (0.3, 1.0)}
TUNING_ROUNDS = 100
LOCAL_RATES = {"reconstruct.rate": (0.1, 0.3, 1.0)}
FINE_RATES = {"fine_tune.rate": (0.03, 0.1, 0.3)}
FINE_STEPS = {"fine_tune.max_steps": 100}
POINTS = 10  # evaluations of the validation clients during training
COMMON = {"cohort.size": 20, "rounds": 300, "evaluation_split.kind": "halves"}
SENTENCES = 64  # the most sentences of a client; few clients have more, and all lanes would wait for them
NARROW = {"embedding": 32, "units": 64}  # on a CPU
WIDE = {"precision": "bfloat16"}
QUICK = {
    "cohort.size": 4,
    "rounds": 2,
    "reconstruct.max_steps": 2,
    "update.max_steps": 2,
    "simulation.lanes": 1,
}
QUICK_MODEL = {"embedding": 8, "units": 8, "max_sentences": 6, "length": 6}
QUICK_VOCABULARIES, QUICK_BUCKETS = (30, 60), 5


class JudgedRow(NamedTuple):
    """A way to evaluate a training: changes of the configuration, the rates that are searched for it, and the
    paper's accuracy by vocabulary."""

    name: str
    changes: Mapping[str, Any] = {}
    grid: Mapping[str, Sequence[float]] = {}
    paper: Sequence[float | None] = (None, None, None)
    curve: bool = False  # whether it is evaluated during training (Figure 2)


class Training(NamedTuple):
    """What is learned: an algorithm, a number of buckets (0 means the large number), and changes of the
    configuration."""

    name: str
    algorithm: str
    buckets: int
    rows: Sequence[JudgedRow]
    changes: Mapping[str, Any] = {}

    @property
    def sends_all(self) -> bool:
        """Whether embeddings of buckets are sent too."""
        return self.algorithm != "fed_recon"


YOGI = Training(
    "FedYogi, 500 OOV",
    "fed_yogi",
    0,
    (
        JudgedRow("FedYogi (500 OOV)", curve=True),
        JudgedRow(
            "OOV fine-tuning (500 OOV)",
            {"evaluation.local": "tuned"},
            LOCAL_RATES,
            (30.0, 28.1, 27.9),
            curve=True,
        ),
        JudgedRow(
            "Full fine-tuning (500 OOV)",
            {"evaluation.local": "trained", "fine_tune.joint": True, **FINE_STEPS},
            FINE_RATES,
            (30.8, 29.2, 28.8),
            curve=True,
        ),
    ),
)
RECON = Training(
    "FedRecon, 500 OOV",
    "fed_recon",
    0,
    (
        JudgedRow("FedRecon (500 OOV)", paper=(29.6, 28.1, 27.7), curve=True),
        JudgedRow("FedRecon + fine-tune (500 OOV)", FINE_STEPS, FINE_RATES, (30.7, 28.9, 28.6), curve=True),
        JudgedRow("FedRecon (500 OOV), judged without rebuilding", {"reconstruct.method": "skip"}),
    ),
)
TRAININGS = (
    Training("FedYogi", "fed_yogi", 1, (JudgedRow("FedYogi", paper=(24.3, 26.3, 26.7)),)),
    Training("FedRecon, 1 OOV", "fed_recon", 1, (JudgedRow("FedRecon (1 OOV)", paper=(24.1, 26.2, 26.4)),)),
    RECON,
    YOGI,
    Training(
        "FedRecon, no split",
        "fed_recon",
        0,
        (JudgedRow("FedRecon (500 OOV, no split)", paper=(28.8, 28.1, 27.7)),),
        {"split.kind": "none"},
    ),
    Training(
        "FedRecon, joint",
        "fed_recon",
        0,
        (JudgedRow("FedRecon (500 OOV, joint training)", paper=(29.3, 27.9, 27.7)),),
        {"update.joint": True},
    ),
)


class Learned(NamedTuple):
    """The result of a training with every seed."""

    tests: Mapping[str, Sequence[Mapping[str, Any]]]  # row -> metrics of every seed
    chosen: Mapping[str, Mapping[str, float]]  # row -> rates of its evaluation
    curves: Mapping[str, Sequence[float]]  # row -> the metric of validation clients at `rounds`, last seed
    rounds: Sequence[int]
    losses: Sequence[float]  # of training by round, mean over seeds
    sizes: Mapping[str, int]  # parameters: local (the embeddings of buckets), others
    coverage: float  # share of the training clients' words that are in the vocabulary
    seconds: float

    def percent(self, row: str, metric: str = METRIC) -> np.ndarray:
        """The metric of a row in percent, [seeds]."""
        return 100 * np.array([test[metric] for test in self.tests[row]])

    def sent(self, everything: bool) -> int:
        """The number of parameters that are sent down and up, per client and round."""
        return 2 * (self.sizes["others"] + (self.sizes["local"] if everything else 0))


class Desk:
    """Loads each task once and does trainings on it. Finished trainings are kept under `out`."""

    def __init__(self, data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus):
        self.data, self.out, self.seeds, self.quick, self.progress = data, out, list(seeds), quick, progress
        self.vocabularies = QUICK_VOCABULARIES if quick else VOCABULARIES
        self.many = QUICK_BUCKETS if quick else BUCKETS
        self._tasks: dict[tuple[int, int], Task] = {}

    def task(self, vocabulary: int, buckets: int) -> Task:
        """The task with this many words and buckets."""
        key = (vocabulary, buckets or self.many)
        if key not in self._tasks:
            narrow = jax.default_backend() == "cpu"
            model = (
                QUICK_MODEL if self.quick else {"max_sentences": SENTENCES, **(NARROW if narrow else WIDE)}
            )
            options = {"num_words": key[0], "num_buckets": key[1], "words": "input", **model}
            self._tasks[key] = load_task(TASK, self.data, preset=PAPER, **options)
        return self._tasks[key]

    def config(self, task: Task, training: Training) -> Config:
        """The configuration of a training, before its rates are searched."""
        lanes = {"simulation.lanes": 1 if jax.default_backend() == "cpu" else 20}
        given = settings_for(task.defaults, training.algorithm) | COMMON | lanes | dict(training.changes)
        return configuration(TASK, given | (QUICK if self.quick else {}))

    def rates(self, training: Training) -> dict[str, float]:
        """The rates of a training. They are searched once for every way of training in the table, at the
        smallest vocabulary with many buckets. Other trainings use the rates of FedRecon. Reconstruction has
        the same rate as the update (the paper's heuristic, appendix C.2)."""
        same = lambda other: (
            other.buckets == 0 and other.algorithm == training.algorithm and other.changes == training.changes
        )
        base = next(filter(same, TRAININGS), RECON)
        task = self.task(self.vocabularies[0], base.buckets)
        config = self.config(task, base)
        config = config.changed({"rounds": min(config.rounds, TUNING_ROUNDS)})
        grid = {key: values[:1] if self.quick else values for key, values in TUNING.items()}
        what = ("rates", base.name, sorted(grid.items()), *_said(task, config))
        make = lambda: tune(task, config, grid, METRIC, self._show(f"rates of {base.name}"))
        rates = once(self.out, what, make)[0]
        return {**rates, "reconstruct.rate": rates["update.rate"]}

    def learn(self, training: Training, vocabulary: int) -> Learned:
        """Train with every seed and evaluate with every row."""
        rates = self.rates(training)
        task = self.task(vocabulary, training.buckets)
        config = self.config(task, training).changed(rates)
        rows = [(row.name, dict(row.changes), dict(row.grid)) for row in training.rows]
        what = (training.name, rows, self.seeds, *_said(task, config))
        return Learned(**once(self.out, what, lambda: self._learn(training, task, config)._asdict()))

    def _learn(self, training: Training, task: Task, config: Config) -> Learned:
        began, show = time.perf_counter(), self._show(f"{training.name}, {task.options['num_words']:,} words")
        simulation = make_simulation(prepare(task, config), config)
        evaluators = {row.name: _evaluator(task, config.changed(row.changes)) for row in training.rows}
        looks = np.unique(np.linspace(0, config.rounds, POINTS + 1)[1:].astype(int)).tolist()
        tests: dict[str, list[Any]] = {row.name: [] for row in training.rows}
        curves: dict[str, list[float]] = {row.name: [] for row in training.rows if row.curve}
        chosen: dict[str, dict[str, float]] = {}
        losses = []
        for seed in self.seeds:
            simulation.restart(seed)
            losses.append([])
            for look in looks:
                for records in simulation.run(look - simulation.round):
                    losses[-1] += [record.loss for record in records]
                    show(Status(simulation.round, config.rounds, records[-1].loss, None))
                params = simulation.state.params
                for row in training.rows if seed == self.seeds[0] and look == looks[-1] else ():
                    chosen[row.name] = _best_rates(evaluators[row.name], params, row, self.quick)
                for name in curves if seed == self.seeds[-1] else ():
                    rates = _named(chosen.get(name, {}))
                    curves[name].append(evaluators[name](params, rates)[METRIC])
            for row in training.rows:
                judge = evaluators[row.name].of(task.test.select(task.personal.columns))
                tests[row.name].append(judge(simulation.state.params, _named(chosen[row.name])))
        partition = task.personal.partition
        sizes = {path: int(np.prod(leaf.shape)) for path, leaf in partition.shapes.items()}
        local = sum(sizes[path] for path in partition.local_paths)
        return Learned(
            tests,
            chosen,
            curves,
            looks,
            np.mean(losses, axis=0).tolist(),
            {"local": local, "others": sum(sizes.values()) - local},
            _coverage(task),
            time.perf_counter() - began,
        )

    def _show(self, part: str) -> OnStatus:
        return lambda status: self.progress(status._replace(part=part))


def _said(task: Task, config: Config) -> tuple[Any, ...]:
    """Everything that a training depends on: the task, and what differs from the defaults."""
    usual = Config().flat()
    given = {key: value for key, value in config.flat().items() if usual.get(key) != value}
    return task, sorted(given.items())


def _evaluator(task: Task, config: Config) -> Evaluator:
    return make_evaluator(prepare(task, config), config, task.validation, task.test)


def _named(rates: Mapping[str, float]) -> dict[str, float]:
    return {RATES[key]: value for key, value in rates.items()}


def _best_rates(
    evaluate: Evaluator, params: Mapping[str, Any], row: JudgedRow, quick: bool
) -> dict[str, float]:
    """The rates of a row with the best metric on the validation clients."""
    grid = grid_of({key: values[:1] if quick else values for key, values in row.grid.items()})
    if len(grid) == 1:
        return grid[0]
    return max(grid, key=lambda rates: evaluate(params, _named(rates))[METRIC])


def _coverage(task: Task) -> float:
    """The share of the words of training sentences that are in the vocabulary."""
    word, words = task.train.columns["word"], task.options["num_words"]
    known = int(((word >= 0) & (word < words)).sum())
    return known / max(known + int((task.train.columns["bucket"] >= 0).sum()), 1)
