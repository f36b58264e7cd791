"""Tasks that devices work on: how long each takes, and whether a report comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from partwise.simulation.fleet.arrivals import Arrivals
from partwise.simulation.fleet.devices import Devices
from partwise.simulation.fleet.draws import TaskDraws


class ClientWork(NamedTuple):
    """What a task is, for each client of the population: its size and its messages."""

    examples: np.ndarray
    down: np.ndarray  # bytes
    up: np.ndarray


class World(NamedTuple):
    """Everything that time depends on.

    lease:   seconds after which a device that has vanished counts as lost
    horizon: seconds that are simulated
    """

    devices: Devices
    arrivals: Arrivals
    work: ClientWork
    lease: float
    horizon: float


class Flight(NamedTuple):
    """Tasks that were taken, in the order in which they were. Times are in seconds."""

    task: np.ndarray  # number, counted over the whole schedule
    client: np.ndarray  # position in the population
    version: np.ndarray  # of the model that it trains from
    group: np.ndarray  # of the device
    start: np.ndarray
    report: np.ndarray  # when its report comes; infinite if none does
    free: np.ndarray  # when it is given up, if no report comes; otherwise infinite

    def at(self, which: np.ndarray | slice) -> Flight:
        """Some of them."""
        return Flight(*(each[which] for each in self))


def together(parts: Sequence[Flight]) -> Flight:
    """Tasks one after the other."""
    return Flight(*map(np.concatenate, zip(*parts, strict=True)))


def seconds_of(world: World, client: np.ndarray, kind: np.ndarray, normals: np.ndarray) -> np.ndarray:
    """How long devices of these classes take for these clients, if nothing happens to them."""
    speeds = np.exp(world.devices.middle[kind] + world.devices.spread[kind] * normals)
    work, (per_example, startup, down, up) = world.work, speeds.T
    return startup + work.examples[client] * per_example + work.down[client] / down + work.up[client] / up


def begin(
    world: World, first: int, version: int, client: np.ndarray, start: np.ndarray, rows: TaskDraws
) -> Flight:
    """Tasks for these clients, taken at these times. A device leaves when its session ends, or drops out after a
    random share of its work; when its lease has ended too, the server knows."""
    group = world.arrivals.group_at(start, rows.group)
    kind = world.devices.kind[group]
    seconds = seconds_of(world, client, kind, rows.speeds)
    fails = np.where(rows.fails < world.devices.dropout[kind], rows.moment * seconds, np.inf)
    gone = np.minimum(fails, world.devices.session[kind] * rows.stays)
    lost = gone < seconds
    return Flight(
        task=first + np.arange(len(client)),
        client=client,
        version=np.full(len(client), version),
        group=group,
        start=start,
        report=np.where(lost, np.inf, start + seconds),
        free=np.where(lost, start + gone + world.lease, np.inf),
    )
