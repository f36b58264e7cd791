"""Histories: for every event of a client, the items of its earlier events.

A column of histories is [N, L]: the last L earlier ids, oldest first, padded with -1 at the end. It shares the
vocabulary of the column that it is made of. Events are in the order of the store, which should be that of time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from partwise.data.ragged import last_of, offsets, ranks
from partwise.data.store import ClientStore


class History(NamedTuple):
    """A column of histories: of which column they are, and how long at most."""

    of: str
    length: int


def with_histories(store: ClientStore, histories: Mapping[str, History]) -> ClientStore:
    """The store, packed, with columns of histories that it does not have yet."""
    missing = {name: each for name, each in histories.items() if name not in store.columns}
    if not missing:
        return store
    packed = store if store.packed() else store.gather()
    first = np.arange(packed.num_examples)
    columns, vocabularies = dict(packed.columns), dict(packed.vocabularies)
    for name, (of, length) in missing.items():
        columns[name] = last_of(columns[of], first, ranks(packed.counts), length)
        if of in vocabularies:
            vocabularies[name] = vocabularies[of]
    return dataclasses.replace(packed, columns=columns, vocabularies=vocabularies)


def next_examples(store: ClientStore, histories: Mapping[str, History]) -> ClientStore:
    """One example for every client: what comes after its last event. Its histories hold all its events; other
    columns are as in its last event, and the columns of which histories are made are left out."""
    packed = store if store.packed() else store.gather()
    ends = np.cumsum(packed.counts)
    made_of = {each.of for each in histories.values()}
    last = {
        name: values[np.maximum(ends - 1, 0)]
        for name, values in packed.columns.items()
        if name not in made_of and name not in histories and len(values)
    }
    columns = last | {
        name: last_of(packed.columns[of], ends, packed.counts, length)
        for name, (of, length) in histories.items()
    }
    vocabularies = {
        name: packed.vocabularies[of] for name, (of, _) in histories.items() if of in packed.vocabularies
    }
    kept = {name: ids for name, ids in packed.vocabularies.items() if name in last}
    one = np.ones(packed.num_clients, np.int64)
    return dataclasses.replace(
        packed, columns=columns, vocabularies=vocabularies | kept, starts=offsets(one), counts=one
    )
