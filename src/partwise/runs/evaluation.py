"""Evaluates a recorded run again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from partwise.algorithms.effects import check_judging
from partwise.algorithms.entry import Prepared
from partwise.algorithms.registry import prepare
from partwise.config.settings import Config
from partwise.metrics import Sums
from partwise.runs.backends import lanes_of, make_evaluator, make_simulation
from partwise.runs.folder import Folder
from partwise.runs.per_client import client_table, labelled
from partwise.runs.resolve import as_trained, check_data, check_other_data, reopened
from partwise.runs.sanity import check_model
from partwise.runs.summary import judged
from partwise.simulation.evaluator import Evaluator, KeptOf, summarize
from partwise.simulation.mesh import use_all_cores
from partwise.tasks import Task, is_code
from partwise.types import UserError

if TYPE_CHECKING:
    import pyarrow as pa

SPLITS = ("train", "validation", "test")
NOT_WITH_KEPT = (
    "these clients are evaluated with what they keep from round to round, which is of the run's last model: "
    "evaluate that one"
)


class JudgedRun(NamedTuple):
    """A run whose clients were evaluated again: their metrics, and what they are made of."""

    metrics: dict[str, Any]
    evaluate: Evaluator
    sums: Mapping[str, Sums]
    config: Config
    split: str

    def table(self, groups: Mapping[Any, Any] | None = None) -> pa.Table:
        """The metrics of every client (see `runs.per_client.client_table`). `groups`, {client id: group}, is a
        column of it."""
        return labelled(client_table(self.evaluate, self.sums, groups), self.config, self.split)


def evaluate_run(run: str | Path, split: str = "test", **how: Any) -> dict[str, Any]:
    """The metrics of a recorded run that is evaluated again, and under `judged` how that was done. Takes what
    `judge_run` takes."""
    return judge_run(run, split, **how).metrics


def judge_run(
    run: str | Path,
    split: str = "test",
    changes: Mapping[str, Any] | None = None,
    data: str | None = None,
    task: str | Task | None = None,
    model: str = "last",
) -> JudgedRun:
    """Evaluate a recorded run again, with other settings if wanted (for example more reconstruction steps).

    Args:
        run: The run's folder.
        split: The clients to evaluate: "train", "validation" or "test".
        changes: Settings of evaluation as dotted keys.
        data: Where the run's data is, if it has moved.
        task: The task of the run, if it was made in Python: the Task, or the name of a function that makes it
            (`module:function`).
        model: "last", or "best", the one that the run kept (`keep.best`).

    Returns:
        The metrics of these clients, among them `judged` (how they were evaluated), and a table of every client.
    """
    check_split(split)
    check_judging(changes or {})
    use_all_cores()
    folder = Folder(run)
    params = folder.model(model)
    task, config = reopened(folder, data, changes or {}, task)
    others = [key for key in changes or {} if key.startswith("data.") and key != "data.path"]
    if others:
        check_other_data(folder, task, others)
    else:
        check_data(folder, task)
    if others or not is_code(task.name):  # code has just made it with the run's own options
        task = as_trained(folder, task)
    prepared = prepare(task, config)
    check_model(folder, prepared, params)
    evaluate = make_evaluator(prepared, config, getattr(task, split))
    if evaluate.algorithm.judged_with and model == "best":
        raise UserError(NOT_WITH_KEPT)
    kept = kept_in(folder, prepared, config) if evaluate.algorithm.judged_with else None
    sums, pairs = evaluate.measure(params, kept=kept)
    told = judged(task, prepared, config, split)
    if others and split != "train":
        told["clients"] = "other (some may have been trained on)"
    metrics = summarize(evaluate.algorithm.model, sums, pairs) | {"judged": told}
    return JudgedRun(metrics, evaluate, sums, config, split)


def check_split(split: str) -> None:
    """Raise `UserError` if there are no such clients."""
    if split not in SPLITS:
        raise UserError(f"the split must be one of {', '.join(SPLITS)}, not '{split}' (--split, split=)")


def kept_in(folder: Folder, prepared: Prepared, config: Config) -> KeptOf:
    """What the clients of a finished run kept, from its last checkpoint."""
    simulation, rounds = make_simulation(prepared, config, lanes_of(folder)), folder.rounds_trained()
    if rounds != folder.rounds_done():
        raise UserError(
            f"the clients of the run in '{folder.path}' are evaluated with what they kept, and its checkpoints, "
            f"which hold it, are gone: train it again"
        )
    saved = folder.checkpoint(rounds, simulation.current())
    simulation.resume(saved.state, saved.round)
    return simulation.kept_of
