"""When devices ask for work: a Poisson process whose rate follows the time of day.

A device that is available asks every so many seconds on average, so a fleet asks at the rate of its available
devices / seconds. That is thousands of times a second for 10^8 devices, and nearly all are sent away: the server
has no task for them. Those need not be drawn. As a Poisson process has no memory, the next device after a task
became free comes one exponential gap later, whoever came before. Gaps are measured in *mass*, the number of devices
that are expected to have asked since the beginning, which grows with the rate.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partwise.simulation.fleet.devices import DAY, QUARTER, Devices


class Arrivals(NamedTuple):
    """The process up to a horizon."""

    edges: np.ndarray  # seconds, every quarter of an hour
    mass: np.ndarray  # devices that are expected to have asked until then
    chances: (
        np.ndarray
    )  # [DAY * groups] chances of the groups, added up; those of quarter q lie in q to q + 1
    groups: int

    def mass_at(self, times: np.ndarray) -> np.ndarray:
        """How many devices are expected to have asked until these times."""
        return np.interp(times, self.edges, self.mass)

    def time_at(self, mass: np.ndarray) -> np.ndarray:
        """When so many devices are expected to have asked; infinite after the horizon."""
        return np.interp(mass, self.mass, self.edges, right=np.inf)

    def group_at(self, times: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """The groups of devices that ask at these times, by a uniform number for each."""
        quarter = times // QUARTER % DAY
        place = np.searchsorted(self.chances, quarter + uniform, side="right")
        return np.clip(place - quarter.astype(int) * self.groups, 0, self.groups - 1)


def make_arrivals(devices: Devices, num_devices: int, every: float, horizon: float) -> Arrivals:
    """The process of a fleet in which an available device asks every so many seconds on average."""
    presence = devices.presence()
    there = presence.sum(axis=1)
    quarters = int(np.ceil(horizon / QUARTER))
    edges = np.arange(quarters + 1) * float(QUARTER)
    asked = num_devices * there[np.arange(quarters) % DAY] * QUARTER / every
    added = np.cumsum(presence, axis=1) / np.where(there > 0, there, 1)[:, None]
    chances = (added + np.arange(DAY)[:, None]).ravel()
    return Arrivals(edges, np.append(0.0, np.cumsum(asked)), chances, presence.shape[1])


def gate(
    arrivals: Arrivals, free: np.ndarray, last: float, gaps: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """When tasks that become free at these times (sorted) are taken. In mass, u_j = max(u_(j-1), mass(free_j)) +
    gap_j, with u_0 = `last`. Returns the times, and u."""
    added = np.cumsum(gaps)
    ready = np.maximum(arrivals.mass_at(free), last)
    taken = added + np.maximum.accumulate(ready - (added - gaps))
    return arrivals.time_at(taken), taken
