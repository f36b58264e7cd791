"""The best model of a run, kept beside its last one (`keep.best`).

While the run goes on, every model that is better than all before is written to checkpoints/, with its round in its
name. It is removed only when no checkpoint can lead back to it. So after a kill, the best model of the rounds up to
the checkpoint is there, and the resumed run keeps the same model as one that nobody interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from partwise.checkpoint import load_arrays
from partwise.config.settings import Config
from partwise.model.spec import Model
from partwise.runs.callbacks import Callback, Records, Start
from partwise.runs.folder import BEST, Folder
from partwise.runs.stopping import Best, WatchedMetric, watch
from partwise.simulation.evaluator import Evaluator
from partwise.tasks import Task
from partwise.types import UserError, counted


class BestModel:
    """Keeps the model whose metric is best, in the run's folder, or in memory if there is none."""

    def __init__(self, metric: WatchedMetric, folder: Folder | None):
        self.best, self._folder = Best(metric), folder
        self._rounds: list[int] = []  # in which a model was the best so far
        self._start: Start | None = None
        self._params: dict[str, np.ndarray] | None = None
        self.callback = Callback(self._begin, self._look)

    def _begin(self, start: Start) -> None:
        self._start = start

    def _look(self, records: Records) -> None:
        for record in records:
            if record["evaluation"] and self.best.look(record):
                self._rounds.append(record["round"])
                if self._start and record["round"] > self._start.round:
                    self._keep(self._start.params())

    def _keep(self, params: dict[str, np.ndarray]) -> None:
        if self._folder is None or not self._folder.writes:
            self._params = params
            return
        self._folder.save_model(params, self._header(), self._place(self.best.round))
        self._remove_old(self._folder)

    def _remove_old(self, folder: Folder) -> None:
        """Remove the models that are not the best, neither now nor at a checkpoint."""
        if not folder.writes:
            return
        led_to = {max((r for r in self._rounds if r <= c), default=0) for c in folder.checkpoints()}
        for number in self._rounds[:-1]:
            if number not in led_to:
                (folder.path / self._place(number)).unlink(missing_ok=True)

    def _header(self) -> dict[str, Any]:
        return {"round": self.best.round, "metric": self.best.metric.name, "value": self.best.value}

    def _place(self, number: int) -> Path:
        return Path("checkpoints") / f"best-{number:08d}.safetensors"

    def end(self) -> tuple[Mapping[str, Any], dict[str, Any]] | None:
        """The best model, and what is said of it, when the run has ended; None if no evaluation had a value. In the
        folder, it is then best.safetensors."""
        if not self.best.round:
            return None
        if self._folder is None or self._params is not None:
            return self._params or {}, self._header()
        arrays, header = load_arrays(self._folder.path / self._place(self.best.round))
        if (header.get("round"), header.get("run")) != (self.best.round, self._folder.run):
            raise UserError(
                f"'{self._folder.path / self._place(self.best.round)}' is of another round or run"
            )
        self._folder.save_model(arrays, self._header(), BEST)
        self._remove_old(self._folder)
        return arrays, self._header()

    def tell_nothing(self) -> str:
        """The message for a run that kept no model."""
        name, looks = self.best.metric.name, self.best.since
        if not looks:
            return f"keep.best = {name} kept no model: the validation clients were never evaluated. Run more rounds"
        return (
            f"keep.best = {name} kept no model: {name} of the validation clients was no finite number in "
            f"{counted(looks, 'evaluation')}. Name another metric, or lower the rates if the loss is none either"
        )


def best_model(config: Config, task: Task, model: Model, folder: Folder | None) -> BestModel | None:
    """What keeps the best model, if a configuration asks for it."""
    if not config.keep.best:
        return None
    return BestModel(watch("keep.best", config.keep.best, task, model, config), folder)


def tell_best(best: tuple[Mapping[str, Any], dict[str, Any]], on_test: Evaluator) -> dict[str, Any]:
    """What the summary says of the best model: its round, its metric, and the metrics of the test clients, unless
    these are evaluated with what they kept, which belongs to the last model."""
    params, told = best
    return told | {"test": None if on_test.algorithm.judged_with else on_test(params)}
