from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partwise.model.partition import keyed, partition
from partwise.model.spec import Model
from partwise.selection.keys import own_keys
from partwise.types import UserError

NUM_WORDS, NUM_ITEMS = 6, 9


@pytest.fixture(scope="module")
def parts():
    """`word` is asked for by two columns, one of them with several ids an example; `item` by one."""
    model = Model(lambda rng: {"words": jnp.zeros((NUM_WORDS, 2)), "items": jnp.zeros(NUM_ITEMS)}, None, None)
    rules = {"words": keyed("word"), "items": keyed("item")}
    return partition(model, rules, columns={"word": ("title", "tokens")})


@st.composite
def clients(draw):
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return counts, rng.integers(0, NUM_WORDS, (sum(counts), 4)), rng.integers(0, NUM_ITEMS, sum(counts))


@settings(max_examples=100, deadline=None)
@given(clients())
def test_own_keys_equal_what_each_client_would_find_for_itself(parts, make_store, drawn):
    counts, words, items = drawn
    store = make_store(counts, title=words[:, 0], tokens=words[:, 1:].astype(np.int16), item=items)
    keys, positions = own_keys(store, parts)
    for number, (start, count) in enumerate(zip(store.starts, store.counts, strict=True)):
        mine = slice(start, start + count)
        for space, columns in (("word", words), ("item", items)):
            expected = sorted(set(columns[mine].ravel().tolist()))
            own = keys[space]
            found = own.keys[own.starts[number] : own.starts[number] + own.counts[number]]
            assert found.tolist() == expected
            named = {"word": {"title": words[:, 0], "tokens": words[:, 1:]}, "item": {"item": items}}
            for name, column in named[space].items():
                assert positions[name].shape == column.shape
                for value, position in zip(column[mine].ravel(), positions[name][mine].ravel(), strict=True):
                    assert expected[position] == value


def ids(**columns):
    return {"title": [0, 1], "tokens": [[1, 2], [3, 4]], "item": [0, 8]} | columns


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            ids(item=[0, NUM_ITEMS]),
            r"column 'item' holds keys 0\.\.9, but key space 'item' has only 0\.\.8",
        ),
        (ids(tokens=[[0, -2], [0, 1]]), r"column 'tokens' holds keys -2\.\.1.*-1 for nothing"),
        (ids(item=[0, -1]), r"column 'item' holds keys -1\.\.0"),
        (
            ids(item=[0.0, 1.0]),
            r"column 'item' holds float64, but keys are whole numbers 0\.\.8",
        ),
        ({"title": [0, 1], "tokens": [[1], [2]], "itme": [0, 1]}, r"unknown column .*'item'.*nearest: itme"),
    ],
)
def test_columns_that_hold_no_keys_are_refused(parts, make_store, columns, message):
    with pytest.raises(UserError, match=message):
        own_keys(make_store([1, 1], **columns), parts)


def test_clients_without_examples_have_no_keys(parts, make_store):
    columns = {"title": np.zeros(0, int), "tokens": np.zeros((0, 2), int), "item": np.zeros(0, int)}
    keys, positions = own_keys(make_store([0, 0], **columns), parts)
    assert keys["item"].counts.tolist() == [0, 0]
    assert positions["tokens"].shape == (0, 2)
