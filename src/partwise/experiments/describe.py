"""A task before it is trained: parameters, roles, bytes, clients, and where the data came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from partwise.data.store import ClientStore
from partwise.experiments.resolve import resolve
from partwise.selection.keys import mean_keys, own_keys

SAMPLE = 1000  # clients whose keys are counted


def describe(name: str, data: str | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    """What `partwise describe` tells, as a JSON-able dict."""
    task, _ = resolve(name, data, changes)
    partition = task.personal.partition
    sample = task.train.select(task.personal.columns).gather(np.arange(min(SAMPLE, task.train.num_clients)))
    lines = partition.describe(mean_keys(own_keys(sample, partition)[0]))
    stores = {"train": task.train, "validation": task.validation, "test": task.test}
    return {
        "task": name,
        "parameters": [line._asdict() for line in lines],
        "clients": {part: _numbers(store) for part, store in stores.items()},
        "best": dict(task.best),
        "source": dict(task.train.info),
    }


def _numbers(store: ClientStore) -> dict[str, int]:
    return {"clients": store.num_clients, "examples": store.num_examples}
