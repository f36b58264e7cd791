from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.data import ClientStore, by_client, by_example, by_order, by_value
from partwise.types import UserError

shares = (
    st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any).map(lambda w: [x / sum(w) for x in w])
)
sizes = st.lists(st.integers(1, 12), min_size=1, max_size=12)


def make(counts) -> ClientStore:
    client = np.repeat(np.arange(len(counts)) * 10, counts)
    rng = np.random.default_rng(len(client))
    return ClientStore.from_arrays(client, row=np.arange(len(client)), time=rng.permutation(len(client)))


@given(sizes, shares, st.integers(0, 99))
def test_every_client_lands_in_exactly_one_part(counts, fractions, seed):
    store = make(counts)
    parts = by_client(store, fractions, seed)
    assert sorted(np.concatenate([part.client_ids for part in parts])) == store.client_ids.tolist()
    for part in parts:
        for position, client in enumerate(part.client_ids):
            whole = store.examples(store.find(client))["row"]
            assert np.array_equal(part.examples(position)["row"], whole)


@given(sizes, shares, st.sampled_from(["example", "time", "lying"]))
def test_every_example_lands_in_exactly_one_part(counts, fractions, kind):
    store = make(counts)
    if kind == "example":
        parts = by_example(store, fractions, seed=5)
    else:
        parts = by_order(store, fractions, by="time" if kind == "time" else None)
    for position, client in enumerate(store.client_ids):
        mine = [part.examples(position) for part in parts]
        assert all(part.client_ids[position] == client for part in parts)
        rows = np.concatenate([part["row"] for part in mine])
        assert sorted(rows) == store.examples(position)["row"].tolist()
        ends = np.cumsum([len(part["row"]) for part in mine])
        assert np.all(np.abs(ends - np.cumsum(fractions) * counts[position]) < 1 + 1e-6)
        if kind == "time":
            assert np.all(np.diff(np.concatenate([part["time"] for part in mine])) > 0)
        if kind == "lying":
            assert rows.tolist() == sorted(rows)


def test_cuts_are_floors_of_cumulative_shares():
    assert [part.num_clients for part in by_client(make([1] * 6040))] == [4832, 604, 604]
    assert [part.num_examples for part in by_order(make([5]))] == [4, 0, 1]
    assert [part.num_examples for part in by_order(make([10]), (0.7, 0.1, 0.2))] == [7, 1, 2]
    assert [part.num_examples for part in by_order(make([1]))] == [0, 0, 1]


def test_by_client_is_the_documented_shuffle():
    store = make([1] * 20)
    positions = np.random.default_rng(7).permutation(20)
    first, second = by_client(store, (0.5, 0.5), seed=7)
    assert np.array_equal(first.client_ids, store.client_ids[positions[:10]])
    assert np.array_equal(second.client_ids, store.client_ids[positions[10:]])
    assert np.shares_memory(first.columns["row"], store.columns["row"])


def test_by_example_depends_on_the_seed():
    store = make([40, 40])
    one, same, other = (by_example(store, (0.5, 0.5), seed)[0].examples(1)["row"] for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("fractions", [(0.8, 0.1), (0.8, 0.4, -0.2), (), (np.nan, 1.0), (0.8, 0.1, 0.2)])
@pytest.mark.parametrize("cut", [by_client, by_example, lambda s, f: by_order(s, f, None)])
def test_fractions_must_add_up(cut, fractions):
    with pytest.raises(UserError, match=r"fractions are \(.*add up to 1"):
        cut(make([3, 4]), fractions)


def test_seeds_are_not_negative():
    with pytest.raises(UserError, match="seed is -1: give a whole number from 0 on"):
        by_client(make([3]), seed=-1)


def test_order_needs_its_column():
    with pytest.raises(UserError, match="unknown column 'when'"):
        by_order(make([3]), by="when")


@given(sizes, st.integers(-1, 150))
def test_examples_up_to_a_value_and_beyond_it(counts, last):
    store = make(counts)
    early, late = by_value(store, "time", last)
    for position in range(store.num_clients):
        times = np.sort(store.examples(position)["time"])
        assert early.examples(position)["time"].tolist() == times[times <= last].tolist()
        assert late.examples(position)["time"].tolist() == times[times > last].tolist()
