"""A task: clients' data, a model, the roles of its parameters, and published settings, under one name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from partwise.data.store import ClientStore
from partwise.model.partition import Partition
from partwise.model.spec import Model

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
    """A model, the roles of its parameters, and the columns of the data that it reads."""

    model: Model
    partition: Partition
    columns: tuple[str, ...]
    own_spaces: tuple[str, ...] = ()  # key spaces in which every client has rows of its own


class Task(NamedTuple):
    """What is learned, from whom, and how it is judged.

    personal:  the setting in which some parameters are local (or none is)
    stateful:  the same model with those parameters on the server, keyed by client (for FedAvg and centralised
               training); None if there is no such thing; the same setting if nothing is local
    options:   all that rebuilds the settings without the data (see `Entry.settings`)
    defaults:  published hyper-parameters, as dotted keys of the configuration, `algorithm` among them; under the
               name of an algorithm, a mapping of those that it needs otherwise
    seen:      whether validation and test clients are training clients (other examples of theirs)
    best:      the best reachable metrics on the test clients, where they are known
    loaded:    the options of [data] that it was loaded with, so that a run says how to load it again
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
    best: Mapping[str, float] = {}
    loaded: Mapping[str, Any] = {}


def cohort_size(wanted: int, train: ClientStore) -> int:
    """So many clients a round, or half of a small population."""
    return min(wanted, max(train.num_clients // 2, 1))


def algorithm_of(defaults: Mapping[str, Any] | None) -> str:
    """The algorithm that a task is made for."""
    return str((defaults or {}).get("algorithm", "fed_recon"))


def defaults_for(
    defaults: Mapping[str, Any], algorithm: str, of_algorithm: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Those settings that the algorithm needs, out of a task's `defaults`; the algorithm's own stand above what the
    task says for all of them, and below what it says for this one."""
    common = {key: value for key, value in defaults.items() if not isinstance(value, Mapping)}
    own = dict(of_algorithm or {}) | dict(defaults.get(algorithm, {}))
    return common | own | {"algorithm": algorithm}


class Entry(NamedTuple):
    """A named task.

    load:     (path of the data or None, **options of [data]) -> Task
    settings: options -> (personal, stateful), to use a trained model where the data is not
    defaults: the task's defaults as far as they are known without its data, for `partwise settings`
    """

    summary: str
    load: Callable[..., Task]
    settings: Callable[..., tuple[Setting, Setting | None]]
    defaults: Mapping[str, Any] | None = None


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


def takes_any_option(load: Callable[..., Task]) -> bool:
    """Whether a `load` has a `**options` of which nothing more is known."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(load).parameters.values())
