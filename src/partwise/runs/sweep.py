"""A grid of rates and seeds, trained side by side and evaluated on the validation clients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from partwise.algorithms.registry import prepare
from partwise.config.protection import Protection, protection
from partwise.config.settings import Config
from partwise.runs.backends import make_evaluator
from partwise.runs.train import OnStatus, Status, silent
from partwise.simulation.many_runs import Sweep
from partwise.tasks import Task
from partwise.types import UserError, unknown

# Settings that are values in a compiled program, and their names in an algorithm's rates.
RATES = {
    "reconstruct.rate": "reconstruct",
    "reconstruct.pull": "pull",
    "update.rate": "update",
    "server.rate": "server",
    "fine_tune.rate": "fine_tune",
}


class Trial(NamedTuple):
    """One run of a sweep."""

    changes: Mapping[str, float]  # its rates, as keys of the configuration
    seed: int
    params: Mapping[str, Any]
    validation: Mapping[str, Any]
    losses: np.ndarray  # [rounds] training loss
    privacy: Mapping[str, Any] | None = None  # what all trials of the sweep together promise; None: nothing


def grid_of(choices: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    """Every combination of the choices."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def sweep(
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
    prepared = prepare(task, _with_noise(config, promised))
    named = [{RATES[key]: value for key, value in changes.items()} for changes, _ in pairs]
    for name in {name for each in named for name in each} - set(prepared.rates):
        raise UserError(f"a sweep over the rate '{name}' needs a configuration that uses it")
    rates = [{**prepared.rates, **each} for each in named]
    runs = Sweep(prepared.build, rates, [seed for _, seed in pairs], prepared.store, prepared.recruiting)
    losses = []
    for outcome in runs.run(config.rounds):
        with np.errstate(invalid="ignore"):
            losses.append(outcome.loss.value / outcome.loss.weight)
        last = losses[-1][:, -1]
        progress(
            Status(
                runs.round, config.rounds, float(np.min(last, initial=np.inf, where=np.isfinite(last))), None
            )
        )
    evaluate = make_evaluator(prepared, config, task.validation)
    curves = np.concatenate(losses, axis=1) if losses else np.zeros((len(pairs), 0))
    told = promised and promised.promise(config.rounds)
    trials = []
    for i, (changes, seed) in enumerate(pairs):
        params = {path: np.asarray(leaf) for path, leaf in runs.params(i).items()}
        trials.append(Trial(changes, seed, params, evaluate(params, rates[i]), curves[i], told))
    return trials


def _with_noise(config: Config, promised: Protection | None) -> Config:
    """The configuration with the noise that keeps the budget for all trials together, as each of them looks at the
    same clients. Raises `UserError` if a given noise does not."""
    if promised is None:
        return config
    if promised.most_rounds(config.rounds) < config.rounds:
        raise UserError(
            f"{promised.rounds.trials} trials of {config.rounds} rounds cost more than privacy.epsilon = "
            f"{promised.budget:g}: leave privacy.noise out, and it is found, or try fewer rates"
        )
    return config.changed({"privacy.noise": promised.rounds.noise})


def best_of(trials: Sequence[Trial], metric: str) -> Trial:
    """The trial with the lowest metric on the validation clients. Runs that diverged come last."""
    value = lambda trial: trial.validation[metric]
    return min(trials, key=lambda trial: value(trial) if np.isfinite(value(trial)) else np.inf)
