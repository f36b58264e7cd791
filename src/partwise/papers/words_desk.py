"""Trains and evaluates what Tables 2 and 4 and the language figures of Federated Reconstruction compare.

Rates of training are searched for every way of training in the tables, at the smallest vocabulary, and with one
bucket at every vocabulary. Rates of tuning before evaluation are searched for every row. Both use the validation
clients. On a GPU the model is the paper's; on a CPU it is one that trains in minutes. Finished parts are kept under
`out`: rates that were tried, texts as numbers, trainings at their last look, evaluated seeds.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from partwise.algorithms.registry import configuration, prepare, settings_for
from partwise.config.settings import Config
from partwise.data import ClientStore, open_store
from partwise.data.text.numbered import number_sentences, with_vocabulary
from partwise.papers.fedrecon_trainings import METRIC, RECON, TRAININGS, JudgedRow, Learned, Training
from partwise.papers.study import name_of, once, parts_in, tune
from partwise.papers.to_the_end import WATCHED, TrainingCourse, load_model, save_model, train_to_the_end
from partwise.papers.words_protocol import protocol_of
from partwise.runs.backends import make_evaluator, make_simulation
from partwise.runs.sweep_plan import RATES, grid_of
from partwise.runs.train import OnStatus, Status
from partwise.simulation.backend import Backend
from partwise.simulation.evaluator import Evaluator
from partwise.tasks import PAPER, Task, find_task, load_task
from partwise.tasks.base import with_preset
from partwise.tasks.language import find_corpus

TASK = "next-word-lstm"
POINTS = 10  # evaluations of the validation clients during a training of fixed length
COMMON = {"evaluation_split.kind": "halves"}
LENGTH = 20  # words of a sentence


class Desk:
    """Loads each task once and does trainings on it. Finished parts are kept under `out`."""

    def __init__(self, data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus):
        self.data, self.out, self.seeds, self.quick, self.progress = data, out, list(seeds), quick, progress
        self.protocol = protocol_of(data, quick)
        self.vocabularies = self.protocol.vocabularies
        self._tasks: dict[tuple, Task] = {}

    def task(self, vocabulary: int, buckets: int, **options: Any) -> Task:
        """The task with this many words and buckets, and with other options of its model."""
        key = (vocabulary, buckets or self.protocol.buckets, *sorted(options.items()))
        if key not in self._tasks:
            model = {"words": "input", **self.protocol.model, **options}
            load = self._from_numbers if self.protocol.numbered else self._from_texts
            self._tasks[key] = load(key[0], key[1], model)
        return self._tasks[key]

    def _from_texts(self, words: int, buckets: int, model: Mapping[str, Any]) -> Task:
        sizes = {"num_words": words, "num_buckets": buckets, "max_sentences": self.protocol.sentences}
        return load_task(TASK, self.data, preset=PAPER, **sizes, **model)

    def _from_numbers(self, words: int, buckets: int, model: Mapping[str, Any]) -> Task:
        find_task(TASK)  # says what to install if Flax is not there
        from partwise.tasks.next_word_lstm import WIDE, for_long_clients, next_word_lstm_task

        usual = {name: WIDE[name] for name in ("embedding", "units")}
        rest = {name: value for name, value in (usual | dict(model)).items() if name != "length"}
        stores = with_vocabulary(self._numbered, words, buckets)
        task = next_word_lstm_task(*stores, num_buckets=buckets, **rest)
        return with_preset(for_long_clients(task), PAPER)

    @cached_property
    def _numbered(self) -> ClientStore:
        """The texts as numbers of words, read once for all sittings."""
        length, protocol = self.protocol.model.get("length", LENGTH), self.protocol
        contents = _contents(Path(str(self.data)).expanduser())
        what = ("sentences", contents, length, protocol.sentences, protocol.min_sentences)
        folder = parts_in(self.out) / f"{name_of(what)}.store"
        if not folder.exists():
            self.progress(Status(0, 1, float("nan"), None, "texts are read"))
            shape = {"length": length, "max_sentences": protocol.sentences}
            corpus = find_corpus(self.data).hold()
            number_sentences(corpus, min_sentences=protocol.min_sentences, **shape).save(folder)
        return open_store(folder)

    def config(self, task: Task, training: Training) -> Config:
        """The configuration of a training, before its rates are searched."""
        given = settings_for(task.defaults, training.algorithm) | COMMON | dict(training.changes)
        return configuration(TASK, given | dict(self.protocol.settings))

    def rates(self, training: Training, vocabulary: int) -> dict[str, float]:
        """The rates of a training. They are searched once for every training of the table, at the smallest
        vocabulary. With one bucket, a rate that is good at one vocabulary may diverge at another, so they are
        searched at each. Other trainings use the rates of FedRecon. Reconstruction has the same rate as the update
        (the paper's heuristic, appendix C.2)."""
        kind = lambda other: (other.algorithm, other.buckets, other.changes)
        base = next((other for other in TRAININGS if kind(other) == kind(training)), RECON)
        task = self.task(vocabulary if base.buckets == 1 else self.vocabularies[0], base.buckets)
        config = self.config(task, base)
        config = config.changed({"rounds": min(config.rounds, self.protocol.tuning)})
        what = ("rate", base.name, *_said(task, config))
        kept = lambda changes, make: once(self.out, (*what, sorted(changes.items())), make)
        rates, _ = tune(task, config, self.protocol.rates, METRIC, self.show(f"rates of {base.name}"), kept)
        return {**rates, "reconstruct.rate": rates["update.rate"]}

    def trainer(self, training: Training, vocabulary: int) -> Trainer:
        """A training at one vocabulary, with its rates."""
        task = self.task(vocabulary, training.buckets, **training.options)
        config = self.config(task, training).changed(self.rates(training, vocabulary))
        return Trainer(self, training, task, config)

    def learn(self, training: Training, vocabulary: int) -> Learned:
        """Train with every seed and evaluate with every row."""
        trainer, chosen, done = self.trainer(training, vocabulary), {}, []
        rows = [(row.name, dict(row.changes), dict(row.grid)) for row in training.rows]
        for seed in self.seeds:
            what = (*trainer.what(seed), "rows", rows, sorted(chosen))
            found = once(self.out, what, lambda s=seed, c=chosen: trainer.evaluate(s, c))
            trainer.forget(seed)
            chosen = chosen or found["chosen"]
            done.append(found)
        courses = [each["course"] for each in done]
        shortest = min(len(course["losses"]) for course in courses)
        drawn = courses[1:] or courses
        rounds = min((course["rounds"] for course in drawn), key=len)
        names = [name for name in drawn[0]["values"] if name != WATCHED]
        return Learned(
            tests={row.name: [each["tests"][row.name] for each in done] for row in training.rows},
            chosen=chosen,
            curves={name: [each["values"][name][: len(rounds)] for each in drawn] for name in names},
            rounds=rounds,
            losses=[course["losses"][:shortest] for course in courses],
            sizes=trainer.sizes(),
            coverage=_coverage(trainer.task),
            seconds=sum(each["seconds"] for each in done),
            judged=[course["judged"] for course in courses],
        )

    def show(self, part: str) -> OnStatus:
        """The `OnStatus` of one part."""
        return lambda status: self.progress(status._replace(part=part))


class Trainer:
    """One training on one task. What it needs is made when it is first used, as all may be done already."""

    def __init__(self, desk: Desk, training: Training, task: Task, config: Config):
        self.desk, self.training, self.task, self.config = desk, training, task, config

    @cached_property
    def simulation(self) -> Backend:
        """What runs its rounds."""
        return make_simulation(prepare(self.task, self.config), self.config)

    @cached_property
    def evaluators(self) -> dict[str, Evaluator]:
        """What evaluates the validation clients, by row."""
        return {row.name: self.evaluator(row) for row in self.training.rows}

    def evaluator(self, row: JudgedRow) -> Evaluator:
        """What evaluates the validation clients as a row says, and test clients with the same program."""
        config = self.config.changed(row.changes)
        return make_evaluator(prepare(self.task, config), config, self.task.validation, self.task.test)

    def what(self, seed: int) -> tuple[Any, ...]:
        """Everything that the training with this seed depends on."""
        curves = [row.name for row in self._curves(seed)]
        protocol = self.desk.protocol
        told = (curves, protocol.looks, protocol.patience)
        return (self.training.name, seed, told, *_said(self.task, self.config))

    def model(
        self, seed: int, chosen: Mapping[str, Mapping[str, float]] = {}
    ) -> tuple[dict[str, Any], TrainingCourse]:
        """The parameters to be judged and the course of their training, trained if they are not there."""
        file = self._file(seed, "model")
        if not file.exists():
            unfinished = self._file(seed, "unfinished")
            show = self.desk.show(
                f"{self.training.name}, {self.task.options['num_words']:,} words, seed {seed}"
            )
            tell = lambda records: show(
                Status(self.simulation.round, self.config.rounds, records[-1].loss, None)
            )
            look = lambda params: self._look(seed, params, chosen)
            given = (self.simulation, seed, self._looks(), look, self.desk.protocol.patience, unfinished)
            save_model(file, *train_to_the_end(*given, tell, time.perf_counter))
            unfinished.unlink(missing_ok=True)
        return load_model(file)

    def evaluate(self, seed: int, chosen: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """Every row on the test clients; with the first seed, rates are searched before."""
        params, course = self.model(seed, chosen)
        began, tests = time.perf_counter(), {}
        chosen = dict(chosen) or {
            row.name: best_rates(self.evaluators[row.name], params, row, self.desk.quick)
            for row in self.training.rows
        }
        for row in self.training.rows:
            judge = self.evaluators[row.name].of(self.task.test.select(self.task.personal.columns))
            tests[row.name] = judge(params, named(chosen[row.name]))
        seconds = course.seconds + time.perf_counter() - began
        return {"tests": tests, "chosen": chosen, "course": course._asdict(), "seconds": seconds}

    def forget(self, seed: int) -> None:
        """Remove the model, unless others use it."""
        if not self.training.kept:
            self._file(seed, "model").unlink(missing_ok=True)

    def sizes(self) -> dict[str, int]:
        """Numbers of parameters: local, and others."""
        partition = self.task.personal.partition
        sizes = {path: int(np.prod(leaf.shape)) for path, leaf in partition.shapes.items()}
        local = sum(sizes[path] for path in partition.local_paths)
        return {"local": local, "others": sum(sizes.values()) - local}

    def _file(self, seed: int, kind: str) -> Path:
        return parts_in(self.desk.out) / f"{name_of(self.what(seed))}.{kind}.safetensors"

    def _looks(self) -> list[int]:
        rounds, every = self.config.rounds, self.desk.protocol.looks
        if every:
            return [*range(every, rounds, every), rounds]
        return np.unique(np.linspace(0, rounds, POINTS + 1)[1:].astype(int)).tolist()

    def _curves(self, seed: int) -> list[JudgedRow]:
        """The rows that are evaluated during the training, for Figure 2: with all seeds but the first, at whose end
        the rates of evaluation are chosen."""
        first, *others = self.desk.seeds
        return [row for row in self.training.rows if row.curve and seed in (others or [first])]

    def _look(self, seed: int, params: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, float]:
        find = lambda row: self.evaluators[row.name](params, named(chosen.get(row.name, {})))[METRIC]
        found = {row.name: find(row) for row in self._curves(seed)}
        if self.desk.protocol.patience:
            first = self.training.rows[0]
            found[WATCHED] = found[first.name] if first.name in found else find(first)
        return found


def _said(task: Task, config: Config) -> tuple[Any, ...]:
    """Everything that a training depends on: the task, and what differs from the defaults."""
    usual = Config().flat()
    given = {key: value for key, value in config.flat().items() if usual.get(key) != value}
    return task, sorted(given.items())


def _contents(source: Path) -> str:
    """A digest of a file, or of the files directly in a folder, by their names and contents."""
    whole = hashlib.sha256()
    for file in sorted(source.iterdir()) if source.is_dir() else [source]:
        if file.is_file():
            with file.open("rb") as opened:
                whole.update(f"{file.name} {hashlib.file_digest(opened, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


def named(rates: Mapping[str, float]) -> dict[str, float]:
    """Rates by their names in programs."""
    return {RATES[key]: value for key, value in rates.items()}


def best_rates(
    evaluate: Callable[..., Mapping[str, Any]], params: Mapping[str, Any], row: JudgedRow, quick: bool
) -> dict[str, float]:
    """The rates of a row with the best metric on the validation clients."""
    grid = grid_of({key: values[:1] if quick else values for key, values in row.grid.items()})
    if len(grid) == 1:
        return grid[0]
    return max(grid, key=lambda rates: evaluate(params, named(rates))[METRIC])


def _coverage(task: Task) -> float:
    """The share of the words of training sentences that are in the vocabulary."""
    word, words = task.train.columns["word"], task.options["num_words"]
    known = int(((word >= 0) & (word < words)).sum())
    return known / max(known + int((task.train.columns["bucket"] >= 0).sum()), 1)
