"""A task before training: parameters, roles, bytes, clients, where the data came from, and its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from partwise.algorithm import whole_model
from partwise.algorithms.registry import configuration, find_algorithm, prepare, settings_for
from partwise.config.options import explain_options
from partwise.config.settings import Config, explain
from partwise.data.store import ClientStore
from partwise.model.partition import DEFAULT, Description
from partwise.randomness import client_numbers
from partwise.runs.resolve import resolve
from partwise.runs.summary import best_reachable
from partwise.selection.choose import choose_all, mean_keys
from partwise.selection.keys import own_keys
from partwise.tasks import Entry, algorithm_of, data_options, find_preset, find_task

SAMPLE = 1000  # clients whose keys are counted


def describe(name: str, data: str | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `partwise describe`, as a dict for JSON."""
    task, config = resolve(name, data, changes)
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
        "best": best_reachable(task, prepare(task, config), config),
        "source": dict(task.train.info),
    }


def _with_default(line: Description) -> list[Description]:
    """A local leaf with a learned default gives two lines: the leaf, which stays on the client, and its
    default, which is sent."""
    if not (line.role.startswith("local") and line.bytes_down):
        return [line]
    default = Description(DEFAULT + line.path, line.shape, "shared", line.bytes_down, line.bytes_up)
    return [line._replace(bytes_down=0, bytes_up=0), default]


def list_settings(name: str, algorithm: str | None = None, preset: str | None = None) -> list[dict[str, Any]]:
    """Every key of the configuration and every option of a task, with its value and meaning. The values are
    those of a run without other settings."""
    entry = find_task(name)
    known = entry.defaults if entry.defaults is not None else entry.load(None).defaults
    if preset is not None:
        known = find_preset(name, entry.presets, preset)
    algorithm = algorithm or algorithm_of(known)
    config = configuration(name, settings_for(known, algorithm))
    config = dataclasses.replace(config, select=_chosen(entry, config))
    options, own = explain_options(entry.load), data_options(known)
    lines = [(key, own.get(key.removeprefix("data."), value), meaning) for key, value, meaning in options]
    return [
        {"key": key, "value": value, "meaning": meaning} for key, value, meaning in (*explain(config), *lines)
    ]


def _chosen(entry: Entry, config: Config) -> dict[str, str]:
    """Which keys clients ask for, in each key space, as far as this is known without data."""
    if not entry.example:
        return dict(config.select)
    personal, stateful = entry.settings(**entry.example)
    algorithm = find_algorithm(config.algorithm)
    setting = personal if algorithm.trains == "personal" or stateful is None else stateful
    usual = {space: choice.name for space, choice in whole_model(setting.partition).items()}
    return usual | dict(config.select) if algorithm.selects else usual


def _numbers(store: ClientStore) -> dict[str, int]:
    return {"clients": store.num_clients, "examples": store.num_examples}
