"""A task: clients' data, a model, the roles of its parameters, and published settings, under one name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from partwise.data.store import ClientStore
from partwise.model.partition import Partition
from partwise.model.spec import Model


class Setting(NamedTuple):
    """A model, the roles of its parameters, and the columns of the data that it reads."""

    model: Model
    partition: Partition
    columns: tuple[str, ...]
    own_spaces: tuple[str, ...] = ()  # key spaces in which every client has rows of its own


class Task(NamedTuple):
    """What is learned, from whom, and how it is judged.

    personal:  the setting in which some parameters are local
    stateful:  the same model with those parameters on the server, keyed by client (for FedAvg and centralised
               training); None if there is no such thing
    options:   all that rebuilds the settings without the data (see `Entry.settings`)
    defaults:  published hyper-parameters, as dotted keys of the configuration; under the name of an algorithm,
               a mapping of those that it needs otherwise
    seen:      whether validation and test clients are training clients (other examples of theirs)
    best:      the best reachable metrics on the test clients, where they are known
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


def defaults_of(task: Task, algorithm: str) -> dict[str, Any]:
    """The task's settings for an algorithm."""
    common = {key: value for key, value in task.defaults.items() if not isinstance(value, Mapping)}
    return common | dict(task.defaults.get(algorithm, {}))


class Entry(NamedTuple):
    """A named task.

    load:     (path of the data or None, **options of [data]) -> Task
    settings: options -> (personal, stateful), to use a trained model where the data is not
    """

    summary: str
    load: Callable[..., Task]
    settings: Callable[..., tuple[Setting, Setting | None]]
