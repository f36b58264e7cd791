"""Dates and times of any unit: one unit in a store, so that rows are sorted by what they mean."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pyarrow.parquet
import pytest

from partwise.data import read_rows, read_table
from partwise.types import UserError

DAYS = [datetime.datetime(2024, 1, day, tzinfo=datetime.UTC) for day in (4, 2, 3, 1)]
DAY = 86_400 * 10**9


@pytest.fixture(params=["memory", "disk"])
def out(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "out"


def tables(*types):
    """Two rows each, as far as the days go; `x` is the day."""
    parts = [DAYS[2 * k : 2 * k + 2] for k in range(len(types))]
    return [
        pa.table({"user": [1] * len(days), "time": pa.array(days).cast(kind), "x": [day.day for day in days]})
        for days, kind in zip(parts, types, strict=True)
    ]


UNITS = [
    (pa.timestamp("ms"), pa.timestamp("us")),
    (pa.timestamp("ns"), pa.timestamp("s", "Europe/Berlin")),
    (pa.date32(), pa.timestamp("ms")),
    (pa.date64(), pa.date32()),
]


@pytest.mark.parametrize("types", UNITS, ids=str)
def test_rows_are_sorted_by_time_whatever_its_units(types, out):
    store = read_rows(tables(*types), "user", order_by="time", out=out)
    assert store.columns["x"].tolist() == [1, 2, 3, 4]
    assert set(store.columns["time"][1:] - store.columns["time"][:-1]) == {DAY}


def test_files_of_one_folder_may_differ_in_their_units(tmp_path, out):
    for k, table in enumerate(tables(pa.timestamp("ms"), pa.timestamp("us"))):
        pyarrow.parquet.write_table(table, tmp_path / f"{k}.parquet")
    store = read_table(tmp_path, "user", columns=["x"], order_by="time", out=out)
    assert store.columns["x"].tolist() == [1, 2, 3, 4]


def test_times_and_numbers_in_one_column_are_refused(out):
    dates, numbers = tables(pa.timestamp("ms"), pa.timestamp("ms"))
    numbers = numbers.set_column(1, "time", numbers["time"].cast(pa.int64()))
    with pytest.raises(UserError, match="'time' holds dates first and plain values from row 2 on"):
        read_rows([dates, numbers], "user", order_by="time", out=out)
    listed = [
        pa.table({"user": [1], "x": pa.array([[1]], pa.list_(kind))}) for kind in (pa.int64(), pa.date32())
    ]
    with pytest.raises(UserError, match="'x' holds plain values first and dates from row 1 on"):
        read_rows(listed, "user", out=out)
    spans = [pa.table({"user": [1], "x": pa.array([1], kind)}) for kind in (pa.duration("s"), pa.time32("s"))]
    with pytest.raises(UserError, match="'x' holds durations first and times of day from row 1 on"):
        read_rows(spans, "user", out=out)


def test_times_of_day_and_durations_share_a_unit(out):
    for pair in ((pa.time32("s"), pa.time64("us")), (pa.duration("ms"), pa.duration("ns"))):
        parts = [pa.table({"user": [1], "x": pa.array([1], kind)}) for kind in pair]
        store = read_rows(parts, "user", order_by="x", out=out and out.with_name(str(pair[0])))
        assert store.columns["x"].tolist() == {"s": [1000, 10**9], "ms": [1, 10**6]}[pair[0].unit]


@pytest.mark.parametrize("ids", [[], ["time"]])
def test_times_that_do_not_fit_are_refused(ids):
    table = pa.table({"user": [1], "time": pa.array([datetime.date(1600, 1, 1)])})
    with pytest.raises(UserError, match=r"column 'time' has times that .* cannot hold, as dates before 1677"):
        read_rows(table, "user", ids=ids)


@pytest.mark.parametrize("bad", [0, 1, 5, 8])
@pytest.mark.parametrize(
    ("kind", "batches"), [("time", 1), ("time", 3), ("list", 1), ("list", 3), ("text", 1)]
)
def test_a_time_that_cannot_be_read_is_in_the_row_that_is_told(bad, batches, kind):
    days = [datetime.date(2000, 1, day) for day in range(1, 10)]
    days[bad] = datetime.date(1600, 1, 1)
    if kind == "text":
        times = pa.array(["n/a" if day.year == 1600 else day.isoformat() for day in days])
    else:
        times = pa.array([[days[0 if bad else 1], day] for day in days] if kind == "list" else days)
    whole = pa.table({"user": [1] * 9, "time": times})
    parts = [whole.slice(9 // batches * number, 9 // batches) for number in range(batches)]
    with pytest.raises(UserError, match=rf"row {bad}\b"):
        read_rows(parts, "user")
