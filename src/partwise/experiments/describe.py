"""A task before it is trained: parameters, roles, bytes, clients, where the data came from, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from partwise.algorithms.base import whole_model
from partwise.config.algorithms import find_algorithm, settings_for
from partwise.config.options import explain_options
from partwise.config.settings import Config, explain
from partwise.data.store import ClientStore
from partwise.experiments.resolve import resolve
from partwise.model.partition import DEFAULT, Description
from partwise.randomness import client_numbers
from partwise.selection.choose import choose_all, mean_keys
from partwise.selection.keys import own_keys
from partwise.tasks import algorithm_of, find_task

SAMPLE = 1000  # clients whose keys are counted


def describe(name: str, data: str | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    """What `partwise describe` tells, as a JSON-able dict."""
    task, _ = resolve(name, data, changes)
    partition = task.personal.partition
    sample = task.train.select(task.personal.columns).gather(np.arange(min(SAMPLE, task.train.num_clients)))
    numbers = client_numbers(sample.client_ids)
    own, choices = own_keys(sample, partition)[0], whole_model(partition)
    lines = partition.describe(mean_keys(choose_all(own, partition.all_keys, choices, numbers)))
    stores = {"train": task.train, "validation": task.validation, "test": task.test}
    return {
        "task": name,
        "parameters": [each._asdict() for line in lines for each in _with_default(line)],
        "clients": {part: _numbers(store) for part, store in stores.items()},
        "best": dict(task.best),
        "source": dict(task.train.info),
    }


def _with_default(line: Description) -> list[Description]:
    """A local leaf with a learned default is two: the leaf, which stays, and its default, which travels."""
    if not (line.role.startswith("local") and line.bytes_down):
        return [line]
    default = Description(DEFAULT + line.path, line.shape, "shared", line.bytes_down, line.bytes_up)
    return [line._replace(bytes_down=0, bytes_up=0), default]


def list_settings(name: str | None, algorithm: str | None = None) -> list[dict[str, Any]]:
    """Every key of the configuration with its value and meaning; with a task, its own values and options."""
    if algorithm is not None:
        find_algorithm(algorithm)
    options, config = [], Config(algorithm=algorithm or algorithm_of(None))
    if name is not None:
        entry = find_task(name)
        known = entry.defaults if entry.defaults is not None else entry.load(None).defaults
        config = config.changed({"task": name} | settings_for(known, algorithm or algorithm_of(known)))
        options = explain_options(entry.load)
    return [
        {"key": key, "value": value, "meaning": meaning}
        for key, value, meaning in (*explain(config), *options)
    ]


def _numbers(store: ClientStore) -> dict[str, int]:
    return {"clients": store.num_clients, "examples": store.num_examples}
