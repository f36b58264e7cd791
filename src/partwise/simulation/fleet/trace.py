"""Traces: what real devices were seen to do, one row for each device.

A trace is a table (.csv, .parquet and whatever else `data.read_table` reads) with these columns:

| column | what |
|---|---|
| `class` | a name; devices of a class have the same distributions |
| `zone` | hours from UTC, in quarters: -8, 5.5 |
| `seconds_per_example` | of a client's work in a round, all passes over its examples together |
| `startup_seconds` | from the invitation to the first example, without the download |
| `down_bytes_per_second`, `up_bytes_per_second` | of its network |
| `session_seconds` | mean time for which it stays available, once it is |
| `dropout` | share of its tasks that end without a report although it stayed |
| `hour_0` to `hour_23` | share of that local hour in which it is available |
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from partwise.checkpoint import write_file
from partwise.data.late_arrow import csv, pa, parquet
from partwise.data.reading import naming
from partwise.data.table import column_names, read_table
from partwise.types import UserError

CLASS, ZONE = "class", "zone"
SPEEDS = ("seconds_per_example", "startup_seconds", "down_bytes_per_second", "up_bytes_per_second")
SESSION, DROPOUT = "session_seconds", "dropout"
HOURS = tuple(f"hour_{hour}" for hour in range(24))
COLUMNS = (CLASS, ZONE, *SPEEDS, SESSION, DROPOUT, *HOURS)
QUARTERS = 4  # of an hour: the grid of time zones
SYNTHETIC = 3000  # devices in a trace that is made up

Trace = Mapping[str, np.ndarray]  # column -> one value for each device


def read_trace(path: str | Path) -> Trace:
    """Read a trace and check it."""
    if not str(path):
        raise UserError("the trace has an empty name: give a .csv or .parquet file, or leave it out")
    missing = [name for name in COLUMNS if name not in column_names(path)]
    if missing:
        raise UserError(
            f"the trace '{path}' has no column '{missing[0]}': it needs {', '.join(COLUMNS[:8])} and hour_0 to "
            f"hour_23"
        )
    store = read_table(path, None, list(COLUMNS), ids=(CLASS,))
    lists = [name for name in COLUMNS if store.columns[name].ndim > 1]
    if lists:
        raise UserError(
            f"column '{lists[0]}' of the trace '{path}' has lists: give one value for each device"
        )
    classes = np.asarray(store.vocabularies[CLASS]).astype(str)[np.asarray(store.columns[CLASS])]
    numbers = {name: np.asarray(store.columns[name], np.float64) for name in COLUMNS[1:]}
    with naming(path):
        return check_trace({CLASS: classes, **numbers})


def check_trace(trace: Trace) -> Trace:
    """Return the trace. Raises `UserError` if there is a value that no device can have."""
    if not len(trace[CLASS]):
        raise UserError("the trace has no rows: it needs one for each device that was seen")
    for name in (*SPEEDS, SESSION):
        _refuse(name, trace, trace[name] > 0, "a number above 0")
    _refuse(DROPOUT, trace, (trace[DROPOUT] >= 0) & (trace[DROPOUT] < 1), "a share, from 0 to less than 1")
    for name in HOURS:
        _refuse(name, trace, (trace[name] >= 0) & (trace[name] <= 1), "a share, from 0 to 1")
    zone = trace[ZONE]
    _refuse(ZONE, trace, (abs(zone) <= 14) & (zone * QUARTERS % 1 == 0), "hours from UTC in quarters, as 5.5")
    if not any(trace[name].any() for name in HOURS):
        raise UserError("no device of the trace is ever available: hour_0 to hour_23 are all 0")
    return trace


def _refuse(name: str, trace: Trace, good: np.ndarray, expected: str) -> None:
    bad = np.flatnonzero(~(good & np.isfinite(trace[name])))
    if len(bad):
        raise UserError(
            f"row {bad[0] + 1} of the trace: {name} is {trace[name][bad[0]]:g}; expected {expected}. Mend or "
            f"remove the row"
        )


def write_trace(path: str | Path, trace: Trace) -> None:
    """Write a trace as .csv, or .parquet if the name ends so."""
    table, data = pa.table({name: trace[name] for name in COLUMNS}), io.BytesIO()
    (parquet.write_table if Path(path).suffix == ".parquet" else csv.write_csv)(table, data)
    write_file(Path(path), data.getvalue())


# Made up, in the orders of magnitude of phones: class -> its share; medians of the speeds; seconds of a session;
# dropout; factor of its availability.
MADE_UP = {
    "fast": (0.3, (0.005, 15.0, 6e6, 2e6), 9000.0, 0.03, 1.0),
    "middle": (0.5, (0.015, 25.0, 2.5e6, 8e5), 7200.0, 0.06, 0.9),
    "slow": (0.2, (0.05, 45.0, 8e5, 2.5e5), 4500.0, 0.12, 0.7),
}
SPREADS = (0.5, 0.6, 0.9, 0.9)  # standard deviations of the speeds' logarithms
ZONES = {-8: 5, -6: 7, -5: 10, -3: 9, 0: 6, 1: 14, 2: 8, 3: 6, 5.5: 17, 7: 6, 8: 8, 9: 4}  # with weights


def synthetic_trace(num_devices: int = SYNTHETIC, seed: int = 0) -> Trace:
    """A trace that is made up, not measured: phones that charge at night, in three classes and twelve zones."""
    if num_devices < 1:
        raise UserError(f"a trace needs at least 1 device, not {num_devices}")
    rng = np.random.default_rng([seed, 0xF1EE7])
    names, about = np.array(list(MADE_UP)), list(MADE_UP.values())
    kind = rng.choice(len(names), num_devices, p=[each[0] for each in about])
    medians = np.array([each[1] for each in about])[kind]
    speeds = medians * np.exp(SPREADS * rng.standard_normal((num_devices, len(SPEEDS))))
    weights = np.array(list(ZONES.values()))
    own = np.array([each[4] for each in about])[kind] * rng.uniform(0.5, 1.5, num_devices)
    hours = np.clip(own[:, None] * _night(np.arange(24)), 0, 1)
    trace = {
        CLASS: names[kind],
        ZONE: rng.choice(np.array(list(ZONES), float), num_devices, p=weights / weights.sum()),
        **{name: speeds[:, i] for i, name in enumerate(SPEEDS)},
        SESSION: np.array([each[2] for each in about])[kind] * rng.uniform(0.5, 1.5, num_devices),
        DROPOUT: np.array([each[3] for each in about])[kind],
        **{name: hours[:, hour] for hour, name in enumerate(HOURS)},
    }
    return {name: values if name == CLASS else np.round(values, 6) for name, values in trace.items()}


def _night(hour: np.ndarray) -> np.ndarray:
    """Share of devices that charge, do nothing and have a free network: most at 3 o'clock, few in the afternoon."""
    return 0.04 + 0.22 * ((1 + np.cos(2 * np.pi * (hour - 3) / 24)) / 2) ** 2
