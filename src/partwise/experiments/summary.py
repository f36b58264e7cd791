"""What is told of a run when it has ended."""

from __future__ import annotations

import math
import platform
import resource
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np

from partwise.config.algorithms import Prepared
from partwise.config.settings import Config
from partwise.experiments.checks import left_out
from partwise.model.spec import one_per_example
from partwise.tasks import Task


def summarize_run(
    task: Task, config: Config, records: Sequence[Mapping[str, Any]], test: Mapping[str, Any]
) -> dict[str, Any]:
    """summary.json, but for the seconds."""
    clients = max(sum(r["clients"] + r["empty"] + len(r["broken"]) for r in records), 1)
    seconds = [record["seconds"] for record in records]
    return {
        "task": config.task,
        "algorithm": config.algorithm,
        "seed": config.seed,
        "rounds": config.rounds,
        "seconds_per_round": float(np.median(seconds)) if seconds else math.nan,
        "test": dict(test),
        "not_finite": not_finite(test),
        "best": dict(task.best),
        **left_out(records),
        "fewer": _fewer(task),
        "serving": config.serving.way,
        "bytes_down_per_client": sum(record["bytes_down"] for record in records) / clients,
        "bytes_up_per_client": sum(record["bytes_up"] for record in records) / clients,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("partwise", "jax", "optax", "numpy")},
        },
    }


def _fewer(task: Task) -> dict[str, tuple[int, int]]:
    """Options of which the data had less than was asked for, such as words: asked, there."""
    pairs = {name: (task.loaded.get(name), there) for name, there in task.options.items()}
    return {
        name: (asked, there)
        for name, (asked, there) in pairs.items()
        if isinstance(asked, int) and isinstance(there, int) and there < asked
    }


def judged(task: Task, prepared: Prepared, config: Config, split: str = "test") -> dict[str, str]:
    """Which clients were judged, with which parameters, and what weighs how much in a mean."""
    partition, keeps = prepared.evaluated.partition, prepared.evaluation(prepared.rates).judged_with
    if not partition.local_paths:
        local = "none"
    elif keeps:
        local = "as the client kept it"
    elif config.reconstruct.method == "skip" and config.evaluation.local == "rebuilt":
        local = "as it begins"
    else:
        local = {
            "tuned": "as the server trained it, then fine-tuned",
            "trained": "as the server trained it",
        }.get(config.evaluation.local, "rebuilt")
    tuned = config.fine_tune.max_steps != 0 and not (task.seen or keeps)
    weigh = prepared.evaluated.model.weight
    known = weigh is one_per_example or weigh.__name__.startswith("<")
    return {
        "clients": "seen" if task.seen or split == "train" else "unseen",
        "local": local
        + (", then fine-tuned" if tuned and config.fine_tune.joint and local != "none" else ""),
        "others": "fine-tuned" if tuned else "as trained",
        "weights": "examples" if known else weigh.__name__,
    }


def not_finite(metrics: Mapping[str, Any]) -> list[str]:
    """The metrics that are no finite number, or are not for some client, although there were examples.

    One that is undefined for these examples is not among them."""
    if not metrics["clients"]:
        return []
    known = {name: spread for name, spread in metrics["over_clients"].items() if metrics[name] is not None}
    return [
        name
        for name, spread in known.items()
        if not (math.isfinite(metrics[name]) and math.isfinite(spread.get("mean", 0)))
    ]
