"""What is said about a run when it has ended."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from partwise.algorithms.entry import Prepared
from partwise.config.judged import AS_KEPT
from partwise.config.parts import make_evaluation_split
from partwise.config.settings import Config
from partwise.model.spec import one_per_example
from partwise.runs.sanity import examples_used, left_out
from partwise.runs.tally import Tally
from partwise.runs.versions import versions
from partwise.simulation.processes import num_processes
from partwise.tasks import Task

ENOUGH_LOOKS = 5  # fewer evaluations do not show whether the loss rises
WORSE = 0.05  # a validation loss that is larger than the lowest by this share of it is worth a warning


def summarize_run(
    task: Task, prepared: Prepared, config: Config, tally: Tally, test: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of summary.json, except the seconds."""
    clients = max(sum(tally.sums[reason] for reason in ("clients", "empty", "broken")), 1)
    private = config.privacy.clip is not None  # then how many were left out, and why, is not recorded
    return {
        "task": config.task,
        "algorithm": config.algorithm,
        "seed": config.seed,
        "rounds": tally.rounds,
        "seconds_per_round": tally.median_seconds(),
        "test": dict(test),
        "not_finite": not_finite(test),
        "better": better(prepared),
        "best": best_reachable(task, prepared, config),
        **{reason: None if private else count for reason, count in left_out(tally).items()},
        "outliers": tally.outlier and {"updates": tally.sums["outliers"], "first": tally.outlier},
        "examples": examples_used(task, prepared, config),
        "validation": validation(tally, _watched(config), better(prepared)),
        "fewer": _fewer(task),
        "serving": config.serving.way,
        **_bytes_per_client(config, tally, clients),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "device": device_words(),
        "versions": versions(),
    }


def better(prepared: Prepared) -> dict[str, str]:
    """Whether lower or higher values are better, by metric."""
    metrics = prepared.evaluated.model.metrics
    return {name: "higher" if metric.higher_is_better else "lower" for name, metric in metrics.items()} | {
        "loss": "lower"
    }


def _bytes_per_client(config: Config, tally: Tally, clients: int) -> dict[str, float | None]:
    """What a client fetched and sent; None if clients are promised privacy, as it tells how many keys they have."""
    names = ("bytes_down", "bytes_up")
    known = config.privacy.clip is None
    return {f"{name}_per_client": tally.sums[name] / clients if known else None for name in names}


def device_words() -> str:
    """The devices of the run, in words."""
    among = f" in {num_processes()} processes" if num_processes() > 1 else ""
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}{among}"


def best_reachable(task: Task, prepared: Prepared, config: Config) -> dict[str, float]:
    """The lowest error that any method can reach on the test clients, with the same evaluation; empty if
    unknown."""
    kept = prepared.evaluation(prepared.rates).judged_with
    on_query = bool(prepared.evaluated.partition.local_paths) and not (task.seen or kept)
    return dict(task.best(make_evaluation_split(config) if on_query else None))


def _fewer(task: Task) -> dict[str, tuple[int, int]]:
    """Options of which the data had less than was asked for, such as words: {option: (asked, found)}."""
    pairs = {name: (task.loaded.get(name), there) for name, there in task.options.items()}
    return {
        name: (asked, there)
        for name, (asked, there) in pairs.items()
        if isinstance(asked, int) and isinstance(there, int) and there < asked
    }


def judged(task: Task, prepared: Prepared, config: Config, split: str = "test") -> dict[str, str]:
    """Which clients were evaluated, with which parameters, and what is weighted how in a mean."""
    partition, keeps = prepared.evaluated.partition, prepared.evaluation(prepared.rates).judged_with
    if keeps:
        local = AS_KEPT
    elif not partition.local_paths:
        local = "none"
    elif config.reconstruct.method == "skip" and config.evaluation.local == "rebuilt":
        local = "as it begins"
    else:
        local = {
            "tuned": "as the server trained it, then fine-tuned",
            "trained": "as the server trained it",
        }.get(config.evaluation.local, "rebuilt")
    tuned = config.fine_tune.max_steps != 0 and not (task.seen or keeps)
    return {
        "clients": _seen(task, split),
        "local": local
        + (", then fine-tuned" if tuned and config.fine_tune.joint and local != "none" else ""),
        "others": "fine-tuned" if tuned else "as trained",
        "weights": _weights(prepared.evaluated.model.weight),
        "split": _split(task, prepared, config),
    }


def _seen(task: Task, split: str) -> str:
    """Whether the evaluated clients were in the training, judged by their ids."""
    clients = getattr(task, split).client_ids
    known = int(np.isin(clients, task.train.client_ids).sum()) if len(clients) else 0
    if 0 < known < len(clients):
        return f"some seen ({known:,} of {len(clients):,}), some unseen"
    return "seen" if known or task.seen else "unseen"


def _split(task: Task, prepared: Prepared, config: Config) -> str:
    """Which of its examples a client was evaluated on; empty if on all."""
    own = bool(prepared.evaluated.partition.local_paths) or config.fine_tune.max_steps != 0
    if not own or task.seen or prepared.evaluation(prepared.rates).judged_with:
        return ""
    part, trained = config.evaluation_split, config.split
    if part.kind != "same":
        return part.kind
    if trained.kind not in ("none", "random"):
        return trained.kind
    return f"alternate, as split.kind = {trained.kind} is of training alone"


def _weights(weigh: Callable[..., Any]) -> str:
    """What has the same weight in a mean: examples, or what a named weight function counts."""
    name = getattr(weigh, "__name__", "<")
    if weigh is one_per_example:
        return "examples"
    return "by the model's own weight" if name.startswith("<") else name


def _watched(config: Config) -> str:
    """The metric of which a summary says when it was best: that of `keep.best`, if it is one of all examples."""
    return config.keep.best if config.keep.best and "." not in config.keep.best else "loss"


def validation(tally: Tally, metric: str, ways: Mapping[str, str]) -> dict[str, Any] | None:
    """The best value of a metric of the validation clients, after which round it was, and the last value; None if
    it never had one."""
    if metric not in tally.ranges:
        return None
    low, high, last = tally.ranges[metric]
    best, number = high if ways[metric] == "higher" else low
    return {"metric": metric, "best": best, "round": number, "end": last[0]}


def past_its_best(tally: Tally) -> str:
    """The message for a run whose validation loss was clearly lower in an earlier round; empty for others."""
    looks = [point for point in tally.curve() if point["evaluation"]]
    losses = [(look["evaluation"].get("loss"), look["round"]) for look in looks]
    known = [(loss, number) for loss, number in losses if loss is not None and math.isfinite(loss)]
    if len(known) < ENOUGH_LOOKS or known[-1] != losses[-1]:
        return ""
    (best, number), (last, end) = min(known), known[-1]
    if last <= best + WORSE * abs(best):
        return ""
    return (
        f"the validation loss was lowest after round {number:,} ({best:.4g}) and is {last:.4g} after round "
        f"{end:,}: the model fits its training clients ever closer, and others worse. Train for fewer rounds "
        f"(--rounds {number}), end the run in time (--set stop.metric=loss), keep its best model (--set "
        f"keep.best=loss), or use a smaller model or lower rates"
    )


def not_finite(metrics: Mapping[str, Any]) -> list[str]:
    """The metrics that are not finite, for all clients together or for some client, although there were
    examples. A metric that is undefined for these examples is not included."""
    if not metrics["clients"]:
        return []
    known = {name: spread for name, spread in metrics["over_clients"].items() if metrics[name] is not None}
    return [
        name
        for name, spread in known.items()
        if not (math.isfinite(metrics[name]) and math.isfinite(spread.get("mean", 0)))
    ]


def nobody_judged(split: str) -> str:
    """The message for an evaluation without clients."""
    return (
        f"no {split} client has an example to be judged on, so there is no result: clients need more examples, or "
        f"another evaluation_split (its query set is empty)"
    )


def tell_not_finite(names: Sequence[str], split: str) -> str:
    """The message for metrics that are not finite."""
    return (
        f"{', '.join(names)} of the {split} clients is not a finite number: the model cannot be used by some "
        f"of them. Lower reconstruct.rate or update.rate."
    )
