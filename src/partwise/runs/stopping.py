"""When a run ends before its last round: a metric that gets no better, or a budget of seconds (`stop.*`).

A run that goes wrong is something else: it ends with an error (`simulation.patience`, runs.sanity).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from partwise.checkpoint import load_json, save_json
from partwise.config.settings import Config
from partwise.metrics import PERCENTILES
from partwise.model.spec import Model, Pooled
from partwise.runs.callbacks import Callback, Records, Start
from partwise.runs.folder import CLOCK
from partwise.tasks import Task
from partwise.types import UserError, counted

OVER_CLIENTS = "over_clients"


class WatchedMetric(NamedTuple):
    """A metric of an evaluation: where it is, and its sign, so that a smaller product is better."""

    name: str
    sign: float

    def value(self, record: Mapping[str, Any]) -> float:
        """Its value in a record, not a number if it has none there."""
        found: Any = record["evaluation"]
        for word in self.name.split("."):
            found = found.get(word) if isinstance(found, Mapping) else None
        return math.nan if found is None else float(found)


def watch(key: str, name: str, task: Task, model: Model, config: Config) -> WatchedMetric:
    """The metric that a setting names. Raises `UserError` if evaluations will not have it."""
    known = _names(model)
    if name not in known:
        raise UserError(f"{key} = {name} is no metric of this task: use one of {', '.join(known)}")
    if not task.validation.num_clients:
        raise UserError(f"{key} = {name} is of the validation clients, and this task has none: leave it out")
    if config.simulation.evaluate_every == 0:
        raise UserError(
            f"{key} = {name} would have no effect: with simulation.evaluate_every = 0, the run is evaluated at its "
            f"end alone"
        )
    metric = model.metrics.get(name.split(".")[1] if name.startswith(f"{OVER_CLIENTS}.") else name)
    return WatchedMetric(name, -1.0 if metric and metric.higher_is_better else 1.0)


def _names(model: Model) -> list[str]:
    """All names that an evaluation's numbers have."""
    names = [*model.metrics, "loss"]
    spread = [name for name in names if not isinstance(model.metrics.get(name), Pooled)]
    parts = ("mean", *(f"p{percent}" for percent in PERCENTILES))
    return [*names, *(f"{OVER_CLIENTS}.{name}.{part}" for name in spread for part in parts)]


class Best:
    """The best evaluation so far."""

    def __init__(self, metric: WatchedMetric, difference: float = 0.0):
        self.metric, self.difference = metric, difference
        self.value, self.round, self.since = math.nan, 0, 0  # since: evaluations after the best one

    def look(self, record: Mapping[str, Any]) -> bool:
        """Whether an evaluated round is the best so far. A value that is no finite number never is."""
        value, sign = self.metric.value(record), self.metric.sign
        first = math.isnan(self.value)
        better = math.isfinite(value) and (first or sign * value < sign * self.value - self.difference)
        if better:
            self.value, self.round, self.since = value, record["round"], 0
        else:
            self.since += 1
        return better


def no_better(metric: WatchedMetric, patience: int, difference: float = 0.0) -> Callback:
    """Ends a run when a metric has got no better in so many evaluations."""
    best = Best(metric, difference)

    def rounds(records: Records) -> str | None:
        for record in records:
            if record["evaluation"] and not best.look(record) and best.since >= patience:
                found = f" than {best.value:.6g} after round {best.round:,}" if best.round else ""
                return (
                    f"{metric.name} got no better{found} in {counted(patience, 'evaluation')} (stop.patience)"
                )
        return None

    return Callback(rounds=rounds)


def time_budget(seconds: float, began: float) -> Callback:
    """Ends a run when it has taken so many seconds since `began` (a `time.perf_counter()`), those before it was
    resumed counted in. They are in the run's folder, where they are written at most once a second."""
    clock: dict[str, Any] = {"before": 0.0, "file": None, "written": began}
    taken = lambda: clock["before"] + time.perf_counter() - began

    def begin(start: Start) -> None:
        clock["file"] = start.folder and Path(start.folder) / CLOCK
        if clock["file"] and clock["file"].exists():
            clock["before"] = load_json(clock["file"])["seconds"]

    def rounds(records: Records) -> str | None:
        over = taken() >= seconds
        if clock["file"] and (over or time.perf_counter() - clock["written"] > 1):
            clock["written"] = time.perf_counter()
            save_json(clock["file"], {"seconds": taken()})
        return f"its {seconds:g} seconds are over (stop.seconds)" if over else None

    return Callback(begin, rounds)


def stops(config: Config, task: Task, model: Model, began: float) -> list[Callback]:
    """The callbacks of a configuration's `stop`."""
    part, found = config.stop, []
    if part.metric:
        metric = watch("stop.metric", part.metric, task, model, config)
        found.append(no_better(metric, part.patience, part.difference))
    if part.seconds is not None:
        found.append(time_budget(part.seconds, began))
    return found
