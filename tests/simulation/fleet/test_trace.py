"""Traces: read as they were written, refused where no device can be like that, and fitted."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from partwise.simulation.fleet.devices import DAY, fit
from partwise.simulation.fleet.trace import (
    COLUMNS,
    HOURS,
    SPEEDS,
    SYNTHETIC,
    ZONES,
    check_trace,
    read_trace,
    synthetic_trace,
    write_trace,
)
from partwise.types import UserError


@pytest.mark.parametrize("name", ["trace.csv", "trace.parquet"])
def test_a_trace_is_read_as_it_was_written(name, tmp_path):
    trace = synthetic_trace(50, seed=2)
    write_trace(tmp_path / name, trace)
    again = read_trace(tmp_path / name)
    assert list(again) == list(COLUMNS)
    for column in COLUMNS:
        np.testing.assert_array_equal(again[column], trace[column])


def test_a_synthetic_trace_is_that_of_its_seed():
    one, other = synthetic_trace(seed=1), synthetic_trace(seed=2)
    assert len(one["class"]) == SYNTHETIC
    assert all((one[name] == synthetic_trace(seed=1)[name]).all() for name in COLUMNS)
    assert (one["zone"] != other["zone"]).any()
    assert set(one["zone"]) == set(ZONES)


def test_a_fit_finds_the_distributions_back():
    trace = {name: values[:4].copy() for name, values in synthetic_trace().items()}
    trace["class"] = np.array(["a", "b", "b", "b"])
    trace["zone"] = np.array([0, -3.0, -3.0, 5.5])
    trace["startup_seconds"] = np.exp([1.0, 2.0, 3.0, 4.0])
    devices = fit(trace)
    column = SPEEDS.index("startup_seconds")
    assert devices.names == ("a", "b")
    assert devices.middle[:, column] == pytest.approx([1, 3])
    assert devices.spread[:, column] == pytest.approx([0, np.sqrt(2 / 3)])
    assert list(zip(devices.kind, devices.zone, devices.share, strict=True)) == [
        (0, 0, 0.25),
        (1, -12, 0.5),
        (1, 22, 0.25),
    ]
    assert devices.class_share == pytest.approx([0.25, 0.75])


def test_presence_follows_the_local_hour():
    """At noon in UTC it is 9 o'clock three zones to the west."""
    trace = {name: values[:1].copy() for name, values in synthetic_trace().items()}
    trace |= {name: np.array([float(hour == 9)]) for hour, name in enumerate(HOURS)} | {
        "zone": np.array([-3.0])
    }
    there = fit(trace).presence()[:, 0]
    assert list(np.flatnonzero(there)) == [12 * DAY // 24 + quarter for quarter in range(4)]


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("down_bytes_per_second", -1.0, "down_bytes_per_second is -1; expected a number above 0"),
        ("seconds_per_example", 0.0, "seconds_per_example is 0"),
        ("startup_seconds", np.nan, "startup_seconds is nan"),
        ("session_seconds", np.inf, "session_seconds is inf"),
        ("dropout", 1.0, "dropout is 1; expected a share"),
        ("hour_3", 1.5, "hour_3 is 1.5; expected a share"),
        ("zone", 5.4, "zone is 5.4; expected hours from UTC in quarters"),
        ("zone", 40.0, "zone is 40"),
    ],
)
def test_values_that_no_device_can_have_are_refused(column, value, told):
    trace = dict(synthetic_trace(10))
    trace[column] = trace[column].copy()
    trace[column][6] = value
    with pytest.raises(UserError, match=f"row 7 of the trace: {told}"):
        check_trace(trace)


def test_a_file_with_a_bad_value_is_refused_by_name(tmp_path):
    file = tmp_path / "trace.csv"
    write_trace(file, synthetic_trace(5))
    whole = file.read_text()
    lines = whole.splitlines()
    cells = lines[2].split(",")
    for bad, told in (
        ("", "line 3, column 'up_bytes_per_second'"),
        ("nan", "line 3"),
        ("-5", "row 2 of the trace"),
    ):
        cells[COLUMNS.index("up_bytes_per_second")] = bad
        file.write_text("\n".join([*lines[:2], ",".join(cells), *lines[3:]]) + "\n")
        with pytest.raises(UserError, match=told) as refused:
            read_trace(file)
        assert "trace.csv" in str(refused.value)
    file.write_text(whole.replace("hour_7", "hour_seven"))
    with pytest.raises(UserError, match="no column 'hour_7': it needs class, zone"):
        read_trace(file)


def test_traces_without_rows_or_without_anybody_there_are_refused():
    trace = synthetic_trace(10)
    with pytest.raises(UserError, match="no rows"):
        check_trace({name: values[:0] for name, values in trace.items()})
    with pytest.raises(UserError, match="ever available"):
        check_trace(trace | {name: np.zeros(10) for name in HOURS})
    with pytest.raises(UserError, match="at least 1 device"):
        synthetic_trace(0)


def test_a_trace_with_lists_or_without_a_name_is_refused(tmp_path, monkeypatch):
    trace = {name: values.tolist() for name, values in synthetic_trace(4).items()}
    trace["hour_3"] = [[value] for value in trace["hour_3"]]
    pq.write_table(pa.table(trace), tmp_path / "trace.parquet")
    with pytest.raises(
        UserError, match=r"column 'hour_3' of the trace '.*trace.parquet' has lists: give one"
    ):
        read_trace(tmp_path / "trace.parquet")
    monkeypatch.chdir(tmp_path)  # which has a table
    with pytest.raises(UserError, match=r"the trace has an empty name: give a \.csv or \.parquet file"):
        read_trace("")
