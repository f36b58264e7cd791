"""Histories against a loop over every client's events."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from partwise.data.histories import History, next_examples, with_histories
from partwise.data.repeats import num_repeats
from partwise.data.store import ClientStore

HISTORIES = {"history": History("item", 3)}


def store_of(lists: list[list[int]]) -> ClientStore:
    client = np.repeat(np.arange(len(lists)), [len(each) for each in lists])
    return ClientStore.from_arrays(client, item=np.concatenate(lists).astype(int), ids=["item"])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=5))
def test_histories_are_the_last_items_before_each_event(lists):
    store = store_of(lists)
    made, after = with_histories(store, HISTORIES), next_examples(store, HISTORIES)
    ids = made.vocabularies["item"]
    np.testing.assert_array_equal(made.vocabularies["history"], ids)
    padded = lambda items: [*items[-3:], *[-1] * (3 - min(len(items), 3))]
    number = {each: i for i, each in enumerate(ids.tolist())}
    for client, items in enumerate(lists):
        keys = [number[item] for item in items]
        found = made.examples(client)["history"].tolist()
        assert found == [padded(keys[:place]) for place in range(len(keys))]
        assert after.examples(client)["history"].tolist() == [padded(keys)]
    assert "item" not in after.columns
    assert num_repeats(store, "item") == sum(len(each) - len(set(each)) for each in lists)


def test_a_view_of_a_store_has_the_histories_of_its_own_rows():
    """Rows that were left out before are not in a history that is made later."""
    store = store_of([[1, 2, 3, 4], [5, 6]])
    cut = store.narrow(np.array([1, 0]), np.array([3, 2]))
    found = with_histories(cut, HISTORIES)
    assert found.examples(0)["history"][0].tolist() == [-1, -1, -1]
    assert with_histories(found, HISTORIES) is found  # there already
