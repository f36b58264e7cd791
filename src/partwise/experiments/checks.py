"""What can be known to go wrong before a round is run, and soon after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from partwise.algorithms.base import init_params
from partwise.algorithms.device import Device, send
from partwise.config.algorithms import Prepared
from partwise.config.settings import Config
from partwise.experiments.folder import Folder
from partwise.randomness import INIT_ROUND, round_rng
from partwise.types import UserError

PATIENCE = 20  # rounds in which nobody counts, before a run is given up

# Why an update was left out, as in the records: in words, and what helps.
LEFT_OUT = {
    "broken": ("updates that were not finite", "lower update.rate or reconstruct.rate"),
    "empty": (
        "clients without query examples",
        "use split.kind=none or alternate with a smaller split.batch_size",
    ),
    "too_small": ("clients with fewer than cohort.min_examples examples", "lower cohort.min_examples"),
    "dropped": ("clients that never reported", "lower cohort.dropout"),
}


def check_cohort(prepared: Prepared) -> None:
    """Raise if a round asks more clients than there are, or if none of them can ever count."""
    wanted, store = prepared.recruiting, prepared.store
    if wanted.asked > store.num_clients:
        most = int(store.num_clients / wanted.over_selection)
        remedy = f"Use --cohort {most} or fewer (cohort.size)" if most else "Lower cohort.over_selection"
        raise UserError(
            f"a round asks {wanted.asked} clients (cohort.size {wanted.size} x cohort.over_selection "
            f"{wanted.over_selection:g}), but there are only {store.num_clients} training clients. {remedy}."
        )
    largest = int(store.counts.max())
    if wanted.min_examples > largest:
        raise UserError(
            f"nobody can take part: cohort.min_examples is {wanted.min_examples}, and the largest of the "
            f"{store.num_clients} training clients has {largest} examples. Lower cohort.min_examples."
        )


def check_fit(prepared: Prepared, config: Config) -> None:
    """Raise if model and partition, or model and algorithm, do not fit, by a look at the largest client."""
    algorithm = prepared.build(prepared.rates)
    examples = prepared.store.gather([int(np.argmax(prepared.store.counts))])
    rng = round_rng(config.seed, INIT_ROUND)
    device = Device(algorithm)
    keys = device.ask(examples).keys
    device.check(send(algorithm.partition, init_params(algorithm, rng), keys, rng), examples)


def check_model(folder: Folder, prepared: Prepared, params: Mapping[str, Any]) -> None:
    """Raise if a run's model has not the shapes that its task and settings now make."""
    algorithm = prepared.evaluation(prepared.rates)
    wanted = jax.eval_shape(lambda: init_params(algorithm, round_rng(0, INIT_ROUND)))
    try:
        found = algorithm.partition.server_leaves(params)
    except KeyError as error:
        raise UserError(f"the model in '{folder.path}' has no {error}: keep the task's settings") from None
    for path, leaf in wanted.items():
        if found[path].shape != leaf.shape:
            raise UserError(
                f"the model in '{folder.path}' has '{path}' of shape {found[path].shape}, and these settings "
                f"make it {leaf.shape}: keep the settings that shape the model (data.*)"
            )


def left_out(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many updates were not used in all rounds, by the reason."""
    number = lambda value: len(value) if isinstance(value, list | tuple) else value
    return {reason: sum(number(record[reason]) for record in records) for reason in LEFT_OUT}


def tell_left_out(counts: Mapping[str, int]) -> str:
    """The same in words; empty if nothing was left out."""
    return ", ".join(f"{count} {LEFT_OUT[reason][0]}" for reason, count in counts.items() if count)


def check_counted(records: Sequence[Mapping[str, Any]], rounds: int) -> None:
    """Raise if no client has counted in the first rounds: what would be learned is nothing."""
    if any(record["clients"] for record in records) or len(records) < min(PATIENCE, rounds):
        return
    counts = left_out(records)
    main = max(counts, key=lambda reason: counts[reason])
    raise UserError(
        f"no client counted in {len(records)} rounds, so nothing was learned: {tell_left_out(counts)}. "
        f"To mend it, {LEFT_OUT[main][1]}."
    )
