"""Evaluates a recorded run again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partwise.algorithms.effects import check_judging
from partwise.algorithms.entry import Prepared
from partwise.algorithms.registry import prepare
from partwise.config.settings import Config
from partwise.runs.backends import lanes_of, make_evaluator, make_simulation
from partwise.runs.folder import Folder
from partwise.runs.resolve import as_trained, check_data, check_other_data, reopened
from partwise.runs.sanity import check_model
from partwise.runs.summary import judged
from partwise.simulation.evaluator import Evaluator, KeptOf
from partwise.simulation.mesh import use_all_cores
from partwise.types import UserError

SPLITS = ("train", "validation", "test")


def evaluate_run(
    run: str | Path,
    split: str = "test",
    changes: Mapping[str, Any] | None = None,
    data: str | None = None,
) -> dict[str, Any]:
    """Evaluate a recorded run again, with other settings if wanted (for example more reconstruction steps).

    Args:
        run: The run's folder.
        split: The clients to evaluate: "train", "validation" or "test".
        changes: Settings of evaluation as dotted keys.
        data: Where the run's data is, if it has moved.

    Returns:
        The metrics of these clients, and under `judged` how they were evaluated.
    """
    if split not in SPLITS:
        raise UserError(f"the split must be one of {', '.join(SPLITS)}, not '{split}' (--split, split=)")
    check_judging(changes or {})
    use_all_cores()
    folder = Folder(run)
    params = folder.model()
    task, config = reopened(folder, data, changes or {})
    others = [key for key in changes or {} if key.startswith("data.") and key != "data.path"]
    if others:
        check_other_data(folder, task, others)
    else:
        check_data(folder, task)
    task = as_trained(folder, task)
    prepared = prepare(task, config)
    check_model(folder, prepared, params)
    evaluate = make_evaluator(prepared, config, getattr(task, split))
    result = evaluate(params, kept=_kept_of(folder, prepared, config, evaluate))
    told = judged(task, prepared, config, split)
    if others and split != "train":
        told["clients"] = "other (some may have been trained on)"
    return result | {"judged": told}


def _kept_of(folder: Folder, prepared: Prepared, config: Config, evaluate: Evaluator) -> KeptOf | None:
    """What the clients of a finished run kept, from its last checkpoint; None if they are not evaluated with
    it."""
    if not evaluate.algorithm.judged_with:
        return None
    simulation = make_simulation(prepared, config, lanes_of(folder))
    if config.rounds != folder.rounds_done():
        raise UserError(
            f"the clients of the run in '{folder.path}' are judged with what they kept, and its checkpoints, which "
            f"hold it, are gone: train it again"
        )
    saved = folder.checkpoint(config.rounds, simulation.snapshot())
    simulation.resume(saved.state, saved.round)
    return simulation.kept_of
