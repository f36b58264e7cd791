"""What a schedule comes to: versions, reports, staleness, bytes, and who took part, by the hour and in all.

Windows are counted as they come and then forgotten, so memory grows with the versions and not with the reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from partwise.simulation.fleet.flight import World
from partwise.simulation.fleet.tempo import Window

HOUR = 3600.0
SECONDS = np.logspace(-3, 7, 1001)  # edges of the bins in which the seconds of tasks are counted: 2.3 % wide


class WindowLine(NamedTuple):
    """A window in numbers."""

    number: int
    opened: float
    closed: float
    made: bool
    started: int
    lost: int  # of the started: devices that never report
    used: int
    unused: int  # reports that came for nothing
    stale: int  # versions that the used reports are old, added up
    stalest: int
    down: float  # bytes
    up: float


class Buffer(NamedTuple):
    """What a version is made of: clients, as positions in the population, and the versions that they began with."""

    clients: np.ndarray
    versions: np.ndarray


class FleetCounts(NamedTuple):
    """A schedule that was counted."""

    lines: np.ndarray  # a record array of `WindowLine`
    staleness: np.ndarray  # [versions old] used reports
    seconds: np.ndarray  # [bins of SECONDS] used reports, by how long they took
    classes: np.ndarray  # [classes] used reports
    classes_started: np.ndarray  # [classes] tasks
    buffers: list[Buffer]  # of the first versions

    @property
    def made(self) -> np.ndarray:
        """The windows that made versions."""
        return self.lines[self.lines["made"]]


KINDS = [(name, "f8" if name in ("opened", "closed", "down", "up") else "i8") for name in WindowLine._fields]
KINDS[WindowLine._fields.index("made")] = ("made", "?")


def count_windows(windows: Iterable[Window], world: World, keep: int = 0) -> FleetCounts:
    """Count windows. The buffers of the first `keep` versions are kept."""
    kinds = len(world.devices.names)
    lines, buffers, staleness = [], [], np.zeros(1, np.int64)
    seconds, classes, started = np.zeros(len(SECONDS) + 1, np.int64), *np.zeros((2, kinds), np.int64)
    for window in windows:
        members = window.members
        old = window.number - members.version
        found = np.bincount(old, minlength=len(staleness))
        staleness = found + np.pad(staleness, (0, len(found) - len(staleness)))
        seconds += np.bincount(
            np.searchsorted(SECONDS, members.report - members.start), minlength=len(seconds)
        )
        classes += np.bincount(world.devices.kind[members.group], minlength=kinds)
        started += np.bincount(world.devices.kind[window.started.group], minlength=kinds)
        lines.append(_line(window, old, world))
        if window.made and len(buffers) < keep:
            buffers.append(Buffer(members.client, members.version))
    return FleetCounts(np.array(lines, KINDS), staleness, seconds, classes, started, buffers)


def _line(window: Window, old: np.ndarray, world: World) -> WindowLine:
    began, members, work = window.started, window.members, world.work
    return WindowLine(
        number=window.number,
        opened=window.opened,
        closed=window.closed,
        made=window.made,
        started=len(began.task),
        lost=int(np.isinf(began.report).sum()),
        used=len(members.task),
        unused=len(window.unused),
        stale=int(old.sum()),
        stalest=int(old.max(initial=0)),
        down=float(work.down[began.client].sum()),
        up=float(work.up[members.client].sum() + work.up[window.unused].sum()),
    )


def quantile(counts: np.ndarray, share: float) -> int:
    """The place at which so large a share of what was counted is reached."""
    return int(np.searchsorted(np.cumsum(counts), share * counts.sum()))


def staleness_of(counts: FleetCounts) -> dict[str, float]:
    """How many versions old the used reports are."""
    found = counts.staleness
    total = max(int(found.sum()), 1)
    return {
        "mean": float((found * np.arange(len(found))).sum() / total),
        "p50": quantile(found, 0.5),
        "p99": quantile(found, 0.99),
        "max": int(np.flatnonzero(found)[-1]) if found.any() else 0,
    }


def seconds_of_tasks(counts: FleetCounts) -> dict[str, float]:
    """How long tasks took whose reports were used, to 3 %."""
    at = lambda share: float(SECONDS[min(quantile(counts.seconds, share), len(SECONDS) - 1)])
    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}


def by_hour(counts: FleetCounts, hours: float) -> list[dict[str, Any]]:
    """What happened in each hour, by the time at which windows closed; or opened, if they made no
    version."""
    lines = counts.lines
    when = np.where(lines["made"], lines["closed"], lines["opened"])
    hour = np.minimum(when // HOUR, np.ceil(hours) - 1).astype(int)
    added = lambda values: np.bincount(hour, values, int(np.ceil(hours)))
    sums = {name: added(lines[name]) for name in ("made", "started", "used", "unused", "stale", "down", "up")}
    return [
        {
            "hour": place,
            "versions": int(sums["made"][place]),
            **{name: int(sums[name][place]) for name in ("started", "used", "unused")},
            "staleness": float(sums["stale"][place] / max(sums["used"][place], 1)),
            "bytes_down": float(sums["down"][place]),
            "bytes_up": float(sums["up"][place]),
        }
        for place in range(len(sums["made"]))
    ]
