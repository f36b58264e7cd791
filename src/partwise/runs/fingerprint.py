"""What a run was trained on, in a few digests, so that changed data under an old name is noticed.

For every part (train, validation, test) there are the numbers of clients and examples. There are digests of
the clients' ids, of their sizes, of every vocabulary, and of every column that the model reads, with all
examples in their order. If a part takes more than `WHOLE_BYTES`, ids, sizes and vocabularies are digested
completely. Columns are digested only by the first `SAMPLED_ROWS` examples of `SAMPLED_CLIENTS` clients,
spread evenly. So a store larger than memory is not read completely.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from partwise.data.spool import layouts_of
from partwise.data.store import ClientStore
from partwise.runs.document import to_plain
from partwise.tasks import Task

PARTS = ("train", "validation", "test")
WHOLE_BYTES = 1 << 28
SAMPLED_CLIENTS, SAMPLED_ROWS = 1000, 1000
LETTERS = 16  # length of a digest; two different arrays agree by chance once in 2^64


def fingerprint(task: Task) -> dict[str, Any]:
    """The fingerprint of a task's data, as values for JSON."""
    settings = [task.personal, *([task.stateful] if task.stateful else [])]
    columns = list(dict.fromkeys(name for setting in settings for name in setting.columns))
    parts = {name: _part(getattr(task, name), columns) for name in PARTS}
    return {**parts, "options": to_plain(dict(task.options))}


def digest_of(task: Task) -> str:
    """The whole fingerprint as one digest."""
    return hashlib.sha256(json.dumps(fingerprint(task)).encode()).hexdigest()


def _part(store: ClientStore, columns: Sequence[str]) -> dict[str, Any]:
    there = [name for name in columns if name in store.columns]
    return {
        "clients": store.num_clients,
        "examples": store.num_examples,
        "ids": _digest(store.client_ids),
        "sizes": _digest(store.counts),
        "vocabularies": {name: _digest(ids) for name, ids in store.vocabularies.items()},
        "columns": _columns(store.select(there)) if there else {},
    }


def _columns(store: ClientStore) -> dict[str, str]:
    row = sum(layout.row_bytes for layout in layouts_of(store.columns).values())
    if row * store.num_examples > WHOLE_BYTES:
        chosen = np.linspace(0, store.num_clients - 1, SAMPLED_CLIENTS).astype(np.int64)
        store = store.take(np.unique(chosen)).cap(SAMPLED_ROWS)
    store = store.gather() if store.remote else store  # one batch of requests
    totals = {name: hashlib.sha256() for name in store.columns}
    for block in store.blocks():
        for name, values in block.columns.items():
            totals[name].update(_bytes(values))
    about = {name: f"{values.dtype.str}{values.shape[1:]}" for name, values in store.columns.items()}
    for name, total in totals.items():
        total.update(about[name].encode())
    return {name: total.hexdigest()[:LETTERS] for name, total in totals.items()}


def _digest(array: np.ndarray) -> str:
    total = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    total.update(_bytes(array))
    return total.hexdigest()[:LETTERS]


def _bytes(array: np.ndarray) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two fingerprints, in words. An option that the older one does not have is new since
    then, and no difference if it is off."""
    found = []
    for part in PARTS:
        found += _of_part(part, before[part], now[part])
    options = {**before["options"], **now["options"]}
    for name in options:
        was, is_now = (side["options"].get(name) for side in (before, now))
        if was != is_now and (is_now or name in before["options"]):
            found.append(f"the option {name} was {was} and is {is_now}")
    return found


def _of_part(part: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    for kind in ("clients", "examples"):
        if before[kind] != now[kind]:
            return [f"{part} had {before[kind]:,} {kind} and has {now[kind]:,}"]
    names = lambda kind: [n for n in {**before[kind], **now[kind]} if before[kind].get(n) != now[kind].get(n)]
    found = [f"{part} has other client ids"] if before["ids"] != now["ids"] else []
    found += [f"{part} has other numbers of examples by client"] if before["sizes"] != now["sizes"] else []
    found += [f"column '{name}' of {part} has other ids" for name in names("vocabularies")]
    return found + [f"column '{name}' of {part} has other values" for name in names("columns")]
