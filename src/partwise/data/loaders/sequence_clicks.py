"""Clicks made of sequences of items (`sequences`): does a user take this item next?

Every item of a user after the first is a positive example, with the items before it as history. Beside it, with
the same history, is a negative example: an item that the user never takes, each as likely as the other, drawn once.
Columns are those of `amazon_clicks`, without times. Rows of a user are in the order of time, in pairs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from partwise.data.histories import History, with_histories
from partwise.data.loaders import sequences
from partwise.data.ragged import offsets, owners, ranks
from partwise.data.store import ClientStore
from partwise.types import UserError


def load(path: str | Path | None, name: str, length: int = 50, seed: int = 0) -> ClientStore:
    """Read `NAME.txt` as `sequences.load` does. Histories are cut to their last `length` items."""
    if length < 1:
        raise UserError(f"length is {length}: a history has room for at least 1 item")
    store = sequences.load(path, name)
    _check_others(store)
    return make_clicks(store, length, seed)


def make_clicks(store: ClientStore, length: int, seed: int) -> ClientStore:
    """The examples of a store with the column `item`. A user with one item has none."""
    events = with_histories(store, {"history": History("item", length)})
    later = np.flatnonzero(ranks(events.counts) > 0)
    client, taken = owners(events.counts), events.columns["item"].astype(np.int64)
    others = _draw_others(client, taken, client[later], events.num_keys("item"), seed)
    columns = {
        "user": np.repeat(client[later], 2).astype(np.int32),
        "item": np.stack([taken[later], others], axis=1).ravel().astype(np.int32),
        "history": np.repeat(events.columns["history"][later], 2, axis=0),
        "label": np.tile(np.array([1, 0], np.float32), len(later)),
    }
    counts = 2 * np.maximum(events.counts - 1, 0)
    keys = {"user": store.client_ids, **dict.fromkeys(("item", "history"), store.vocabularies["item"])}
    info = {**store.info, "history_length": length}
    return ClientStore(columns, offsets(counts), counts, store.client_ids, keys, info)


def hold_out_last(store: ClientStore) -> tuple[ClientStore, ClientStore, ClientStore]:
    """(train, validation, test): of every user the last pair of examples is for the test, and the one before it for
    validation. A user with two pairs has none for validation, a user with one has none for the test."""
    pairs = store.counts // 2
    test, validation = pairs >= 2, pairs >= 3
    cuts = 2 * np.stack([0 * pairs, pairs - test - validation, pairs - test, pairs])
    train, validation, test = (store.narrow(cuts[k], cuts[k + 1] - cuts[k]) for k in range(3))
    return train, validation, test


def _draw_others(
    owner: np.ndarray, taken: np.ndarray, clients: np.ndarray, num_items: int, seed: int
) -> np.ndarray:
    """For each of `clients` an item that it never takes, [n]. Items that it takes are drawn again."""
    rng = np.random.default_rng(seed)
    held = np.unique(owner * num_items + taken)
    drawn = rng.integers(0, num_items, len(clients))
    again = np.arange(len(clients))
    while len(again):
        again = again[np.isin(clients[again] * num_items + drawn[again], held)]
        drawn[again] = rng.integers(0, num_items, len(again))
    return drawn


def _check_others(store: ClientStore) -> None:
    """Raise `UserError` if a user takes everything, or if nobody takes two items."""
    num_items, file = store.num_keys("item"), store.info["file"]
    pairs = np.unique(owners(store.counts) * num_items + store.columns["item"])
    different = np.bincount(pairs // num_items, minlength=store.num_clients)
    if different.max() == num_items:
        user = store.client_ids[different.argmax()]
        raise UserError(
            f"{file}: user {user} takes all {num_items} items, so there is none that it does not take. Leave the "
            f"user out, or give more users"
        )
    if store.counts.max() < 2:
        raise UserError(f"{file}: no user has two items, so none has a next item. Give longer sequences")
