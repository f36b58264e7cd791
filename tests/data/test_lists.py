"""Lists of ids per row, columns that share a vocabulary, and text files of other dialects."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from partwise.data import ClientStore, read_rows, read_table, rows
from partwise.types import UserError

PAST = [["tea", "rice"], [], ["oil", "tea", "salt"], ["rice"]]
NEXT = ["oil", "tea", "rice", "salt"]
USERS = ["a", "b", "a", "b"]
SHARED = {"past": "item", "next": "item"}


@pytest.fixture(params=["memory", "disk"])
def out(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "out"


def arrow(past=PAST, kind=None):
    return pa.table({"user": USERS, "past": pa.array(past, kind), "next": NEXT})


def dicts(past=PAST):
    return [
        dict(zip(("user", "past", "next"), row, strict=True)) for row in zip(USERS, past, NEXT, strict=True)
    ]


@pytest.mark.parametrize("source", ["list", "large_list", "dicts", "parquet"])
@pytest.mark.parametrize("chunk", [1, 100])
def test_lists_that_differ_are_cut_and_filled_up(tmp_path, out, source, chunk, monkeypatch):
    monkeypatch.setattr(rows, "ROWS_AT_ONCE", chunk)
    options = {"ids": SHARED, "lists": {"past": 2}, "out": out}
    if source == "parquet":
        pyarrow.parquet.write_table(arrow(), tmp_path / "t.parquet")
        store = read_table(tmp_path / "t.parquet", "user", **options)
    elif source == "dicts":
        store = read_rows(dicts(), "user", **options)
    else:
        kind = pa.large_list(pa.string()) if source == "large_list" else None
        store = read_rows(arrow(kind=kind), "user", **options)
    words = store.vocabularies["past"].tolist()
    assert words == store.vocabularies["next"].tolist() == ["oil", "rice", "salt", "tea"]
    spelled = [[words[key] if key >= 0 else None for key in row] for row in store.columns["past"].tolist()]
    assert spelled == [["tea", "rice"], ["tea", "salt"], [None, None], ["rice", None]]
    assert [words[key] for key in store.columns["next"]] == ["oil", "rice", "tea", "salt"]
    assert store.num_keys("past") == 4


def test_a_plain_list_of_ids_gives_each_column_its_own_vocabulary():
    store = read_rows(dicts([["tea"], ["oil"], ["tea"], ["oil"]]), "user", ids=["past", "next"])
    assert store.vocabularies["past"].tolist() == ["oil", "tea"]
    assert store.num_keys("next") == 4
    assert store.columns["past"].shape == (4, 1)


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int64()), pa.list_(pa.int64(), 2)])
def test_lists_of_one_length_are_ids_or_numbers(kind, out):
    past = [[5, 7], [7, 7], [-1, 5], [9, -1]]
    store = read_rows(arrow(past, kind), "user", columns=["past"], ids=["past"], out=out)
    assert store.vocabularies["past"].tolist() == [5, 7, 9]  # -1 is nothing
    assert store.columns["past"].tolist() == [[0, 1], [-1, 0], [1, 1], [2, -1]]
    numbers = read_rows(arrow(past, kind), "user", columns=["past"], out=out and out.with_name("numbers"))
    assert numbers.columns["past"].tolist() == [[5, 7], [-1, 5], [7, 7], [9, -1]]


def test_arrays_of_lists_of_ids():
    store = ClientStore.from_arrays([1, 1], ids=SHARED, past=np.array([[3, -1], [4, 3]]), next=[4, 9])
    assert store.vocabularies["past"].tolist() == [3, 4, 9]
    assert store.columns["past"].tolist() == [[0, -1], [1, 0]]
    assert store.columns["next"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("past", "options", "message"),
    [
        (PAST, {"ids": SHARED}, r"different lengths \(2 in row 0, 0 in row 1\).*lists={'past': N}"),
        (
            [[1], [2, 3], [], [1]],
            {"lists": {"past": 2}, "ids": ["next"]},
            "only ids can be filled up|of numbers, give every row as many",
        ),
        ([["a"], ["b"], [None], ["c"]], {"ids": SHARED}, "missing value"),
        ([["a"], ["b"], None, ["c"]], {"ids": SHARED}, "missing value|holds lists, but not in row 2"),
        (
            PAST,
            {"ids": SHARED, "lists": {"next": 2, "past": 2}},
            "'next', which holds (string|one id per row)",
        ),
        (PAST, {"ids": SHARED, "lists": {"past": 0}}, "room of at least 1"),
        (PAST, {"ids": SHARED, "lists": {"pas": 2}}, "columns that are kept"),
        (PAST, {"ids": SHARED, "lists": {"past": "a"}}, "lists has 'past': a; .*room of at least 1"),
        (PAST, {"ids": SHARED, "lists": ["past"]}, r"lists is \['past'\]: .*as in lists={'past': 20}"),
        ([["a"], ["b"], [""], ["c"]], {"ids": SHARED}, "empty id in row 2"),
    ],
)
@pytest.mark.parametrize("source", [arrow, dicts])
def test_lists_that_cannot_be_meant_are_refused(source, past, options, message):
    with pytest.raises(UserError, match=message):
        read_rows(source(past), "user", **options)


def test_batches_with_lists_of_different_lengths_are_refused(out):
    tables = [pa.table({"user": [1], "past": [[1] * k]}) for k in (2, 3)]
    with pytest.raises(UserError, match="past"):
        read_rows(tables, "user", ids=["past"], out=out)


@pytest.mark.parametrize("kind", [pa.map_(pa.string(), pa.int64()), pa.list_view(pa.int64()), pa.null()])
@pytest.mark.parametrize("ids", [[], ["x"]])
def test_columns_of_other_types_are_named(kind, ids):
    values = {pa.null(): None}.get(kind, [] if pa.types.is_map(kind) else [1])
    table = pa.table({"user": [1], "x": pa.array([values], kind)})
    with pytest.raises(UserError, match="column 'x'"):
        read_rows(table, "user", ids=ids)


def test_texts_of_polars_are_read():
    table = pa.table({"user": pa.array(["b", "a"], pa.string_view()), "x": [1, 2]})
    assert read_rows(table, "user").client_ids.tolist() == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ("user;item\nzoë;caffè\n".encode(), {"delimiter": ";"}),
        ("user,item\nzoë,caffè\n".encode("latin-1"), {"encoding": "latin-1"}),
        ("user|item\nzoë|caffè\n".encode("utf-16"), {"encoding": "utf-16", "delimiter": "|"}),
        ("\ufeffuser,item\nzoë,caffè\n".encode(), {}),
        ("\ufeffuser,item\nzoë,caffè\n".encode(), {"encoding": "utf-8-sig"}),
        ('"user","item"\r\n"zoë","caffè"\r\n'.encode(), {}),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_dialects_of_text(tmp_path, out, content, options, packed):
    import gzip

    file = tmp_path / ("t.csv.gz" if packed else "t.csv")
    file.write_bytes(gzip.compress(content) if packed else content)
    store = read_table(file, "user", ids=["item"], out=out, **options)
    assert store.client_ids.tolist() == ["zoë"]
    assert store.vocabularies["item"].tolist() == ["caffè"]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("user;rating\na;1\n", {}, r"'user;rating' is a single name.*delimiter=';'"),
        ("user,rating\na,1\n", {"delimiter": "::"}, "delimiter is '::': give one character"),
        ("user,rating\na,1\n", {"encoding": "klingon"}, "encoding is 'klingon', which Python does not know"),
        (b"user,rating\n\xe9,1\n", {}, "line 2, column 'user'.*encoding='latin-1'"),
    ],
)
def test_other_dialects_are_asked_for(tmp_path, content, options, message):
    file = tmp_path / "t.csv"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        read_table(file, "user", **options)
