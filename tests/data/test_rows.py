"""Rows from a program: the store that a table of them would give."""

from __future__ import annotations

import contextlib
import gzip
import sqlite3
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, feather, parquet

from partwise.data import read_rows, read_table, rows
from partwise.data.sqlite_table import read_sqlite, sqlite_place
from partwise.types import RunWarning, UserError

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


def holes(row: int) -> dict[str, Any]:
    """Row 4 has no item, row 7 no rating, row 11 neither; other columns do not matter."""
    lost = {4: ("item",), 7: ("rating",), 11: ("item", "rating")}.get(row, ())
    told = {"user": f"u{row % 3}", "item": f"i{row % 5}", "rating": row + 0.5, "note": None}
    return told | dict.fromkeys(lost)


@pytest.mark.parametrize("kind", ["dicts", "tables", "csv", "csv.gz", "parquet", "feather", "sqlite"])
@pytest.mark.parametrize("stored", [False, True])
def test_rows_with_an_empty_cell_are_refused_with_their_number_or_left_out(tmp_path, kind, stored):
    """What is left equals a table that never had them, whatever the table is written in."""
    full = [holes(row) for row in range(20)]
    whole = [row for number, row in enumerate(full) if number not in (4, 7, 11)]
    names, folder = ("user", "item", "rating"), {"out": tmp_path / "store"} if stored else {}

    def read(given: list[dict[str, Any]], name: str, **more: Any) -> Any:
        table = pa.Table.from_pylist([{n: row[n] for n in names} for row in given])
        if kind == "dicts":
            return read_rows(iter(given), "user", ["item", "rating"], ["item"], **more)
        if kind == "tables":
            return read_rows(table.to_batches(6), "user", ["item", "rating"], ["item"], **more)
        if kind == "sqlite":
            with contextlib.closing(sqlite3.connect(tmp_path / name)) as base:
                base.execute("CREATE TABLE t (user, item, rating)")
                base.executemany("INSERT INTO t VALUES (:user, :item, :rating)", given)
                base.commit()
            more.pop("out", None)
            place = sqlite_place(f"sqlite:{tmp_path / name}?table=t")
            assert place
            return read_sqlite(place, ["user", "item", "rating"], ["user", "item"], **more)
        path = tmp_path / f"{name}.{kind}"
        if kind.startswith("csv"):
            with gzip.open(path, "wb") if kind.endswith("gz") else path.open("wb") as file:
                csv.write_csv(table, file)
        elif kind == "parquet":
            parquet.write_table(table, path, row_group_size=6)
        else:
            feather.write_feather(table, path)
        return read_table(path, "user", ["item", "rating"], ["item"], **more)

    counted = kind not in ("dicts", "tables", "sqlite")  # those can be read once only
    with pytest.raises(UserError, match="3 rows of 20 have an empty cell" if counted else "missing='skip'"):
        read(full, "refused", **folder)
    with pytest.warns(RunWarning, match="left out for an empty cell .*: 3 of 20 rows, the first: row 4"):
        found = read(full, "skipped", missing="skip", **folder)
    wanted = read(whole, "whole", **({"out": tmp_path / "other"} if stored else {}))
    assert {n: ids.tolist() for n, ids in found.vocabularies.items()} == {
        n: ids.tolist() for n, ids in wanted.vocabularies.items()
    }
    for name, values in wanted.columns.items():
        np.testing.assert_array_equal(values, found.columns[name])
    np.testing.assert_array_equal(found.counts, wanted.counts)
