"""What devices are like: distributions that a trace gives, and how many of them are there at which time of day.

The speeds of a class are log-normal. A *group* is a class in a time zone; its devices are available in the same
hours. Time is in quarters of an hour of UTC, because time zones are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partwise.simulation.fleet.trace import (
    CLASS,
    DROPOUT,
    HOURS,
    QUARTERS,
    SESSION,
    SPEEDS,
    ZONE,
    Trace,
    check_trace,
)

DAY = 24 * QUARTERS  # quarters of an hour
QUARTER = 3600 // QUARTERS  # seconds


class Devices(NamedTuple):
    """Distributions over a fleet. `middle` and `spread` are means and standard deviations of logarithms."""

    names: tuple[str, ...]  # of classes
    middle: np.ndarray  # [classes, SPEEDS]
    spread: np.ndarray  # [classes, SPEEDS]
    session: np.ndarray  # [classes] mean seconds
    dropout: np.ndarray  # [classes]
    hours: np.ndarray  # [classes, 24] share of a local hour in which a device is available
    kind: np.ndarray  # [groups] the class
    zone: np.ndarray  # [groups] quarters from UTC
    share: np.ndarray  # [groups] of all devices

    def presence(self) -> np.ndarray:
        """[DAY, groups]: the share of the fleet that is in a group and available, by the time of day in UTC."""
        local = (np.arange(DAY)[:, None] + self.zone) % DAY // QUARTERS
        return self.share * self.hours[self.kind, local]

    @property
    def class_share(self) -> np.ndarray:
        """[classes]: of all devices."""
        return np.bincount(self.kind, self.share, len(self.names))


def fit(trace: Trace) -> Devices:
    """The distributions of a trace. Every row counts the same."""
    check_trace(trace)
    names, kind = np.unique(trace[CLASS], return_inverse=True)
    count = np.bincount(kind)
    mean = lambda values: np.stack([np.bincount(kind, each) / count for each in values], axis=1)
    logs = [np.log(trace[name]) for name in SPEEDS]
    middle = mean(logs)
    squares = mean([(each - middle[kind, i]) ** 2 for i, each in enumerate(logs)])
    groups, sizes = np.unique(
        np.stack([kind, np.round(trace[ZONE] * QUARTERS).astype(int)]), axis=1, return_counts=True
    )
    return Devices(
        names=tuple(names.tolist()),
        middle=middle,
        spread=np.sqrt(squares),
        session=mean([trace[SESSION]])[:, 0],
        dropout=mean([trace[DROPOUT]])[:, 0],
        hours=mean([trace[name] for name in HOURS]),
        kind=groups[0],
        zone=groups[1],
        share=sizes / len(kind),
    )
