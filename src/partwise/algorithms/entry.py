"""What an algorithm file says about itself: a summary, its own settings, and how a configuration makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from partwise.algorithm import Build
from partwise.config.settings import Config, Own
from partwise.data.store import ClientStore
from partwise.server.cohort import Recruiting
from partwise.tasks.base import Setting, Task


class Prepared(NamedTuple):
    """A task and a configuration, ready to run."""

    build: Build
    rates: Mapping[str, float]
    store: ClientStore  # training clients
    recruiting: Recruiting
    evaluation: Build  # for validation and test clients
    evaluated: Setting
    checked: Build | None = (
        None  # whose model is checked before the first round, if it is not that of `build`
    )


class AlgorithmEntry(NamedTuple):
    """An algorithm by name.

    prepare:  (task, configuration) -> what runs
    defaults: settings for which this algorithm needs other values than the task's defaults
    own:      settings that only this algorithm has, by dotted key; `config.own` has their values
    trains:   which setting of a task it trains: with local parameters, or with all parameters on the server
    selects:  whether clients choose keys (otherwise they have all keys that could matter to them)
    splits:   whether training clients split their examples into support and query sets
    settle:   (task, configuration) -> the configuration with settings that the algorithm itself decides, because
              they follow from others
    unread:   {pattern of dotted keys: reason}, common settings that this algorithm does not read. None means not
              known; then no setting is refused
    """

    summary: str
    prepare: Callable[[Task, Config], Prepared]
    defaults: Mapping[str, Any] = {}
    own: Mapping[str, Own] = {}
    trains: Literal["personal", "stateful"] = "personal"
    selects: bool = True
    splits: bool = False
    settle: Callable[[Task, Config], Config] = lambda task, config: config
    unread: Mapping[str, str] | None = None
