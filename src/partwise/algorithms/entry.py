"""What an algorithm file says of itself: its name's summary, its own settings, and how a configuration makes it."""

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


class AlgorithmEntry(NamedTuple):
    """An algorithm by name.

    prepare:  (task, configuration) -> what runs
    defaults: settings that it wants otherwise than a task has them for all
    own:      settings that only this algorithm has, by dotted key; `config.own` has their values
    trains:   the setting of a task that it trains: with local parameters, or with all of them on the server
    selects:  whether clients choose keys (else they have all that could matter to them)
    splits:   whether training clients split their examples into support and query sets
    unread:   settings for all algorithms (patterns of dotted keys) that this one does not read, and why; None: not
              known, so nothing that somebody writes is refused
    """

    summary: str
    prepare: Callable[[Task, Config], Prepared]
    defaults: Mapping[str, Any] = {}
    own: Mapping[str, Own] = {}
    trains: Literal["personal", "stateful"] = "personal"
    selects: bool = True
    splits: bool = False
    unread: Mapping[str, str] | None = None
