"""A task: clients' data, a model, the roles of its parameters, and suitable settings, under one name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

import jax

from partwise.client.split import Split
from partwise.data.histories import History
from partwise.data.store import ClientStore
from partwise.model.partition import Partition
from partwise.model.spec import Model
from partwise.types import Limits, UserError, unknown

SEEDS = Limits(0, 2**32 - 1)
COUNTS = Limits(1, 10**8)  # of clients, items, words; memory is checked elsewhere
SIZES = Limits(1, 65_536)  # of vectors and layers
SHOWN = 8  # parameters in a task's repr
WHOLE = "examples_there"  # in the info of a store: how many examples there were before max_examples
UNREAD = "unread"  # in the info of a store: {option of [data] that this data does not read: why}
PAPER = "paper"  # the preset with a paper's own settings

# What all tasks of Federated Select have in common (section 5.1): one epoch on 50 clients with equal weights.
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
        partition: The roles, as `partition(model, rules)` returns them.
        columns: The columns of the examples that the model reads.
        own_spaces: Key spaces in which every client has its own rows.
        ranks: The column whose ids the model ranks, for `Personal.recommend`. Empty: it recommends nothing. If
            the model gives one number for an example, the ids are put into this column; otherwise its outputs
            for an example are the scores of all ids of the column.
        expects: What the outputs are, if a high one does not say that a client is likely to take the item:
            "rating". `recommend` then warns. Empty: items are ranked by how likely they are.
        histories: Columns that are made of a client's earlier rows, {column: History}. Tables need not have them.
    """

    model: Model
    partition: Partition
    columns: tuple[str, ...]
    own_spaces: tuple[str, ...] = ()  # key spaces in which every client has its own rows
    ranks: str = ""
    histories: Mapping[str, History] = {}
    expects: str = ""


def best_unknown(split: Split | None) -> Mapping[str, float]:
    """The best reachable metrics of a task whose truth is not known: none."""
    return {}


class Task(NamedTuple):
    """What is learned, from which clients, and how it is evaluated.

    Attributes:
        name: Its name, in summaries and folders.
        train: The training clients.
        validation: The clients for evaluations during training.
        test: The clients for the evaluation at the end.
        personal: The setting with local parameters (or without any, if nothing is local).
        stateful: The same model with these parameters on the server, keyed by client (for FedAvg and
            centralised training). None if there is no such setting. The same setting as `personal` if nothing
            is local.
        options: Everything that is needed to rebuild the settings without the data (see `Entry.settings`).
        defaults: Settings as dotted keys of the configuration, including `algorithm`. Under the name of an
            algorithm, a mapping of settings that are different for this algorithm.
        seen: Whether validation and test clients are training clients (with other examples).
        best: The best reachable metrics on the test clients, as far as they are known: a function of the
            split with which they are evaluated (None if they are evaluated without a split).
        loaded: The options of [data] with which the task was loaded. A run records them, so that the task can
            be loaded again.
        presets: {name: settings that can replace `defaults`} (see `with_preset`).
        notes: Sentences about what was chosen for this machine. They are shown when a run begins.
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

    def __repr__(self) -> str:
        clients = ", ".join(f"{store.num_clients:,}" for store in (self.train, self.validation, self.test))
        roles, shapes = self.personal.partition.roles, self.personal.partition.shapes
        leaves = [f"{path}{list(shapes[path].shape) or ''} {role.kind}" for path, role in roles.items()]
        more = [f"{len(leaves) - SHOWN} more"] if len(leaves) > SHOWN else []
        return f"Task({self.name}, clients {clients}: {', '.join([*leaves[:SHOWN], *more])})"


def fitted(settings: Mapping[str, Any], train: ClientStore) -> dict[str, Any]:
    """Settings with a cohort of at most half of a small population."""
    return {**settings, "cohort.size": min(settings["cohort.size"], max(train.num_clients // 2, 1))}


def with_preset(task: Task, preset: str) -> Task:
    """The task with a preset's settings in place of its defaults. Its options of [data] must fit the preset
    already."""
    return task._replace(defaults=find_preset(task.name, task.presets, preset))


def find_preset(task: str, presets: Mapping[str, Mapping[str, Any]], preset: str) -> Mapping[str, Any]:
    """The preset with this name."""
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
    """Raise `UserError` if data is given to a task that generates its own."""
    if data is not None:
        told = f"the task '{task}' generates its data and reads none, but was given '{data}'"
        raise UserError(f"{told}: leave out --data (in Python, data=...)")


def noting_unread(store: ClientStore, options: Iterable[str], why: str) -> ClientStore:
    """The store of training clients, with a note of options of [data] that are not read for such data
    (`refuse_unread`)."""
    noted = {**store.info.get(UNREAD, {}), **dict.fromkeys(options, why)}
    return dataclasses.replace(store, info={**store.info, UNREAD: noted})


def refuse_unread(task: Task, asked: Iterable[str], options: Mapping[str, Any]) -> None:
    """Raise `UserError` if one of the options that a user gave is not read for such data."""
    noted = task.train.info.get(UNREAD, {})
    for name in asked:
        if name in noted:
            raise UserError(
                f"data.{name} = {options[name]} would have no effect: {noted[name]}. Leave it out."
            )


def on_accelerator() -> bool:
    """Whether there is more than a CPU. This starts JAX, so it is called only when a task is loaded."""
    return jax.default_backend() != "cpu"


def sized_for_device(
    asked: Mapping[str, int | None], wide: Mapping[str, int], narrow: Mapping[str, int]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Sizes of a model: those that were asked for, and in place of None those that suit the device. Also
    returns a note about sizes that were made smaller."""
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
    """The algorithm for which a task is made."""
    return str((defaults or {}).get("algorithm", "fed_recon"))


def defaults_for(
    defaults: Mapping[str, Any], algorithm: str, of_algorithm: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The settings for an algorithm, from a task's `defaults`. The algorithm's own defaults override what the
    task says for all algorithms. What the task says for this algorithm overrides both."""
    common = {
        key: value
        for key, value in defaults.items()
        if not isinstance(value, Mapping) and not key.startswith("data.")
    }
    own = dict(of_algorithm or {}) | dict(defaults.get(algorithm, {}))
    return fitting(common, own) | own | {"algorithm": algorithm}


def fitting(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings to which changes are applied. If the changes name another server optimizer, the own
    settings of the former one are left out."""
    known = settings.get("server.optimizer")
    other = changes.get("server.optimizer", known) != known
    return {
        key: value for key, value in settings.items() if not (other and key.startswith("server.settings."))
    }


class OwnRows(NamedTuple):
    """What a task's `load` does to each client's own rows, between a table and the training. Devices, which have a
    table of their own, do the same.

    columns: options of [data] -> columns that it needs, beside those that the model reads
    prepare: (clients, options of [data]) -> the same clients with the rows that they train on, in their order
    """

    columns: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda options: ()
    prepare: Callable[[ClientStore, Mapping[str, Any]], ClientStore] = lambda store, options: store


class Entry(NamedTuple):
    """A named task.

    load:     (path of the data or None, **options of [data]) -> Task
    settings: options -> (personal, stateful), to use a trained model without the data
    defaults: the task's defaults, as far as they are known without its data, for `partwise settings`
    presets:  likewise for its presets, including the options of [data] that a preset changes
    example:  options with which `settings` makes a small model, to find its key spaces without data
    own:      what `load` does to each client's own rows; by default nothing
    """

    summary: str
    load: Callable[..., Task]
    settings: Callable[..., tuple[Setting, Setting | None]]
    defaults: Mapping[str, Any] | None = None
    presets: Mapping[str, Mapping[str, Any]] = {}
    example: Mapping[str, Any] = {}
    own: OwnRows = OwnRows()


Load = TypeVar("Load", bound=Callable[..., Task])


def takes_options_of(other: Callable[..., Task], but: tuple[str, ...] = ()) -> Callable[[Load], Load]:
    """Declare that a `load` passes its `**options` on to `other`. The options in `but` are not passed on;
    `load` sets them itself."""

    def note(load: Load) -> Load:
        own, more = keyword_options(load), keyword_options(other)
        merged = own | {name: p for name, p in more.items() if name not in (*own, *but)}
        first = inspect.Parameter("data", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        load.__signature__ = inspect.Signature([first, *merged.values()])  # pyright: ignore[reportFunctionMemberAccess]
        return load

    return note


def keyword_options(load: Callable[..., Task]) -> dict[str, inspect.Parameter]:
    """The options of [data]: all arguments of a `load` except its first, by name, with their types and
    defaults."""
    try:
        parameters = inspect.signature(load, eval_str=True).parameters
    except NameError:  # types that only a type checker imports
        parameters = inspect.signature(load).parameters
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {name: p for name, p in list(parameters.items())[1:] if p.kind in kinds}


def limits_of(about: inspect.Parameter) -> Limits | None:
    """The limits of an option, if its type has them; otherwise None."""
    more = get_args(about.annotation) if get_origin(about.annotation) is Annotated else ()
    return next((each for each in more if isinstance(each, Limits)), None)


def check_limits(load: Callable[..., Task], options: Mapping[str, Any]) -> None:
    """Raise `UserError` if an option is a number outside its limits."""
    known = keyword_options(load)
    for name, value in options.items():
        limits = limits_of(known[name]) if name in known else None
        if limits:
            limits.check(f"data.{name}", value)


def takes_any_option(load: Callable[..., Task]) -> bool:
    """Whether a `load` has a `**options` of which nothing more is known."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(load).parameters.values())
