"""Synchronous rounds: devices are asked, and a version is made when enough have reported.

A round closes as a network's does (`deployment.coordinator`): when all that were asked have reported, or with
over-selection as many as it wants; when all others are lost, and the quorum has reported; at its deadline, if the
quorum has reported. If it has not, the round is tried again with other devices.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from partwise.simulation.fleet.arrivals import gate
from partwise.simulation.fleet.draws import Drawn, Draws
from partwise.simulation.fleet.flight import Flight, World, begin
from partwise.simulation.fleet.pace import Pace, Window


def in_rounds(world: World, pace: Pace) -> Iterator[Window]:
    """The windows of a schedule, up to the horizon: one for each round that was tried."""
    draws, version, attempt, task, opened = Draws(pace.seed), 0, 0, 0, 0.0
    while opened < world.horizon:
        drawn = Drawn(pace.seed, len(world.work.examples), version + (attempt << 32), pace.asked)
        asked = _ask(world, pace, draws, drawn, version, task, opened)
        closed, made = _closing(asked, pace, opened, world.horizon)
        started = asked.at(asked.start < closed)
        used = np.zeros(len(started.task), bool)
        if made:
            come = np.flatnonzero(started.report <= closed)
            used[come[np.argsort(started.report[come], kind="stable")[: pace.size]]] = True
        unused = started.client[~used & np.isfinite(started.report)]
        yield Window(version, opened, closed, made, started, started.at(used), unused)
        task, opened = task + len(started.task), closed
        version, attempt = (version + 1, 0) if made else (version, attempt + 1)


def _ask(
    world: World, pace: Pace, draws: Draws, drawn: Drawn, version: int, first: int, opened: float
) -> Flight:
    """Tasks for a round, for those devices that ask before the horizon."""
    gaps = draws.rows(pace.asked).gap
    last = float(world.arrivals.mass_at(np.array(opened)))
    start, _ = gate(world.arrivals, np.full(pace.asked, opened), last, gaps)
    come = int(np.searchsorted(start, world.horizon))
    asked = begin(world, first, version, drawn.first(come), start[:come], draws.rows(come))
    draws.drop(pace.asked)
    return asked


def _closing(asked: Flight, pace: Pace, opened: float, horizon: float) -> tuple[float, bool]:
    """When a round ends, and whether it makes a version."""
    reports, over = np.sort(asked.report[np.isfinite(asked.report)]), opened + pace.deadline
    wanted = pace.size if pace.asked > pace.size else pace.asked
    closed = reports[wanted - 1] if len(reports) >= wanted else np.inf
    if len(asked.task) == pace.asked and len(reports) >= pace.quorum:  # all others are lost
        closed = min(closed, np.minimum(asked.report, asked.free).max())
    if np.searchsorted(reports, over, side="right") >= pace.quorum:
        closed = min(closed, over)
    made = closed <= min(over, horizon)
    return (float(closed) if made else min(over, horizon)), bool(made)
