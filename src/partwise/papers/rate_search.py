"""A grid of rates and seeds, trained side by side in memory and evaluated on the validation clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from partwise.algorithms.registry import prepare
from partwise.config.protection import protection
from partwise.config.settings import Config
from partwise.runs.backends import make_evaluator
from partwise.runs.sweep_plan import RATES
from partwise.runs.train import OnStatus, Status, silent
from partwise.runs.trials import composed
from partwise.simulation.many_runs import Sweep
from partwise.tasks import Task
from partwise.types import UserError, unknown


class Trial(NamedTuple):
    """One run of a sweep."""

    changes: Mapping[str, float]  # its rates, as keys of the configuration
    seed: int
    params: Mapping[str, Any]
    validation: Mapping[str, Any]
    losses: np.ndarray  # [rounds] training loss
    privacy: Mapping[str, Any] | None = None  # what all trials of the sweep together promise; None: nothing


def search_rates(
    task: Task,
    config: Config,
    grid: Sequence[Mapping[str, float]],
    seeds: Sequence[int],
    progress: OnStatus = silent,
) -> list[Trial]:
    """Train every set of rates with every seed, in one compiled program; evaluate each on validation clients."""
    for key in {key for changes in grid for key in changes}:
        if key not in RATES:
            raise unknown("key of a sweep", key, RATES)
    pairs = [(dict(changes), seed) for changes in grid for seed in seeds]
    promised = protection(config, task.train.num_clients, len(pairs))
    prepared = prepare(task, composed(config, task.train.num_clients, len(pairs)))
    named = [{RATES[key]: value for key, value in changes.items()} for changes, _ in pairs]
    for name in {name for each in named for name in each} - set(prepared.rates):
        raise UserError(f"a sweep over the rate '{name}' needs a configuration that uses it")
    rates = [{**prepared.rates, **each} for each in named]
    runs = Sweep(prepared.build, rates, [seed for _, seed in pairs], prepared.store, prepared.recruiting)
    losses = []
    for call in runs.run(config.rounds):
        losses.append(np.array([[record.loss for record in records] for records in call]))
        last = losses[-1][:, -1]
        lowest = float(np.min(last, initial=np.inf, where=np.isfinite(last)))
        progress(Status(runs.round, config.rounds, lowest, None))
    evaluate = make_evaluator(prepared, config, task.validation)
    curves = np.concatenate(losses, axis=1) if losses else np.zeros((len(pairs), 0))
    told = promised and promised.promise(config.rounds)
    trials = []
    for i, (changes, seed) in enumerate(pairs):
        params = {path: np.asarray(leaf) for path, leaf in runs.params(i).items()}
        trials.append(Trial(changes, seed, params, evaluate(params, rates[i]), curves[i], told))
    return trials


def best_of(trials: Sequence[Trial], metric: str) -> Trial:
    """The trial with the lowest metric on the validation clients. Runs that diverged come last."""
    value = lambda trial: trial.validation[metric]
    return min(trials, key=lambda trial: value(trial) if np.isfinite(value(trial)) else np.inf)
