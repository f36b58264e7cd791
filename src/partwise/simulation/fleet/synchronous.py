"""Synchronous rounds: devices are asked, and a version is made when enough have reported.

A round closes as a network's does (`deployment.coordinator`): when all that were asked have reported, or with
over-selection as many as it wants; when all others are lost, and the quorum has reported; at its deadline, if the
quorum has reported. If it has not, the round is tried again with other devices.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from partwise.simulation.fleet.arrivals import gate
from partwise.simulation.fleet.draws import Draws, VersionClients
from partwise.simulation.fleet.flight import Flight, World, begin
from partwise.simulation.fleet.tempo import Tempo, Window


def in_rounds(world: World, tempo: Tempo) -> Iterator[Window]:
    """The windows of a schedule, up to the horizon: one for each round that was tried."""
    draws, version, attempt, task, opened = Draws(tempo.seed), 0, 0, 0, 0.0
    while opened < world.horizon:
        drawn = VersionClients(tempo.seed, len(world.work.examples), version + (attempt << 32), tempo.asked)
        asked = _ask(world, tempo, draws, drawn, version, task, opened)
        closed, made = _closing(asked, tempo, opened, world.horizon)
        started = asked.at(asked.start < closed)
        used = np.zeros(len(started.task), bool)
        if made:
            come = np.flatnonzero(started.report <= closed)
            used[come[np.argsort(started.report[come], kind="stable")[: tempo.size]]] = True
        unused = started.client[~used & np.isfinite(started.report)]
        yield Window(version, opened, closed, made, started, started.at(used), unused)
        task, opened = task + len(started.task), closed
        version, attempt = (version + 1, 0) if made else (version, attempt + 1)


def _ask(
    world: World, tempo: Tempo, draws: Draws, drawn: VersionClients, version: int, first: int, opened: float
) -> Flight:
    """Tasks for a round, for those devices that ask before the horizon."""
    gaps = draws.rows(tempo.asked).gap
    last = float(world.arrivals.mass_at(np.array(opened)))
    start, _ = gate(world.arrivals, np.full(tempo.asked, opened), last, gaps)
    come = int(np.searchsorted(start, world.horizon))
    asked = begin(world, first, version, drawn.first(come), start[:come], draws.rows(come))
    draws.drop(tempo.asked)
    return asked


def _closing(asked: Flight, tempo: Tempo, opened: float, horizon: float) -> tuple[float, bool]:
    """When a round ends, and whether it makes a version."""
    reports, over = np.sort(asked.report[np.isfinite(asked.report)]), opened + tempo.deadline
    wanted = tempo.size if tempo.asked > tempo.size else tempo.asked
    closed = reports[wanted - 1] if len(reports) >= wanted else np.inf
    if len(asked.task) == tempo.asked and len(reports) >= tempo.quorum:  # all others are lost
        closed = min(closed, np.minimum(asked.report, asked.free).max())
    if np.searchsorted(reports, over, side="right") >= tempo.quorum:
        closed = min(closed, over)
    made = closed <= min(over, horizon)
    return (float(closed) if made else min(over, horizon)), bool(made)
