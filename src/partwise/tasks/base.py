"""A task: clients' data, a model, the roles of its parameters, and settings that suit it, under one name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

import jax

from partwise.client.split import Split
from partwise.data.store import ClientStore
from partwise.model.partition import Partition
from partwise.model.spec import Model
from partwise.types import Limits, UserError, unknown

SEEDS = Limits(0, 2**32 - 1)
COUNTS = Limits(1, 10**8)  # of clients, items, words; what memory holds is asked elsewhere
SIZES = Limits(1, 65_536)  # of vectors and layers
PAPER = "paper"  # the preset with a paper's own settings

# What all tasks of Federated Select have in common (section 5.1): one epoch of 50 clients who count alike.
SELECT_DEFAULTS: Mapping[str, Any] = {
    "algorithm": "fed_select",
    "rounds": 500,
    "cohort.size": 50,
    "update.epochs": 1,
    "update.max_steps": None,
    "server.weighting": "uniform",
    "simulation.rounds_per_call": 5,
}

# What the tasks of Federated Submodel Averaging have in common. Its appendix D.3 is not public: epoch, batch and
# rate are those of the authors' code for Amazon, the weighting is that of the paper's equations.
SUBMODEL_DEFAULTS: Mapping[str, Any] = {
    "algorithm": "fed_avg",
    "rounds": 200,
    "update.rate": 0.1,
    "update.epochs": 1,
    "update.max_steps": None,
    "update.batch_size": 4,
    "server.optimizer": "sgd",
    "server.rate": 1.0,
    "server.weighting": "uniform",
}


class Setting(NamedTuple):
    """A model, the roles of its parameters, and the columns of the data that it reads.

    Attributes:
        model: The model.
        partition: The roles, as `partition(model, rules)` gives them.
        columns: The columns of the examples that the model reads.
        own_spaces: Key spaces in which every client has rows of its own.
    """

    model: Model
    partition: Partition
    columns: tuple[str, ...]
    own_spaces: tuple[str, ...] = ()  # key spaces in which every client has rows of its own


def best_unknown(split: Split | None) -> Mapping[str, float]:
    """Of a task whose truth nobody knows."""
    return {}


class Task(NamedTuple):
    """What is learned, from whom, and how it is judged.

    Attributes:
        name: Its name, in summaries and folders.
        train: The training clients.
        validation: The clients of evaluations during training.
        test: The clients of the evaluation at the end.
        personal: The setting in which some parameters are local (or none is).
        stateful: The same model with those parameters on the server, keyed by client (for FedAvg and
            centralised training); None if there is no such thing; the same setting if nothing is local.
        options: All that rebuilds the settings without the data (see `Entry.settings`).
        defaults: Settings, as dotted keys of the configuration, `algorithm` among them; under the name of an
            algorithm, a mapping of those that it needs otherwise.
        seen: Whether validation and test clients are training clients (other examples of theirs).
        best: The best reachable metrics on the test clients by the split with which they are judged (None:
            they are judged without one), as far as they are known.
        loaded: The options of [data] that it was loaded with, so that a run says how to load it again.
        presets: Other settings that may take the place of `defaults`, by name (see `with_preset`).
        notes: What was chosen for this machine, in sentences that are told when a run begins.
    """

    name: str
    train: ClientStore
    validation: ClientStore
    test: ClientStore
    personal: Setting
    stateful: Setting | None = None
    options: Mapping[str, Any] = {}
    defaults: Mapping[str, Any] = {}
    seen: bool = False
    best: Callable[[Split | None], Mapping[str, float]] = best_unknown
    loaded: Mapping[str, Any] = {}
    presets: Mapping[str, Mapping[str, Any]] = {}
    notes: tuple[str, ...] = ()


def fitted(settings: Mapping[str, Any], train: ClientStore) -> dict[str, Any]:
    """Settings whose cohort is at most half of a small population."""
    return {**settings, "cohort.size": min(settings["cohort.size"], max(train.num_clients // 2, 1))}


def with_preset(task: Task, preset: str) -> Task:
    """The task with a preset's settings in place of its defaults; its options of [data] must fit already."""
    return task._replace(defaults=find_preset(task.name, task.presets, preset))


def find_preset(task: str, presets: Mapping[str, Mapping[str, Any]], preset: str) -> Mapping[str, Any]:
    """A preset by name."""
    if not presets:
        raise UserError(
            f"task '{task}' has no preset '{preset}': it comes from no paper, and its defaults are all there is"
        )
    if preset not in presets:
        raise unknown(f"preset of task '{task}'", preset, presets)
    return presets[preset]


def data_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options of [data] among settings."""
    return {key.removeprefix("data."): v for key, v in settings.items() if key.startswith("data.")}


def refuse_data(task: str, data: str | None) -> None:
    """Raise if data is given to a task that generates its own."""
    if data is not None:
        told = f"the task '{task}' generates its data and reads none, but was given '{data}'"
        raise UserError(f"{told}: leave out --data (in Python, data=...)")


def check_memory(num_bytes: float, what: str, remedy: str) -> None:
    """Raise if something needs more memory than this machine has: sensible numbers may have a huge product."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > there:
        raise UserError(
            f"{what} would take {num_bytes / 1e9:,.0f} GB of memory, and this machine has {there / 1e9:,.0f} GB: "
            f"{remedy}"
        )


def on_accelerator() -> bool:
    """Whether there is more than a CPU; asked when a task is loaded, never before."""
    return jax.default_backend() != "cpu"


def sized_for_device(
    asked: Mapping[str, int | None], wide: Mapping[str, int], narrow: Mapping[str, int]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Sizes of a model: those asked for, and for None those that suit the device; with a note of what was made
    narrow."""
    usual = wide if on_accelerator() else narrow
    sizes = {name: usual[name] if value is None else value for name, value in asked.items()}
    small = [name for name, value in asked.items() if value is None and usual[name] < wide[name]]
    if not small:
        return sizes, ()
    told = ", ".join(f"{name} {narrow[name]:,} instead of {wide[name]:,}" for name in small)
    return sizes, (
        f"On this CPU the model is smaller than on an accelerator: {told}. --preset {PAPER} has all.",
    )


def algorithm_of(defaults: Mapping[str, Any] | None) -> str:
    """The algorithm that a task is made for."""
    return str((defaults or {}).get("algorithm", "fed_recon"))


def defaults_for(
    defaults: Mapping[str, Any], algorithm: str, of_algorithm: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Those settings that the algorithm needs, out of a task's `defaults`; the algorithm's own stand above what the
    task says for all of them, and below what it says for this one."""
    common = {
        key: value
        for key, value in defaults.items()
        if not isinstance(value, Mapping) and not key.startswith("data.")
    }
    own = dict(of_algorithm or {}) | dict(defaults.get(algorithm, {}))
    return fitting(common, own) | own | {"algorithm": algorithm}


def fitting(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings on which changes are made: if these name another server optimizer, without what the former had of
    its own."""
    known = settings.get("server.optimizer")
    other = changes.get("server.optimizer", known) != known
    return {
        key: value for key, value in settings.items() if not (other and key.startswith("server.settings."))
    }


class Entry(NamedTuple):
    """A named task.

    load:     (path of the data or None, **options of [data]) -> Task
    settings: options -> (personal, stateful), to use a trained model where the data is not
    defaults: the task's defaults as far as they are known without its data, for `partwise settings`
    presets:  the same of its presets, with those options of [data] that the task then has otherwise
    example:  options with which `settings` makes a small model, to look at its key spaces without data
    """

    summary: str
    load: Callable[..., Task]
    settings: Callable[..., tuple[Setting, Setting | None]]
    defaults: Mapping[str, Any] | None = None
    presets: Mapping[str, Mapping[str, Any]] = {}
    example: Mapping[str, Any] = {}


Load = TypeVar("Load", bound=Callable[..., Task])


def takes_options_of(other: Callable[..., Task], but: tuple[str, ...] = ()) -> Callable[[Load], Load]:
    """Says that a `load` hands its `**options` on to `other`, all `but` those that it gives itself."""

    def note(load: Load) -> Load:
        own, more = keyword_options(load), keyword_options(other)
        merged = own | {name: p for name, p in more.items() if name not in (*own, *but)}
        first = inspect.Parameter("data", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        load.__signature__ = inspect.Signature([first, *merged.values()])  # pyright: ignore[reportFunctionMemberAccess]
        return load

    return note


def keyword_options(load: Callable[..., Task]) -> dict[str, inspect.Parameter]:
    """The options of [data]: all arguments of a `load` but its first, by name, with their types and defaults."""
    try:
        parameters = inspect.signature(load, eval_str=True).parameters
    except NameError:  # types that only a type checker imports
        parameters = inspect.signature(load).parameters
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {name: p for name, p in list(parameters.items())[1:] if p.kind in kinds}


def limits_of(about: inspect.Parameter) -> Limits | None:
    """The numbers that an option may be, if its type says so."""
    more = get_args(about.annotation) if get_origin(about.annotation) is Annotated else ()
    return next((each for each in more if isinstance(each, Limits)), None)


def check_limits(load: Callable[..., Task], options: Mapping[str, Any]) -> None:
    """Raise if an option is a number that its type does not allow."""
    known = keyword_options(load)
    for name, value in options.items():
        limits = limits_of(known[name]) if name in known else None
        if limits:
            limits.check(f"data.{name}", value)


def takes_any_option(load: Callable[..., Task]) -> bool:
    """Whether a `load` has a `**options` of which nothing more is known."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(load).parameters.values())
