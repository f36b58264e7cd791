"""Rows from a program: the store that a table of them would give."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from partwise.data import read_rows, rows
from partwise.types import UserError

USERS, ITEMS, RATINGS = ["b", "a", "a", "c"], ["x", "z", "y", "x"], [1.0, 2.0, 3.0, 4.0]


def dicts():
    for user, item, rating in zip(USERS, ITEMS, RATINGS, strict=True):
        yield {"user": user, "item": item, "rating": rating, "time": -rating}


TABLE = pa.table({name: [row[name] for row in dicts()] for name in ("user", "item", "rating", "time")})


@pytest.fixture(params=["memory", "disk"])
def out(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "out"


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(
    "given", [dicts, lambda: TABLE, lambda: iter(TABLE.to_batches(2)), lambda: [TABLE[:1], TABLE[1:]]]
)
def test_dicts_and_arrow_tables_give_one_store(given, out, chunk, monkeypatch):
    monkeypatch.setattr(rows, "ROWS_AT_ONCE", chunk)
    store = read_rows(given(), "user", columns=["rating"], ids=["item"], out=out, order_by="time")
    assert store.client_ids.tolist() == ["a", "b", "c"]
    assert store.vocabularies["item"].tolist() == ["x", "y", "z"]
    assert store.examples(0)["item"].tolist() == [1, 2]
    assert store.examples(0)["rating"].tolist() == [3, 2]
    assert list(store.columns) == ["rating", "item"]


def test_values_may_be_arrays_of_one_shape(out):
    images = ({"writer": k % 2, "pixels": np.full((2, 3), k, np.uint8), "label": k} for k in range(5))
    store = read_rows(images, "writer", out=out)
    assert store.columns["pixels"].shape == (5, 2, 3)
    assert store.columns["pixels"].dtype == np.uint8
    assert store.examples(1)["label"].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "rows has no rows"),
        ([{"user": 1, "x": 1.0}, {"user": 1}], "row 1 has no 'x', which the first has"),
        ([{"user": 1, "x": 1.0}, (1, 2.0)], "row 1 is a tuple: give a dict for every example"),
        (
            [{"user": 1, "x": [1, 2]}, {"user": 1, "x": [1]}],
            r"column 'x' has lists of different lengths \(2 in row 0, 1 in row 1\)",
        ),
        (
            [{"user": 1, "x": 1.0}, {"user": 2, "x": float("nan")}],
            "'x' has 1 values that are not finite.*row 1 of client 2",
        ),
        ([{"user": 1, "x": "word"}], r"column 'x' holds .*name it in ids=\('x',\)"),
        ([{"usr": 1, "x": 1.0}], r"unknown column 'user' \(nearest: usr\)"),
        ([{"user": 1, "x": [1, [2]]}], "column 'x' has values of different shapes, in one row or in several"),
        ([{"user": None, "x": 1.0}], "'user' has a missing value in row 0"),
    ],
)
def test_rows_that_cannot_be_meant_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        read_rows(iter(given), "user")


def test_what_is_no_rows_is_refused():
    with pytest.raises(UserError, match="rows is 5: give dicts, one for every example, or Arrow tables"):
        read_rows(5, "user")  # pyright: ignore
