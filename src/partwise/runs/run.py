"""A finished run: its results, its records, its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from partwise.algorithms.entry import Prepared
from partwise.algorithms.registry import prepare
from partwise.config.settings import Config
from partwise.runs.backends import make_evaluator
from partwise.runs.client_file import source_of
from partwise.runs.evaluation import NOT_WITH_KEPT, check_split, judge_run, kept_in
from partwise.runs.per_client import client_table, labelled
from partwise.runs.personal import Personal, warn_of_kept
from partwise.runs.recorder import Recorder
from partwise.simulation.evaluator import KeptOf
from partwise.tasks import Task
from partwise.types import UserError

if TYPE_CHECKING:
    import pyarrow as pa


class Reopened(NamedTuple):
    """What a run that was opened again loads when it is asked for.

    task:     its task, with its data
    personal: "last" or "best" -> that model for one client
    """

    task: Callable[[], Task]
    personal: Callable[[str], Personal]


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A finished run: its results and its model. `partwise.load` opens one again.

    Attributes:
        config: All settings, resolved.
        task: What was trained. Of a run that was opened again, it is loaded, with its data, at the first use.
        params: The server's parameters, {path: array}. Keyed leaves have one row per key. Local leaves are
            not included.
        summary: The content of summary.json: test metrics, bytes, seconds, versions.
        recorded: Where the records are.
        best_params: The parameters of the best model, if one was kept (`keep.best`).
        kept_of: What clients keep, if they are evaluated with it.
        model: Which of the run's models `params` are: "last" or "best".
    """

    config: Config
    made_of: Task | Reopened
    params: Mapping[str, Any]
    summary: Mapping[str, Any]
    recorded: Recorder
    best_params: Mapping[str, Any] | None = None
    kept_of: KeptOf | None = None
    model: str = "last"

    def __repr__(self) -> str:
        told = {name: value for name, value in self.test.items() if isinstance(value, float)}
        return f"Run({self.config.algorithm} on {self.config.task}, {self.config.rounds} rounds, test {told})"

    @cached_property
    def task(self) -> Task:
        """What was trained."""
        return self.made_of.task() if isinstance(self.made_of, Reopened) else self.made_of

    @property
    def records(self) -> list[dict[str, Any]]:
        """The record of every round. They are read from the run's folder, or from memory if it has none."""
        return self.recorded.records()

    @property
    def test(self) -> Mapping[str, Any]:
        """The metrics of the test clients."""
        return self.summary["test"]

    @property
    def best(self) -> Run:
        """The same run with its best model in place of its last one (`keep.best`)."""
        params = self.best_params
        if params is None and isinstance(self.made_of, Reopened) and self.recorded.folder:
            params = self.recorded.folder.model("best")
        if params is None:
            raise UserError(
                "this run kept no best model: train with keep__best='METRIC' (--set keep.best=METRIC)"
            )
        return replace(self, params=params, kept_of=None, model="best")

    def clients(self, split: str = "test", groups: Mapping[Any, Any] | None = None) -> pa.Table:
        """The metrics of every client by its id, evaluated anew.

        Args:
            split: The clients: "train", "validation" or "test".
            groups: {client id: group}, a column of the table.

        Returns:
            An Arrow table, a row for every client. `partwise.fairness` tells how evenly they are served.
        """
        check_split(split)
        prepared = prepare(self.task, self.config)
        evaluate = make_evaluator(prepared, self.config, getattr(self.task, split))
        kept = self._kept_of(prepared) if evaluate.algorithm.judged_with else None
        sums = evaluate.sums(self.params, kept=kept)
        return labelled(client_table(evaluate, sums, groups), self.config, split)

    def kept(self, client: Any) -> dict[str, np.ndarray]:
        """The parameters that a training client has kept, if the algorithm evaluates clients with them (FedPer,
        LG-FedAvg, FedRep on tasks of seen clients). `run.personal.predict(run.kept(client), its_examples)` is then
        the model that was evaluated.

        Args:
            client: The client's id.

        Returns:
            {path: array}.
        """
        prepared = prepare(self.task, self.config)
        if not prepared.evaluation(prepared.rates).judged_with:
            raise UserError(
                f"{self.config.algorithm} does not evaluate clients with what they keep: rebuild the client's "
                f"local part with run.personal.personalize(its_examples)"
            )
        if client not in prepared.store.client_ids:
            raise UserError(
                f"client {client!r} is not one of the {prepared.store.num_clients:,} that trained"
            )
        found = {path: leaf[0] for path, leaf in self._kept_of(prepared)(np.array([client])).items()}
        if not any(leaf.any() for leaf in found.values()):
            raise UserError(f"client {client!r} never took part in a round, so it has kept nothing")
        return {path: leaf for path, leaf in found.items() if path in prepared.evaluated.partition.roles}

    def _kept_of(self, prepared: Prepared) -> KeptOf:
        """What clients keep; it is that of the last model."""
        if self.model == "best":
            raise UserError(NOT_WITH_KEPT)
        if self.kept_of is not None:
            return self.kept_of
        if self.recorded.folder is None:
            raise UserError(
                "this run has no folder, where what its clients keep would be: train with out=..."
            )
        return kept_in(self.recorded.folder, prepared, self.config)

    @property
    def personal(self) -> Personal:
        """The trained model for one client, which rebuilds and uses its local part offline. If clients were
        evaluated with what they had kept, `kept` returns that, and this rebuilds another one, with a warning."""
        if isinstance(self.made_of, Reopened):
            return self.made_of.personal(self.model)
        warn_of_kept(self.summary)
        return Personal(self.config, self.task.personal, self.params, source_of(self.task.train))

    def evaluate(self, split: str = "test", changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Evaluate the run again, perhaps with other settings. The run must have a folder.

        Args:
            split: The clients to evaluate: "train", "validation" or "test".
            changes: Settings of evaluation as dotted keys.

        Returns:
            The metrics of these clients, and under `judged` how they were evaluated.
        """
        if self.recorded.folder is None:
            raise UserError(
                "this run has no folder, and only a recorded one is evaluated again: train with out=..."
            )
        path = self.recorded.folder.path
        return judge_run(path, split, changes, task=self.task, model=self.model).metrics
