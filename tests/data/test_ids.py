"""Ids are what the user wrote: the same by their texts, in every format, in memory and on disk."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.data import ClientStore, build_store, delimited, open_store, read_rows, read_table, write_store
from partwise.data.build import join_blocks
from partwise.data.checks import narrow
from partwise.data.ids import look_up, typed
from partwise.types import UserError

HASHES = [str(2**63 + 977 * k) for k in range(60)]
WORDS = ["7", "007", "0010", "10", "x", "-0", "+5", "1.0", "1e3", " 8", "NA", "true", "2020-01-01", "-3"]
BEYOND = [str(2**63 - 1), str(2**63), str(-(2**63)), str(-(2**63) - 1)]


@pytest.fixture(params=["memory", "disk"])
def out(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "out"


def write_csv(path, users, items):
    lines = [f"{user},{item},1.5" for user, item in zip(users, items, strict=True)]
    path.write_text("user,item,rating\n" + "\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("texts", [WORDS, HASHES, BEYOND, ["7", "007"], ["5", "4"]])
def test_a_csv_keeps_ids_as_written(tmp_path, out, texts):
    file = write_csv(tmp_path / "t.csv", texts, texts)
    store = read_table(file, "user", ids=["item"], out=out)
    assert store.num_clients == store.num_keys("item") == len(texts)
    assert sorted(map(str, store.client_ids.tolist())) == sorted(texts)
    for text in texts:
        rows = store.examples(store.find(text))["item"]
        assert [str(store.vocabularies["item"][key]) for key in rows] == [text]


def test_ids_are_numbers_if_and_only_if_all_of_them_are_written_so():
    assert typed(["10", "9", "-3", "0", str(2**63 - 1)]).tolist() == [10, 9, -3, 0, 2**63 - 1]
    for odd in ("007", "-0", "1.0", str(2**63), "", "٣", "1_0", "1\n"):
        assert typed(["1", odd]).tolist() == ["1", odd]


@pytest.mark.parametrize("late", ["x", "0050", str(2**64)])
def test_a_late_word_makes_all_ids_text(tmp_path, out, monkeypatch, late):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 64)
    texts = [str(k) for k in range(50)] + [late]
    store = read_table(write_csv(tmp_path / "t.csv", texts, texts), "user", ids=["item"], out=out)
    assert set(store.client_ids.tolist()) == set(store.vocabularies["item"].tolist()) == set(texts)


def test_every_format_gives_one_store(tmp_path):
    """In memory and on disk, from text, from numbers, and where batches differ in type."""
    users, items = [3, 1, 20, 3], [10, 9, 10, -4]
    numbers = pa.table({"user": users, "item": items, "rating": [1.5] * 4})
    texts = pa.table({"user": list(map(str, users)), "item": list(map(str, items)), "rating": [1.5] * 4})
    pyarrow.parquet.write_table(numbers, tmp_path / "n.parquet")
    pyarrow.parquet.write_table(texts, tmp_path / "t.parquet")
    sources = [
        lambda out: read_table(write_csv(tmp_path / "t.csv", users, items), "user", ids=["item"], out=out),
        lambda out: read_table(tmp_path / "n.parquet", "user", ids=["item"], out=out),
        lambda out: read_table(tmp_path / "t.parquet", "user", ids=["item"], out=out),
        lambda out: read_rows([numbers[:1], texts[1:]], "user", ids=["item"], out=out),
        lambda out: read_rows(texts.to_pylist(), "user", ids=["item"], out=out),
        lambda out: read_rows(numbers.cast(_decimals(numbers.schema)), "user", ids=["item"], out=out),
    ]
    for k, read in enumerate(sources):
        for store in (read(None), read(tmp_path / f"out{k}")):
            assert store.client_ids.tolist() == [1, 3, 20]
            assert store.vocabularies["item"].tolist() == [-4, 9, 10]
            assert store.client_ids.dtype == store.vocabularies["item"].dtype == np.int64
            assert store.examples(1)["item"].tolist() == [2, 0]


def _decimals(schema: pa.Schema) -> pa.Schema:
    return schema.set(0, pa.field("user", pa.decimal128(25))).set(1, pa.field("item", pa.int8()))


def test_numbers_then_words_agree_in_memory_and_on_disk(tmp_path):
    batches = [{"user": [10, 2], "x": [1, 2]}, {"user": ["a", "10"], "x": [3, 4]}]
    disk = build_store(tmp_path / "s", batches, "user")
    memory = ClientStore.from_arrays([10, 2, "a", "10"], x=[1, 2, 3, 4])
    for store in (disk, memory):
        assert store.client_ids.tolist() == ["10", "2", "a"]
        assert store.examples(0)["x"].tolist() == [1, 4]


def test_unsigned_ids_stay_what_they_are(tmp_path, out):
    users = np.array([2**64 - 1, 5, 2**63], np.uint64)
    pyarrow.parquet.write_table(pa.table({"user": users, "x": [1, 2, 3]}), tmp_path / "t.parquet")
    store = read_table(tmp_path / "t.parquet", "user", out=out)
    assert set(store.client_ids.tolist()) == {str(2**64 - 1), "5", str(2**63)}
    small = read_rows(pa.table({"user": np.array([7], np.uint64), "x": [1]}), "user", ids=["x"])
    assert small.client_ids.tolist() == [7]


def test_floats_are_ids_only_where_they_are_exact():
    assert ClientStore.from_arrays(np.array([1.0, -2.0]), x=[1, 2]).client_ids.tolist() == [-2, 1]
    assert ClientStore.from_arrays([2**53 + 1, 1.0], x=[1, 2]).client_ids.tolist() == [1, 2**53 + 1]
    for bad in (2.0**53, 1e300, 1.5, np.nan, np.inf):
        with pytest.raises(UserError, match=r"column 'client' has .* in row 1"):
            ClientStore.from_arrays(np.array([1.0, bad]), x=[1, 2])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("a\0", "holds the character NUL, in row 1"),
        ("\ud800", "no Unicode text, in row 1"),
        ("y" * 2001, "an id of 2,001 letters"),
        ("", "an empty id in row 1"),
        ((1, 2), "holds lists, but not in row 0"),
        ({"a": 1}, "has {'a': 1} .dict. in row 1"),
    ],
)
def test_what_cannot_be_an_id_is_refused(bad, message):
    with pytest.raises(UserError, match=message):
        ClientStore.from_arrays(["a", bad], x=[1, 2])


def test_stores_are_written_and_opened_with_the_types_of_their_ids(tmp_path):
    for k, ids in enumerate(([1, 20], ["1", "020"], [2**63, 1])):
        store = ClientStore.from_arrays(ids, ids=["item"], item=ids)
        store.save(tmp_path / str(k))
        again = open_store(tmp_path / str(k))
        assert again.client_ids.tolist() == store.client_ids.tolist()
        assert again.vocabularies["item"].tolist() == store.vocabularies["item"].tolist()


def test_blocks_of_numbers_and_words_are_one_population(tmp_path):
    blocks = [([7, 3], [1, 1], {"x": [1.0, 2.0]}), (["a"], [1], {"x": [3.0]})]
    for store in (join_blocks(blocks), write_store(tmp_path / "s", blocks)):
        assert store.client_ids.tolist() == ["7", "3", "a"]
    with pytest.raises(UserError, match="client 7 turns up twice"):
        join_blocks([*blocks, (["7"], [1], {"x": [1.0]})])


def test_a_client_is_found_by_its_text():
    store = ClientStore.from_arrays([7, 10], x=[1, 2])
    assert store.find(7) == store.find("7") == 0
    with pytest.raises(UserError, match="no client '007'"):
        store.find("007")
    assert store.places(np.array(["10", "010", "7"])).tolist() == [1, -1, 0]
    assert ClientStore.from_arrays(["7", "x"], x=[1, 2]).find(7) == 0


def test_a_clients_shuffle_does_not_hang_on_the_ids_of_others():
    rows = np.arange(40)
    alone = ClientStore.from_arrays([7] * 40, x=rows).reorder(seed=3)
    among = ClientStore.from_arrays(["7"] * 40 + ["x"], x=[*rows, 0]).reorder(seed=3)
    assert among.examples(among.find("7"))["x"].tolist() == alone.columns["x"].tolist()


@given(st.lists(st.one_of(st.integers(-5, 5).map(str), st.text("0-1a", min_size=1, max_size=3)), min_size=1))
def test_looking_up_is_comparing_texts(texts):
    vocabulary, wanted = typed(sorted(set(texts))), np.array(["0", "00", "1", "a", "-1", "-0"])
    known = vocabulary.astype(str).tolist()
    expected = [known.index(text) if text in known else -1 for text in wanted.tolist()]
    assert look_up(vocabulary, wanted).tolist() == expected
    assert look_up(vocabulary, vocabulary).tolist() == list(range(len(known)))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, pa.array, tuple, iter])
def test_ids_may_come_in_any_sequence(kind):
    assert ClientStore.from_arrays(
        kind([7, 3]), ids=["item"], item=kind([5, 4]), x=[1, 2]
    ).client_ids.tolist() == [3, 7]


@pytest.mark.parametrize("kind", [np.int64, np.uint64])
def test_whole_numbers_that_do_not_fit_devices_are_refused(kind):
    assert narrow("x", np.array([0, 2**31 - 1], kind)).dtype.itemsize == 4
    with pytest.raises(UserError, match=r"column 'x' holds whole numbers from 0 to 5000000000.*32 bits"):
        narrow("x", np.array([0, 5_000_000_000], kind))
    assert narrow("x", np.array([1e10, 0.5])).dtype == np.float32


def test_rows_may_be_sorted_by_large_numbers_that_are_not_kept(tmp_path, out):
    file = tmp_path / "t.csv"
    file.write_text("user,item,time\na,2,1700000000002\na,1,1700000000001\n")
    store = read_table(file, "user", columns=["item"], ids=["item"], order_by="time", out=out)
    assert list(store.columns) == ["item"]
    assert store.columns["item"].tolist() == [0, 1]
    if out:
        assert sorted(path.name for path in out.iterdir())[:2] == ["clients.arrow", "examples.arrow"]
        assert len(list(out.iterdir())) == 4
    for columns in (["item", "time"], None):
        kept = read_table(file, "user", columns=columns, ids=["item"], order_by="time")
        assert kept.columns["time"].tolist() == [1700000000001, 1700000000002]


def test_whole_numbers_are_not_rounded_where_batches_differ():
    exact = pa.table({"user": [1], "x": [2**53 + 1]})
    with pytest.raises(UserError, match=r"column 'x' holds whole numbers beyond 2\^53"):
        read_rows([exact, pa.table({"user": [1], "x": [0.5]})], "user")
