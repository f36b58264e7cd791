from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partwise.data import ClientStore, by_client, by_example, by_order, open_store, spool
from partwise.data.ragged import row_blocks
from partwise.types import UserError

rows = st.lists(
    st.tuples(st.integers(-3, 6), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=40
)  # client, item, time


def make(table) -> ClientStore:
    client, item, time = (np.array(column) for column in zip(*table, strict=True))
    pairs = np.stack([item, time], axis=1).astype(np.float32)
    return ClientStore.from_arrays(
        client, ids=("item",), item=item, time=time, row=np.arange(len(time)), pair=pairs
    )


def twin(store: ClientStore) -> list[dict[str, list]]:
    """The slow twin: every client's rows as lists."""
    return [
        {name: values.tolist() for name, values in store.examples(k).items()}
        for k in range(store.num_clients)
    ]


@given(rows)
def test_from_arrays_groups_rows_by_client_in_their_order(table):
    store = make(table)
    clients = sorted({client for client, _, _ in table})
    assert store.client_ids.tolist() == clients
    items = sorted({item for _, item, _ in table})
    assert store.vocabularies["item"].tolist() == items
    for client, client_rows in zip(clients, twin(store), strict=True):
        mine = [k for k, row in enumerate(table) if row[0] == client]
        assert client_rows["row"] == mine
        assert client_rows["item"] == [items.index(table[k][1]) for k in mine]
        assert client_rows["pair"] == [[float(table[k][1]), float(table[k][2])] for k in mine]
    assert store.packed()
    assert store.num_examples == len(table)


@given(rows, st.data())
def test_views_equal_the_slow_twin_and_copy_nothing(table, data):
    store = make(table)
    positions = data.draw(st.lists(st.integers(0, store.num_clients - 1), max_size=8))
    cap = data.draw(st.integers(1, 4))
    slow = twin(store)
    view = store.take(positions).cap(cap).select(["row", "item"])
    assert twin(view) == [{name: slow[k][name][:cap] for name in ("row", "item")} for k in positions]
    assert view.client_ids.tolist() == [store.client_ids[k] for k in positions]
    kept = [k for k in range(store.num_clients) if store.counts[k] >= cap]
    assert twin(store.filter(cap)) == [slow[k] for k in kept]
    assert twin(store.take(store.counts >= cap)) == [slow[k] for k in kept]
    assert all(np.shares_memory(view.columns[name], store.columns[name]) for name in view.columns)


@given(rows, st.data())
def test_gather_equals_a_loop(table, data):
    store = make(table).cap(data.draw(st.integers(1, 5)))
    positions = data.draw(st.lists(st.integers(0, store.num_clients - 1), max_size=8))
    packed = store.gather(positions)
    assert twin(packed) == [twin(store)[k] for k in positions]
    assert packed.packed()
    for name, values in packed.columns.items():
        loop = [store.examples(k)[name] for k in positions]
        assert np.array_equal(values, np.concatenate(loop) if loop else store.columns[name][:0])


@given(rows)
def test_reorder_by_a_column_is_a_stable_sort_of_each_client(table):
    store = make(table)
    for before, after in zip(twin(store), twin(store.reorder(by="time")), strict=True):
        order = sorted(range(len(before["time"])), key=lambda k: before["time"][k])
        assert after == {name: [values[k] for k in order] for name, values in before.items()}


@given(rows, st.integers(0, 2**40), st.data())
def test_a_clients_shuffle_does_not_depend_on_the_other_clients(table, seed, data):
    store = make(table)
    positions = data.draw(st.lists(st.integers(0, store.num_clients - 1), max_size=5))
    shuffled = store.reorder(seed=seed)
    assert twin(shuffled.take(positions)) == twin(store.take(positions).reorder(seed=seed))
    for before, after in zip(twin(store), twin(shuffled), strict=True):
        assert sorted(after["row"]) == before["row"]


@pytest.mark.parametrize("ids", [np.repeat(np.arange(6000), 3), np.repeat(np.arange(6000), 3).astype(str)])
def test_shuffles_are_uniform_over_the_orders(ids):
    store = ClientStore.from_arrays(ids, place=np.tile(np.arange(3), 6000)).reorder(seed=3)
    orders, times = np.unique(store.columns["place"].reshape(-1, 3), axis=0, return_counts=True)
    assert len(orders) == 6
    assert np.abs(times - 1000).max() < 150  # five standard deviations
    other = ClientStore.from_arrays(ids, place=np.tile(np.arange(3), 6000)).reorder(seed=4)
    assert not np.array_equal(store.columns["place"], other.columns["place"])


def test_the_padding_of_text_ids_does_not_change_a_shuffle():
    alone = ClientStore.from_arrays(["ab"] * 50, x=np.arange(50)).reorder(seed=1)
    wide = ClientStore.from_arrays(["ab"] * 50 + ["abcdefgh"] * 2, x=np.arange(52)).reorder(seed=1)
    assert np.array_equal(alone.examples(0)["x"], wide.examples(0)["x"])


def test_pool_is_one_client_with_every_row(small):
    pooled = small.cap(2).pool()
    assert pooled.num_clients == 1
    assert pooled.examples(0)["rating"].tolist() == [2, 4, 1, 3, 6]
    assert pooled.num_keys("item") == 4
    assert np.shares_memory(small.pool().columns["rating"], small.columns["rating"])
    for size, counts in [(3, [3, 3]), (4, [4, 2]), (9, [6])]:
        parts = small.pool(size)
        assert parts.counts.tolist() == counts
        np.testing.assert_array_equal(parts.gather().columns["rating"], small.pool().columns["rating"])


def test_derived_and_renamed_columns(small):
    derived = small.with_columns(like=small.columns["rating"] > 3).rename({"item": "movie"})
    assert list(derived.columns) == ["movie", "rating", "time", "like"]
    assert derived.examples(0)["like"].tolist() == [False, True, True]
    assert derived.num_keys("movie") == 4
    assert "item" not in derived.vocabularies
    assert small.with_columns(item=np.zeros(6)).vocabularies == {}


@given(rows, st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_a_saved_store_comes_back_memory_mapped(tmp_path_factory, table, cap, min_examples):
    store = make(table).cap(cap)
    folder = tmp_path_factory.mktemp("store") / "store"
    store.save(folder)
    back = open_store(folder)
    assert twin(back) == twin(store)
    assert back.packed()
    for name, values in back.columns.items():
        assert values.dtype == store.columns[name].dtype
        assert not values.flags.owndata
        assert not values.flags.writeable
    assert np.array_equal(back.client_ids, store.client_ids)
    assert np.array_equal(back.vocabularies["item"], store.vocabularies["item"])


def test_every_type_of_column_survives_the_disk(tmp_path):
    columns = {
        kind: np.arange(6).astype(kind)
        for kind in ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64")
    }
    columns["image"] = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    columns["flags"] = np.arange(12).reshape(6, 2) % 2 == 0
    store = ClientStore.from_arrays(list("aabbbc"), info={"n": np.int64(3)}, **columns)
    store.save(tmp_path / "deep" / "store")
    back = open_store(tmp_path / "deep" / "store")
    for name, values in columns.items():
        assert back.columns[name].dtype == values.dtype
        assert np.array_equal(back.columns[name], values)
    assert back.client_ids.tolist() == ["a", "b", "c"]
    assert back.info == {"n": 3}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["store"]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 12))
def test_row_blocks_cover_all_clients_within_the_limit(counts, limit):
    blocks = row_blocks(np.array(counts), limit)
    assert [k for block in blocks for k in range(block.start, block.stop)] == list(range(len(counts)))
    assert all(sum(counts[block]) <= limit or block.stop == block.start + 1 for block in blocks)


def test_find_by_number_or_text(small):
    assert small.find("c") == 2
    numbers = ClientStore.from_arrays([30, 10, 20], x=[0, 1, 2])
    assert numbers.find(30) == 2
    assert numbers.find("20") == 1
    with pytest.raises(UserError, match=r"no client 21 among the 3 \(nearest: 20"):
        numbers.find(21)
    with pytest.raises(UserError, match=r"no client 'anna' among the 3"):
        numbers.find("anna")
    with pytest.raises(UserError, match=r"no client 30 among the 0 \(there are none\)"):
        numbers.take([]).find(30)
    with pytest.raises(UserError, match=r"no client 'd' among the 3 \(known: a, b, c\)"):
        small.find("d")


MASKED = np.ma.array([1, 2], mask=[False, True])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"client": [1, 2], "x": [1, 2, 3]}, "column 'x' has 3 rows, the client column has 2"),
        ({"client": [1, 2], "x": 3}, "column 'x' has a single value, the client column has 2"),
        ({"client": [], "x": []}, "there are no rows"),
        ({"client": [1]}, "there are no rows"),
        ({"client": [5, 6, 6], "x": [1, np.nan, np.inf]}, "column 'x' has 2 values that are not finite, "
         "the first: nan in row 1 of client 6"),
        ({"client": [5, 6], "x": [[1, 2], [3, -np.inf]]}, "first: -inf in row 1 of client 6"),
        ({"client": [5, 6], "x": [1, None]}, "column 'x' has 1 missing values, the first: row 1 of client 6"),
        ({"client": [5, 6], "x": MASKED}, "column 'x' has 1 missing values, the first: row 1"),
        ({"client": [5, 6], "x": np.ma.stack([MASKED] * 2)}, "column 'x' has 2 missing values, the first: row 0"),
        ({"client": [5, 6], "x": [1.0, np.ma.masked]}, "column 'x' has 1 missing values, the first: row 1"),
        ({"client": [5, 6], "x": [[1, 2], MASKED]}, "column 'x' has 1 missing values, the first: row 1"),
        ({"client": [5, 6], "x": MASKED, "ids": ["x"]}, "column 'x' has a missing value in row 1"),
        ({"client": [5, 6], "x": [1, np.ma.masked], "ids": ["x"]}, "column 'x' has a missing value in row 1"),
        ({"client": MASKED, "x": [1, 2]}, "column 'client' has a missing value in row 1"),
        ({"client": [5, 6], "x": [np.array([1, 2]), np.array([1])]}, "different lengths .2 in row 0, 1 in row 1"),
        ({"client": [5, 6], "x": np.array([[1], [2, 3]], object)}, "different lengths .1 in row 0, 2 in row 1"),
        ({"client": [5, 6], "x": [[1], None]}, "column 'x' has 1 missing values, the first: row 1"),
        ({"client": [5, None], "x": [1, 2]}, "column 'client' has a missing value in row 1"),
        ({"client": [5, np.nan], "x": [1, 2]}, "column 'client' has a missing value in row 1"),
        ({"client": [5, 1.5], "x": [1, 2]}, "'client' has 1.5 .float. in row 1: ids are whole numbers"),
        ({"client": ["a", ""], "x": [1, 2]}, "column 'client' has an empty id in row 1"),
        ({"client": [1, 2], "x": ["one", "two"]}, r"column 'x' holds .*'one', row 0.*ids=\('x',\)"),
        ({"client": [1, 2], "rating": [1, 2], "ids": ("ratin",)}, "unknown column 'ratin' .nearest: rating"),
        ({"client": [[1], [2]], "x": [1, 2]}, "the client column holds lists"),
    ],
)  # fmt: skip
def test_bad_columns_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        ClientStore.from_arrays(**arguments)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda s: s.select(["ratin"]), "unknown column 'ratin' .nearest: rating"),
        (lambda s: s.num_keys("rating"), "'rating' holds values, not keys .columns with keys: item"),
        (lambda s: s.num_keys("itm"), "unknown column 'itm' .nearest: item"),
        (lambda s: s.take([0, 3]), "no client position 3: positions go from 0 to 2"),
        (lambda s: s.take([-1]), "no client position -1"),
        (lambda s: s.take([0.5]), "positions must be"),
        (lambda s: s.take([True]), "positions must be"),
        (lambda s: s.cap(0), "max_examples is 0: give at least 1"),
        (lambda s: s.reorder(), "needs a column to sort by or a seed"),
        (lambda s: s.reorder(by="tme"), "unknown column 'tme'"),
        (lambda s: s.cap(1).with_columns(x=[1, 2, 3]), "call gather.. first"),
        (lambda s: s.with_columns(x=[1, 2]), "column 'x' has 2 rows"),
        (lambda s: s.rename({"item": "time"}), "two columns one name"),
        (lambda s: s.narrow(np.array([0, 0, 2]), np.array([1, 1, 1])), "stay within"),
        (lambda s: ClientStore(s.columns, s.starts + 1, s.counts, s.client_ids), "within the 6 rows"),
    ],
)
def test_bad_requests_are_refused(small, act, message):
    with pytest.raises(UserError, match=message):
        act(small)


def test_damaged_and_foreign_folders_are_named(small, tmp_path):
    with pytest.raises(UserError, match=r"nowhere does not exist: check the path"):
        open_store(tmp_path / "nowhere")
    (tmp_path / "photo.jpg").write_text("x")
    with pytest.raises(UserError, match=r"not a partwise store: it has no store.json .photo.jpg"):
        open_store(tmp_path)
    with pytest.raises(UserError, match="a file, not a folder"):
        open_store(tmp_path / "photo.jpg")
    small.save(tmp_path / "store")
    with pytest.raises(UserError, match="already exists: remove it first"):
        small.save(tmp_path / "store")
    for name in ("examples.arrow", "clients.arrow", "vocabularies.arrow"):
        damaged = tmp_path / f"damaged-{name}"
        shutil.copytree(tmp_path / "store", damaged)
        content = (damaged / name).read_bytes()
        (damaged / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(UserError, match=r"(is damaged|is not whole); .*build it again"):
            open_store(damaged)
        (damaged / name).unlink()
        with pytest.raises(UserError, match=r"(is damaged|is not whole); .*build it again"):
            open_store(damaged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "store version 99, this partwise reads version 1"),
        ({"format": "other"}, "does not say format 'partwise-store'"),
        ({"num_examples": 5}, "its files disagree in length"),
    ],
)
def test_store_json_must_fit(small, tmp_path, change, message):
    small.save(tmp_path / "store")
    file = tmp_path / "store" / "store.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=message):
        open_store(tmp_path / "store")
    file.write_text(file.read_text()[:20])
    with pytest.raises(UserError, match=r"store.json cannot be read"):
        open_store(tmp_path / "store")


def test_info_that_json_cannot_say_leaves_no_folder(small, tmp_path):
    bad = ClientStore(small.columns, small.starts, small.counts, small.client_ids, info={"x": object()})
    with pytest.raises(UserError, match="only what JSON can say"):
        bad.save(tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def test_a_store_cannot_be_saved_below_a_file(small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        small.save(tmp_path / "file" / "store")


WIDE = ("words", "pixels")


def wide(num_rows: int = 60, seed: int = 0) -> ClientStore:
    """Bags of words padded with -1, and images: the columns of the tag and the handwriting tasks."""
    rng = np.random.default_rng(seed)
    return ClientStore.from_arrays(
        rng.integers(0, 7, num_rows),
        words=rng.integers(-1, 9, (num_rows, 5)).astype(np.int32),
        pixels=rng.integers(0, 256, (num_rows, 28, 28)).astype(np.uint8),
        row=np.arange(num_rows),
    )


def test_wide_columns_keep_rows_together_whatever_is_done(tmp_path):
    store = wide()
    whole = {row: (store.columns["words"][k], store.columns["pixels"][k])
             for k, row in enumerate(store.columns["row"].tolist())}  # fmt: skip
    store.save(tmp_path / "store")
    opened = open_store(tmp_path / "store")
    parts = [*by_client(opened, (0.5, 0.5)), *by_example(opened, (0.5, 0.5)), *by_order(store, by="row")]
    parts += [opened.gather([3, 1]), store.reorder(seed=4), opened.reorder(by="row"), store.pool()]
    for part in [opened, *parts, *(part.gather() for part in parts)]:
        for position in range(part.num_clients):
            mine = part.examples(position)
            for k, row in enumerate(mine["row"].tolist()):
                assert np.array_equal(mine["words"][k], whole[row][0])
                assert np.array_equal(mine["pixels"][k], whole[row][1])
    assert opened.columns["words"].dtype == np.int32
    assert opened.columns["words"].min() == -1
    assert opened.columns["pixels"].dtype == np.uint8
    assert not opened.columns["pixels"].flags.writeable


def test_blocks_of_wide_rows_are_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(spool, "BYTES_AT_ONCE", 30 * (5 * 4 + 784 + 8))
    store = wide()
    blocks = list(store.blocks())
    assert len(blocks) > 1
    assert all(block.counts.sum() <= 30 for block in blocks)
    rows = np.concatenate([block.columns["row"] for block in blocks])
    assert np.array_equal(rows, store.columns["row"])


@pytest.mark.parametrize("name", WIDE)
def test_rows_cannot_be_sorted_by_a_wide_column(name):
    with pytest.raises(UserError, match=rf"cannot be sorted by column '{name}', .*one value per row \(row\)"):
        wide().reorder(by=name)


def test_rows_that_hold_nothing_are_refused():
    with pytest.raises(UserError, match=r"column 'x' has rows of shape \(0,\), which hold nothing"):
        ClientStore.from_arrays([1, 2], x=np.zeros((2, 0)))


def test_places_of_clients_by_id():
    """In any order and as often as asked; -1 of who is not there."""
    store = ClientStore.from_arrays(["b", "a", "c", "a"], x=[1, 2, 3, 4])
    shuffled = store.take([2, 0, 1])
    found = shuffled.places(np.array(["a", "zed", "c", "a", "aa"]))
    assert [shuffled.client_ids[i] if i >= 0 else None for i in found] == ["a", None, "c", "a", None]
    assert store.take([]).places(np.array(["a"])).tolist() == [-1]
