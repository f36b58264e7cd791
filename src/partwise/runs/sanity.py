"""Checks for problems that can be found before the first round, or soon after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np

from partwise.algorithm import init_params
from partwise.algorithms.entry import Prepared
from partwise.algorithms.registry import find_algorithm
from partwise.config.parts import make_split
from partwise.config.settings import Config
from partwise.device import Device
from partwise.model.partition import DEFAULT
from partwise.randomness import INIT_ROUND, round_rng
from partwise.runs.folder import Folder
from partwise.server.messages import send
from partwise.tasks.base import WHOLE, Setting, Task
from partwise.types import DivergedError, UserError, counted

if TYPE_CHECKING:  # a client on its own imports this module, and trains nothing
    from partwise.runs.cause import Cause
    from partwise.runs.tally import Tally

MOST_TOLD = 6  # leaves that one message names
ALONE = 2  # rounds that may go wrong if one client has all examples
RATES = (
    "update.rate",
    "reconstruct.rate",
    "server.rate",
)  # of a training, the likeliest cause of trouble first
# Why an update was not used, as in the records: words for one, words for several, and a remedy.
LEFT_OUT = {
    "broken": (
        "update that was not finite",
        "updates that were not finite",
        "lower {rates}",
    ),
    "empty": (
        "client without query examples that count",
        "clients without query examples that count",
        "give clients more examples, or use split.kind=none, with which all their examples are query examples",
    ),
    "too_small": (
        "client with fewer than cohort.min_examples examples",
        "clients with fewer than cohort.min_examples examples",
        "lower cohort.min_examples",
    ),
    "dropped": ("client that never reported", "clients that never reported", "lower cohort.dropout"),
}


def check_cohort(prepared: Prepared) -> None:
    """Raise `UserError` if a round asks more clients than there are, or if no client can ever take part."""
    wanted, store = prepared.recruiting, prepared.store
    if not store.num_clients:
        raise UserError(
            "the task has no training clients: give it data of more clients, or cut off fewer for validation and "
            "test"
        )
    if wanted.asked > store.num_clients:
        most = int(store.num_clients / wanted.over_selection)
        remedy = f"Use --cohort {most} or fewer (cohort.size)" if most else "Lower cohort.over_selection"
        there = counted(store.num_clients, "training client")
        raise UserError(
            f"a round asks {counted(wanted.asked, 'client')} (cohort.size {wanted.size} x cohort.over_selection "
            f"{wanted.over_selection:g}), but the task has only {there}. {remedy}."
        )
    largest = int(store.counts.max())
    if wanted.min_examples > largest:
        raise UserError(
            f"nobody can take part: cohort.min_examples is {wanted.min_examples}, and the largest of the "
            f"{store.num_clients} training clients has {counted(largest, 'example')}. Lower cohort.min_examples."
        )
    wanted.check(store.num_clients)


def check_fit(prepared: Prepared, config: Config) -> None:
    """Raise `UserError` if the model does not fit the partition or the algorithm. Checked on the largest
    client."""
    from partwise.simulation.table_places import (
        sketched,  # here, as devices check models without a simulation
    )

    algorithm = (prepared.checked or prepared.build)(prepared.rates)
    examples = prepared.store.gather([int(np.argmax(prepared.store.counts))])
    rng = round_rng(config.seed, INIT_ROUND)
    device = Device(algorithm)
    keys = device.ask(examples).keys
    message = send(algorithm.partition, sketched(algorithm, rng), keys, rng)
    with jax.disable_jit(config.simulation.backend == "eager"):
        device.check(message, examples)


def check_model(folder: Folder, prepared: Prepared, params: Mapping[str, Any]) -> None:
    """Raise `UserError` if a run's model is not finite, or does not have the shapes that its task and
    settings make now."""
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
    check_finite(f"the model in '{folder.path}'", found)


def check_fits(path: Path, setting: Setting, params: Mapping[str, Any]) -> None:
    """Raise `UserError` if the model in a run's folder does not have the names and shapes of a setting."""
    wanted, partition = setting.partition.server_shapes, setting.partition
    here = {name: tuple(np.shape(leaf)) for name, leaf in params.items()}
    lost = [name for name in wanted if name not in here and name.removeprefix(DEFAULT) not in here]
    more = [name for name in here if name.removeprefix(DEFAULT) not in partition.roles]
    other = [name for name, leaf in wanted.items() if here.get(name, leaf.shape) != leaf.shape]
    told = [f"'{name}' {here[name]} in the folder and {wanted[name].shape} in the setting" for name in other]
    told += [f"'{name}' {tuple(wanted[name].shape)} in the setting only" for name in lost]
    if told:  # a run whose server also had the clients' part may have more leaves
        told += [f"'{name}' {here[name]} in the folder only" for name in more]
        raise UserError(
            f"the model in '{path}' is another one than the setting's: {'; '.join(told[:MOST_TOLD])}"
            f"{'; ...' if len(told) > MOST_TOLD else ''}. Give the setting, or the options, of its training"
        )


def check_finite(what: str, arrays: Mapping[str, Any]) -> None:
    """Raise `UserError` with the name of the array if some value is not finite."""
    for path, array in arrays.items():
        wrong = int(np.size(array) - np.isfinite(array).sum())
        if wrong:
            raise UserError(
                f"{what} cannot be used: {wrong:,} of the {np.size(array):,} values of '{path}' are not finite. "
                f"The training went wrong: train again with lower rates (reconstruct.rate, update.rate, "
                f"server.rate)"
            )


def examples_used(task: Task, prepared: Prepared, config: Config) -> dict[str, Any]:
    """How many examples of the training clients train, however long the run is, how many there are, and how many
    are left out by which settings. An example trains if the update reaches it, or if it is in a support set of its
    own from which the local part is rebuilt."""
    part, again, counts = config.update, config.reconstruct, prepared.store.counts
    there = int(prepared.store.info.get(WHOLE, counts.sum()))
    large = counts[counts >= config.cohort.min_examples]
    out = {"data.max_examples": there - counts.sum(), "cohort.min_examples": counts.sum() - large.sum()}
    kind = config.split.kind if find_algorithm(config.algorithm).splits else "none"
    if kind != "random":  # then they take turns
        split = make_split(dataclasses.replace(config.split, kind=kind))
        query, support = split.query.count(large), split.support.count(large) * (kind != "none")
        rebuilds = bool(task.personal.partition.local_paths) and again.method != "skip"
        trained = _first(query, part) if part.method == "steps" and part.begin == "first" else query
        rebuilt = (_first(support, again) if again.method == "steps" else support) * rebuilds
        out |= {"split.kind": (large - query - support)[query > 0].sum() + large[query == 0].sum()}
        out |= {"update.max_steps": (query - trained).sum()}
        out |= {"reconstruct": (support - rebuilt)[query > 0].sum()}
    found = {name: int(count) for name, count in out.items() if count}
    return {"used": there - sum(found.values()), "there": there, "left_out": found}


def _first(counts: np.ndarray, part: Any) -> np.ndarray:
    """How many of so many examples the steps of a section reach."""
    return counts if part.max_steps is None else np.minimum(counts, part.max_steps * part.batch_size)


def tell_unused(told: Mapping[str, Any]) -> str:
    """What `examples_used` found, in words; empty if all are used."""
    if not told["left_out"]:
        return ""
    reasons = ", ".join(f"{count:,} by {name}" for name, count in told["left_out"].items())
    first = "update.max_steps" in told["left_out"]
    more = " (with update.begin = random, rounds take turns at them)" if first else ""
    return f"{told['used']:,} of {told['there']:,} training examples are used; left out: {reasons}{more}."


def left_out(tally: Tally) -> dict[str, int]:
    """How many updates were not used in all rounds, by the reason."""
    return {reason: tally.sums[reason] for reason in LEFT_OUT}


def tell_left_out(counts: Mapping[str, int | None]) -> str:
    """The counts of `left_out` in words; empty if all updates were used, or if it may not be told (None)."""
    return ", ".join(counted(count, *LEFT_OUT[reason][:2]) for reason, count in counts.items() if count)


def tell_outlier(first: Mapping[str, Any]) -> str:
    """The message for the first round with an update that is out of all proportion to the others."""
    clients = ", ".join(map(repr, first["clients"]))
    return (
        f"in round {first['round']:,}, the update of client {clients} was {first['times']:,.0f} times as large as "
        f"usual (norm {first['norm']:.3g}). It was used, and one such update can undo a training: look at the data "
        f"of this client and at the loss on it, or lower its rates. `outliers` in the records names them all"
    )


# The cause of updates that are not finite, found at some of these clients (empty: at clients of the last round)
FindCause: TypeAlias = "Callable[[Sequence[Any]], Cause | None]"
STEPS = {
    "eager": "To look at its steps, print in the model's loss, or stop there with breakpoint()",
    "other": "To look at the steps of single clients: --set simulation.backend=eager",
}


def patience_of(prepared: Prepared, config: Config) -> int:
    """How many rounds may go wrong (`simulation.patience`). Where one client has all examples, as in `central`, a
    round that failed begins again with the same parameters and the same examples: two are enough."""
    usual = config.simulation.patience
    return min(usual, ALONE) if prepared.store.num_clients == 1 else usual


def check_going(
    tally: Tally,
    patience: int,
    rounds: int,
    rates: Sequence[str] = RATES,
    find_cause: FindCause = lambda clients: None,
    backend: str = "compiled",
) -> None:
    """Raise `UserError` if the run learns nothing: no client has been used so far, or most of the latest
    rounds went wrong.

    In a short run, the patience is at most half of its rounds. `rates` are the rates that may be lowered.
    """
    if not tally.sums["clients"]:
        if tally.rounds >= min(patience or rounds, rounds):
            raise _nobody_counted(tally, rates, find_cause)
    elif patience and tally.wrong >= max(min(patience, rounds // 2), 1):
        raise _goes_wrong(tally, rates, find_cause, backend)


def _nobody_counted(tally: Tally, rates: Sequence[str], find_cause: FindCause) -> UserError:
    counts = left_out(tally)
    main = max(counts, key=lambda reason: counts[reason])
    told, remedy = tell_left_out(counts), LEFT_OUT[main][2].format(rates=" or ".join(rates))
    if not told:
        told, remedy = "nobody was drawn", "raise cohort.size, or use cohort.sampling=fixed"
    elif main == "broken" and (cause := find_cause(tally.wrong_clients)):
        told, remedy = f"{told}. {cause.why}", cause.remedy or remedy
    return UserError(
        f"no client counted in {counted(tally.rounds, 'round')}, so nothing was learned: {told}. To mend it, "
        f"{remedy}."
    )


def _goes_wrong(tally: Tally, rates: Sequence[str], find_cause: FindCause, backend: str) -> UserError:
    clients, cause = ", ".join(map(str, tally.wrong_clients)), find_cause(tally.wrong_clients)
    remedy = (cause and cause.remedy) or f"train again with lower rates ({', '.join(rates)})"
    why = f" {cause.why}." if cause else ""
    why += f" Before that, {tell_outlier(tally.outlier)}." if tally.outlier else ""
    whose = f"; {tally.sums['broken']} updates were not finite, most recently those of clients {clients}"
    return DivergedError(
        f"the training has diverged since round {tally.wrong_since} (mean loss {tally.wrong_loss:.4g}"
        f"{whose if clients else ''}), so it was stopped after round {tally.rounds}.{why} To mend it, {remedy}. "
        f"{STEPS.get(backend, STEPS['other'])}; --set simulation.patience=0 goes on regardless."
    )
