"""Versions without rounds (FedBuff; Nguyen et al., 2022): every `buffer` reports make one.

Tasks are given out so that `concurrency` of them are not in the model yet, at work or waiting in the buffer. A task
that is too old to be counted is forgotten when a version makes it so, and another is given out in its place. One
that was given up is replaced at once.

A version at a time is computed, with arrays. What is not known before: a device that vanishes in a window may be
replaced in the same window, which then may end earlier. So the window is computed again until nothing changes. That
ends, because a task depends on earlier ones only: the first wrong one is right the next time or the one after. A
replacement that was given out too late for the window changes nothing in it, as its report comes later still.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np

from partwise.simulation.fleet.arrivals import gate
from partwise.simulation.fleet.draws import Draws, VersionClients
from partwise.simulation.fleet.flight import Flight, World, begin, together
from partwise.simulation.fleet.tempo import Tempo, Window


class _Filled(NamedTuple):
    """A window whose tasks are given out."""

    new: Flight  # may hold tasks that are taken after the end
    free: np.ndarray  # when the tasks became free that `new` fill
    taken: np.ndarray  # mass at which they are taken
    end: float  # the window's, or the horizon
    full: bool  # whether the buffer is full by then


def buffered(world: World, tempo: Tempo) -> Iterator[Window]:
    """The windows of a schedule, up to the horizon."""
    draws, task, opened, last = Draws(tempo.seed), 0, 0.0, 0.0
    free, flight = np.zeros(tempo.concurrency), _nobody()
    for version in count():
        drawn = VersionClients(tempo.seed, len(world.work.examples), version, len(free))
        here = _fill(world, tempo, draws, drawn, version, task, flight, free, last)
        begun = int(np.searchsorted(here.new.start, here.end))
        started = here.new.at(slice(begun))
        flight = together([flight, started])
        if not here.full:
            yield Window(version, opened, here.end, False, started, _nobody(), np.zeros(0, int))
            return
        draws.drop(begun)
        task, last = task + begun, float(here.taken[begun - 1]) if begun else last
        used = _members(flight, here.end, tempo.buffer)
        there = ~used & (flight.free >= here.end)
        old = there & (flight.version < version + 1 - tempo.stalest)
        unused = flight.client[old & np.isfinite(flight.report)]
        yield Window(version, opened, here.end, True, started, flight.at(used), unused)
        over = np.full(np.count_nonzero(used | old), here.end)
        free, opened = np.append(here.free[begun:], over), here.end
        flight = flight.at(there & ~old)


def _fill(
    world: World,
    tempo: Tempo,
    draws: Draws,
    drawn: VersionClients,
    version: int,
    first: int,
    flight: Flight,
    free: np.ndarray,
    last: float,
) -> _Filled:
    """Give out tasks until the buffer is full. `free` is when tasks became free that nobody has taken yet."""
    known = np.append(free, flight.free[np.isfinite(flight.free)])
    here = _Filled(_nobody(), np.full(1, np.nan), np.zeros(0), _full(flight.report, tempo.buffer), False)
    while True:
        until = np.append(known, here.new.free)
        until = np.sort(until[until < min(here.end, world.horizon)])
        if np.array_equal(until, here.free):
            return here._replace(end=min(here.end, world.horizon), full=here.end <= world.horizon)
        start, taken = gate(world.arrivals, until, last, draws.rows(len(until)).gap)
        come = int(np.searchsorted(start, world.horizon))
        new = begin(world, first, version, drawn.first(come), start[:come], draws.rows(come))
        end = _full(np.append(flight.report, new.report), tempo.buffer)
        here = _Filled(new, until, taken, end, False)


def _full(report: np.ndarray, buffer: int) -> float:
    """When so many reports have come."""
    if len(report) < buffer:
        return np.inf
    return float(np.partition(report, buffer - 1)[buffer - 1])


def _members(flight: Flight, end: float, buffer: int) -> np.ndarray:
    """Which reports are in the buffer: the first ones to come, of several at once those that were taken first."""
    come = np.flatnonzero(flight.report <= end)
    come = come[np.argsort(flight.report[come], kind="stable")[:buffer]]
    used = np.zeros(len(flight.task), bool)
    used[come] = True
    return used


def _nobody() -> Flight:
    whole, real = np.zeros(0, np.int64), np.zeros(0)
    return Flight(whole, whole, whole, whole, real, real, real)
