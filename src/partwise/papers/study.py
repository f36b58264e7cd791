"""Compares variants of one training: the same clients in the same rounds for all, several trials of each.

Rates are tuned once, without what is varied. They are the same for all variants (as in Federated Select).
"""

from __future__ import annotations

import hashlib
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from partwise.algorithms.registry import prepare
from partwise.checkpoint import load_json, save_json
from partwise.config.settings import Config
from partwise.data.store import ClientStore
from partwise.runs.backends import make_evaluator, make_simulation
from partwise.runs.document import to_plain
from partwise.runs.fingerprint import digest_of
from partwise.runs.picture import draw_band, save_picture
from partwise.runs.sweep_plan import RATES, grid_of
from partwise.runs.train import OnStatus, Status
from partwise.simulation.backend import Backend
from partwise.simulation.evaluator import Evaluator
from partwise.tasks import Task
from partwise.types import RunWarning, UserError

PARTS = "parts"  # the folder with the finished parts of reproductions
OWN_PARTS: ContextVar[str] = ContextVar("own_parts", default="")  # the folder in it of one that shares none


@contextmanager
def telling_release(quick: bool) -> Iterator[None]:
    """Say in an error about MovieLens which release a quick check reads."""
    try:
        yield
    except UserError as error:
        told = f"{error}. With --quick (quick=True) MovieLens-100k is read, not MovieLens-1M"
        raise UserError(told) if quick else error from None


class Variant(NamedTuple):
    """One line of a comparison: changes of the configuration, and the paper's number if it has one."""

    name: str
    changes: Mapping[str, Any]
    paper: float | None = None


class Trials(NamedTuple):
    """The result of a variant. Values are of the metric, in percent."""

    variant: Variant
    rounds: list[int]
    curves: np.ndarray  # [trials, evaluations] on the validation clients
    tests: np.ndarray  # [trials]
    bytes_down: float  # per client and round
    relative_size: float  # size of what a client is sent, relative to the server's model
    seconds: float

    def told(self) -> dict[str, Any]:
        """Everything except the variant, for JSON. `of` reads it."""
        values = self._asdict() | {"curves": self.curves.tolist(), "tests": self.tests.tolist()}
        return {name: value for name, value in values.items() if name != "variant"}

    @classmethod
    def of(cls, variant: Variant, told: Mapping[str, Any]) -> Trials:
        """The trials of a variant, from what `told` returned."""
        arrays = {name: np.array(told[name], float) for name in ("curves", "tests")}
        return cls(variant, **{**told, **arrays})

    def row(self, metric: str) -> dict[str, Any]:
        """A row as in `reproduce --json`."""
        return {
            "row": self.variant.name,
            "metric": metric,
            "paper": self.variant.paper,
            "ours": float(self.tests.mean()),
            "spread": float(self.tests.std()),
            "seeds": len(self.tests),
            "relative_size": self.relative_size,
            "bytes_down_per_client": self.bytes_down,
            "rounds": self.rounds,
            "validation": np.round(self.curves, 3).tolist(),
            "changes": dict(self.variant.changes),
            "seconds": self.seconds,
        }


def once(folder: Path, what: Sequence[Any], make: Callable[[], Any]) -> Any:
    """The result of `make`, as JSON. If a reproduction was killed, its finished parts are not made again.
    `what` identifies the part: everything that it depends on, with a task identified by its data."""
    file = parts_in(folder) / f"{name_of(what)}.json"
    if file.exists():
        try:
            return load_json(file)["made"]
        except UserError as error:
            warnings.warn(f"{error}; it is made again", RunWarning, stacklevel=2)
    save_json(file, {"made": to_plain(make())})
    return load_json(file)["made"]


def parts_in(folder: Path) -> Path:
    """Where the parts of the reproduction that runs now are."""
    return folder / PARTS / OWN_PARTS.get()


@contextmanager
def own_parts(folder: Path, name: str) -> Iterator[None]:
    """Parts are apart from those of others meanwhile, and are removed at the end unless it fails."""
    before = OWN_PARTS.set(name)
    try:
        yield
        shutil.rmtree(parts_in(folder), ignore_errors=True)
        with suppress(OSError):
            (folder / PARTS).rmdir()  # unless it has parts of others
    finally:
        OWN_PARTS.reset(before)


def name_of(what: Sequence[Any]) -> str:
    """A name for a part, from everything that it depends on."""
    return hashlib.sha256("\n".join(map(_said, what)).encode()).hexdigest()[:24]


def _said(thing: Any) -> str:
    if isinstance(thing, ClientStore):
        raise TypeError("the words for a store do not say what is in it: give the task")
    return digest_of(thing) if isinstance(thing, Task) else str(thing)


def own_row(name: str, metric: str, values: Sequence[float]) -> dict[str, Any]:
    """A row of a comparison that no paper has: mean and spread over seeds."""
    return {
        "row": name,
        "metric": metric,
        "paper": None,
        "ours": float(np.mean(values)),
        "spread": float(np.std(values)),
        "seeds": len(values),
        "values": list(map(float, values)),
    }


def tune(
    task: Task,
    config: Config,
    grid: Mapping[str, Sequence[float]],
    metric: str,
    progress: OnStatus,
    kept: Callable[[Mapping[str, float], Callable[[], float]], float | None] = lambda changes, make: make(),
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The rates with the best metric on the validation clients after the configuration's rounds, and all
    rates that were tried. One compiled program runs them all. If there is only one set of rates, nothing is
    trained. `kept` may know the value of some rates already; else it calls the function that finds it."""
    if len(grid_of(grid)) == 1:
        return grid_of(grid)[0], []
    tried, trial = [], _Trial(task, config, metric, progress)
    for changes in grid_of(grid):
        value = kept(changes, lambda c=changes: trial.value(c))
        tried.append({**changes, "validation": float("-inf") if value is None else value})
    best = max(tried, key=lambda each: each["validation"] if np.isfinite(each["validation"]) else -np.inf)
    return {key: best[key] for key in grid}, tried


class _Trial:
    """Trains a configuration with other rates, in one program that is made when it is first used."""

    def __init__(self, task: Task, config: Config, metric: str, progress: OnStatus):
        self.task, self.config, self.metric, self.progress = task, config, metric, progress

    @cached_property
    def _program(self) -> tuple[Backend, Evaluator]:
        prepared = prepare(self.task, self.config)
        evaluator = make_evaluator(prepared, self.config, self.task.validation)
        return make_simulation(prepared, self.config), evaluator

    def value(self, changes: Mapping[str, float]) -> float:
        """The metric of the validation clients after all rounds, minus infinity if the training diverged."""
        simulation, evaluate = self._program
        simulation.restart(self.config.seed, {RATES[key]: value for key, value in changes.items()})
        try:
            for records in simulation.run(self.config.rounds):
                self.progress(Status(simulation.round, self.config.rounds, records[-1].loss, None))
            return float(evaluate(simulation.state.params, kept=simulation.kept_of)[self.metric])
        except UserError:
            return float("-inf")


def run_trials(
    task: Task,
    config: Config,
    variant: Variant,
    seeds: Sequence[int],
    metric: str,
    progress: OnStatus,
    evaluate: Evaluator,
) -> Trials:
    """Train a variant with every seed. The validation clients are evaluated (`evaluate`) during training, and
    the test clients at the end. The clients of a round depend only on the seed, so they are the same for all
    variants."""
    began = time.perf_counter()
    config = config.changed(variant.changes)
    prepared = prepare(task, config)
    simulation = make_simulation(prepared, config)
    judge = evaluate.of(task.test.select(prepared.evaluated.columns))
    every = min(config.simulation.evaluate_every or config.rounds, config.rounds)
    curves, tests, sent, asked = [], [], 0, 0
    for seed in seeds:
        simulation.restart(seed)
        curve = []
        while simulation.round < config.rounds:
            calls = simulation.run(min(every, config.rounds - simulation.round))
            records = [record for call in calls for record in call]
            sent += sum(record.bytes_down or 0 for record in records)
            asked += sum(record.clients + (record.empty or 0) for record in records)
            found = evaluate(simulation.state.params, kept=simulation.kept_of)
            curve.append(100 * found[metric])
            progress(Status(simulation.round, config.rounds, records[-1].loss, found))
        curves.append(curve)
        tests.append(100 * judge(simulation.state.params, kept=simulation.kept_of)[metric])
    rounds = [min(every * (i + 1), config.rounds) for i in range(len(curves[0]))]
    whole = sum(leaf.nbytes for leaf in simulation.state.params.values())
    down = sent / max(asked, 1)
    seconds = time.perf_counter() - began
    return Trials(variant, rounds, np.array(curves), np.array(tests), down, down / whole, seconds)


def compare(
    task: Task,
    config: Config,
    variants: Sequence[Variant],
    seeds: Sequence[int],
    metric: str,
    progress: OnStatus,
    folder: Path,
) -> list[Trials]:
    """Run all variants, one after the other. They differ in training, not in evaluation, so one program
    evaluates them all."""
    evaluate = make_evaluator(prepare(task, config), config, task.validation, task.test)
    done = []
    for number, variant in enumerate(variants, 1):
        part = f"{variant.name} ({number} of {len(variants)})"
        shown: Callable[[Status], None] = lambda status, part=part: progress(status._replace(part=part))
        found = once(
            folder,
            [config.to_toml(), task, variant, list(seeds)],
            lambda v=variant, s=shown: run_trials(task, config, v, seeds, metric, s, evaluate).told(),
        )
        done.append(Trials.of(variant, found))
    return done


def draw_curves(path: Path, panels: Mapping[str, Sequence[Trials]], label: str, quick: bool = False) -> None:
    """Mean over trials by round, with the standard deviation shaded; a panel for each group of variants."""
    figure = Figure(figsize=(4.2 * len(panels) + 0.6, 3.6), layout="constrained")
    all_axes = np.atleast_1d(figure.subplots(1, len(panels), sharey=True))
    for axes, (title, trials) in zip(all_axes, panels.items(), strict=True):
        for each in trials:
            draw_band(axes, each.rounds, each.curves, label=each.variant.name)
        axes.set(xlabel="round", title=title)
        axes.legend(frameon=False, fontsize=7)
    all_axes[0].set_ylabel(label)
    save_picture(path, figure, quick)


def draw_sizes(
    path: Path, groups: Mapping[str, Sequence[Mapping[str, Any]]], label: str, quick: bool = False
) -> None:
    """The metric of the test clients against the size of what a client is sent. Rows are results of
    `Trials.row`."""
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axes = figure.subplots()
    for title, rows in groups.items():
        inner = sorted(rows, key=lambda row: row["relative_size"])
        axes.errorbar(
            [row["relative_size"] for row in inner],
            [row["ours"] for row in inner],
            [row["spread"] for row in inner],
            marker="o",
            markersize=4,
            linewidth=1.2,
            capsize=2,
            label=title,
        )
    axes.set(xlabel="size of a client's model, relative to the server's", ylabel=label, xscale="log")
    axes.legend(frameon=False, fontsize=8)
    save_picture(path, figure, quick)
