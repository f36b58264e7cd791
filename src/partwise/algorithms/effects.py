"""Which settings a run reads. If a user writes a setting that nothing reads, it is refused, with the reason.

A rule is a pattern of keys and a function. The function returns why these keys are not read, or an empty
string if they are read. Rules for all algorithms are below. What a single algorithm does not read is in its
own file (`AlgorithmEntry.unread`). Settings of a task and of a recorded run are not checked: they list
everything, read or not. How rounds are run (`simulation.*`) is not checked either, because users try another
backend with an otherwise unchanged command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatch
from typing import Any, NamedTuple

from partwise.algorithms.entry import AlgorithmEntry
from partwise.config.private_settings import CORRELATED
from partwise.config.settings import Config
from partwise.tasks.base import Task
from partwise.types import UserError


class Facts(NamedTuple):
    """The facts that decide which settings are read."""

    config: Config
    entry: AlgorithmEntry
    local: bool  # whether clients have a local part, at least in evaluation
    spaces: bool  # whether any trained leaf is keyed
    tested_on_query: bool  # whether evaluated clients have a support set (RECONEVAL)


Rule = tuple[str, Callable[[Facts], str]]


def _of(condition: Callable[[Config], bool], reason: str) -> Callable[[Facts], str]:
    """A rule that depends only on the configuration. `reason` may contain its values."""
    return lambda facts: reason.format(c=facts.config) if condition(facts.config) else ""


def _split_unread(facts: Facts) -> str:
    config = facts.config
    if facts.entry.splits:
        return ""
    if not facts.tested_on_query:
        return f"with {config.algorithm} and this task no client's examples are split"
    if config.evaluation_split.kind != "same":
        return f"evaluation_split.kind = {config.evaluation_split.kind} says how judged clients are split"
    return ""


def _order_unread(facts: Facts) -> str:
    if facts.entry.splits or facts.config.split.kind != "random":
        return ""
    return f"with {facts.config.algorithm} only judged clients are split, and these in one order (alternate)"


def _split_batch_unread(facts: Facts) -> str:
    part, judged = facts.config.split, facts.config.evaluation_split.kind
    if part.kind in ("halves", "last"):
        return f"split.kind = {part.kind} has no batches"
    if part.kind == "none" and judged != "same":
        return f"split.kind is none, and evaluation_split.kind is {judged}"
    return ""


def _reconstruct_unread(facts: Facts) -> str:
    if not facts.local:
        return "nothing of this task's model is local, so nothing is reconstructed"
    if facts.config.evaluation.local == "trained":
        return "evaluation.local = trained takes local parts as the server trained them"
    return ""


STEPS = ("optimizer", "rate", "schedule", "epochs", "max_steps", "batch_size")
COUNTING = "count_heat"  # makes its own clip
PROMISING = (  # settings of a promise to clients
    "delta",
    "share",
    "loss_bound",
    "clip_quantile",
    "clip_rate",
    "mechanism",
    "buffers",
    "rows",
    "rows_threshold",
    "rows_share",
)
RULES: tuple[Rule, ...] = (
    ("split.*", _split_unread),
    ("split.kind", _order_unread),
    (
        "split.percent",
        _of(lambda c: c.split.kind != "halves", "split.kind = {c.split.kind} has no percent (halves has)"),
    ),
    ("split.batch_size", _split_batch_unread),
    (
        "split.count",
        _of(lambda c: c.split.kind != "last", "split.kind = {c.split.kind} has no count (last has)"),
    ),
    (
        "evaluation_split.*",
        lambda facts: (
            "" if facts.tested_on_query else "judged clients of this task and algorithm are not split"
        ),
    ),
    (
        "evaluation_split.percent",
        _of(
            lambda c: c.evaluation_split.kind != "halves",
            "evaluation_split.kind = {c.evaluation_split.kind} does not read it (halves does)",
        ),
    ),
    (
        "evaluation_split.count",
        _of(
            lambda c: c.evaluation_split.kind != "last",
            "evaluation_split.kind = {c.evaluation_split.kind} does not read it (last does)",
        ),
    ),
    (
        "evaluation_split.batch_size",
        _of(
            lambda c: c.evaluation_split.kind != "alternate",
            "evaluation_split.kind = {c.evaluation_split.kind} does not read it (alternate does)",
        ),
    ),
    ("reconstruct.*", _reconstruct_unread),
    *(
        (
            f"reconstruct.{name}",
            _of(
                lambda c: c.reconstruct.method != "steps",
                "reconstruct.method = {c.reconstruct.method} takes no steps",
            ),
        )
        for name in STEPS
    ),
    (
        "reconstruct.pull",
        _of(lambda c: c.reconstruct.method == "skip", "reconstruct.method = skip does not read it"),
    ),
    *(
        (f"update.{name}", _of(lambda c: c.update.method == "solve", "update.method = solve takes no steps"))
        for name in (*STEPS, "begin", "joint")
    ),
    *(
        (
            f"update.{name}",
            _of(lambda c: c.update.method == "through", "update.method = through takes one plain step"),
        )
        for name in (*STEPS, "begin", "joint")
        if name != "rate"
    ),
    (
        "update.pull",
        _of(lambda c: c.update.method != "solve", "update.method = {c.update.method} does not read it"),
    ),
    ("update.joint", lambda facts: "" if facts.local else "nothing of this task's model is local"),
    *(
        (
            f"fine_tune.{name}",
            _of(lambda c: c.fine_tune.max_steps == 0, "fine_tune.max_steps = 0 tunes nothing"),
        )
        for name in ("optimizer", "rate", "epochs", "batch_size", "joint")
    ),
    ("fine_tune.joint", lambda facts: "" if facts.local else "nothing of this task's model is local"),
    (
        "server.cap",
        _of(
            lambda c: c.server.mean not in ("heat", "seen"),
            "server.mean = {c.server.mean} has no factors to bound",
        ),
    ),
    (
        "server.counts",
        _of(lambda c: c.server.mean != "heat", "server.mean = {c.server.mean} reads no counts (heat does)"),
    ),
    *(
        (
            f"privacy.{name}",
            _of(lambda c: bool(c.server.counts), "the counts of server.counts have noise of their own"),
        )
        for name in ("heat_epsilon", "heat_noise", "heat_keys")
    ),
    (
        "privacy.heat_keys",
        _of(
            lambda c: c.privacy.heat == "none" and c.privacy.epsilon is None and not c.privacy.noise,
            "without noise, all keys are counted",
        ),
    ),
    *(
        (f"stop.{name}", _of(lambda c: not c.stop.metric, "stop.metric names no metric"))
        for name in ("patience", "difference")
    ),
    *(
        (
            f"data.{name}",
            _of(
                lambda c, name=name: bool(c.data.get(name)) and c.update.method != "through",
                "update.method = {c.update.method} does not learn it (through does)",
            ),
        )
        for name in ("signals", "attention")
    ),
    *(
        (
            f"privacy.{name}",
            _of(
                lambda c: c.privacy.clip is None and c.algorithm != COUNTING,
                "clients are promised nothing without a clip (give privacy.clip)",
            ),
        )
        for name in PROMISING
    ),
    (
        "privacy.clip_rate",
        _of(lambda c: not c.privacy.clip_quantile, "the clip stays with privacy.clip_quantile = 0"),
    ),
    (
        "privacy.buffers",
        _of(
            lambda c: c.privacy.mechanism not in CORRELATED,
            "privacy.mechanism = {c.privacy.mechanism} takes no noise back (blt and banded do)",
        ),
    ),
    *(
        (
            f"privacy.{name}",
            _of(lambda c: c.privacy.rows != "filtered", "privacy.rows = {c.privacy.rows} counts no holders"),
        )
        for name in ("rows_threshold", "rows_share")
    ),
    *(
        (f"deploy.{name}", _of(lambda c: not c.deploy.buffer, "deploy.buffer = 0 makes rounds"))
        for name in ("concurrency", "staleness", "stalest")
    ),
    ("server.mean", lambda facts: "" if facts.spaces else "nothing of this task's model is keyed"),
    ("serving.way", lambda facts: "" if facts.spaces else "nothing of this task's model is keyed"),
)
JUDGING = (
    "reconstruct.*",
    "split.*",
    "evaluation_split.*",
    "evaluation.*",
    "fine_tune.*",
    "data.*",
    "seed",
)  # what an evaluation reads


def check_effects(
    task: Task, config: Config, entry: AlgorithmEntry, usual: Config, written: Iterable[str]
) -> None:
    """Raise `UserError` if a written setting differs from the task's `usual` value and is not read. If an
    algorithm does not say what it leaves unread, nothing is refused."""
    if entry.unread is None:
        return
    facts, values, before = _facts(task, config, entry), config.flat(), usual.flat()
    for key in _leaves(written, values):
        reason = _unread(facts, key) if values[key] != before.get(key) else ""
        if reason:
            raise UserError(f"{key} = {values[key]} would have no effect: {reason}. Leave it out.")


def read_of(keys: Iterable[str], task: Task, config: Config, entry: AlgorithmEntry) -> list[str]:
    """Those of the settings that a training reads."""
    facts = _facts(task, config, entry)
    return [key for key in keys if not _unread(facts, key)]


def check_judging(changes: Mapping[str, Any]) -> None:
    """Raise `UserError` if a setting of training is given for the evaluation of a trained model."""
    for key in changes:
        if not any(fnmatch(key, pattern) for pattern in JUDGING):
            raise UserError(
                f"{key} = {changes[key]} would have no effect: it is a setting of training, and the model is "
                f"trained already. Leave it out."
            )


def _unread(facts: Facts, key: str) -> str:
    """Why nothing reads a setting; empty if something reads it."""
    of_algorithm = (
        f"with {facts.config.algorithm} {reason}"
        for pattern, reason in (facts.entry.unread or {}).items()
        if fnmatch(key, pattern)
    )
    of_all = (reason(facts) for pattern, reason in RULES if fnmatch(key, pattern))
    return next(filter(None, (*of_algorithm, *of_all)), "")


def _leaves(written: Iterable[str], values: Mapping[str, Any]) -> list[str]:
    """The full keys that the written names stand for: `server.settings` stands for all keys under it."""
    return [key for name in written for key in values if key == name or key.startswith(f"{name}.")]


def _facts(task: Task, config: Config, entry: AlgorithmEntry) -> Facts:
    local = bool(task.personal.partition.local_paths)
    trained = task.personal if entry.trains == "personal" or task.stateful is None else task.stateful
    tuned = config.fine_tune.max_steps != 0
    on_query = not task.seen and (entry.splits or local or tuned)
    return Facts(config, entry, local, bool(trained.partition.spaces), on_query)
