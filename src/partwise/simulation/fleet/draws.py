"""Random numbers of tasks and the clients that they are for, both in an order that nothing else changes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partwise.privacy.secret_draws import draws_of
from partwise.server.cohort import Recruiting, recruit

STREAM = 0xFFFFFFFC  # the "round" whose randomness devices are drawn with
BLOCK = 4096  # tasks that are drawn together


class TaskDraws(NamedTuple):
    """The numbers of some tasks."""

    gap: np.ndarray  # exponential: until a device asks
    group: np.ndarray  # uniform: which class and zone
    speeds: np.ndarray  # [tasks, SPEEDS] normal
    fails: np.ndarray  # uniform: whether it drops out
    moment: np.ndarray  # uniform: after which share of its work
    stays: np.ndarray  # exponential: how long it stays available


class Draws:
    """The numbers of all tasks in the order in which they are taken. `rows` looks ahead, `drop` goes on."""

    def __init__(self, seed: int):
        self._rng = draws_of(seed, STREAM)
        self._rows = self._block()

    def rows(self, count: int) -> TaskDraws:
        """The numbers of the next tasks."""
        while len(self._rows.gap) < count:
            self._rows = TaskDraws(*map(np.concatenate, zip(self._rows, self._block(), strict=True)))
        return TaskDraws(*(each[:count] for each in self._rows))

    def drop(self, count: int) -> None:
        """Forget the numbers of tasks that were taken."""
        self._rows = TaskDraws(*(each[count:] for each in self._rows))

    def _block(self) -> TaskDraws:
        rng = self._rng
        return TaskDraws(
            gap=rng.standard_exponential(BLOCK),
            group=rng.random(BLOCK),
            speeds=rng.standard_normal((BLOCK, 4)),
            fails=rng.random(BLOCK),
            moment=rng.random(BLOCK),
            stays=rng.standard_exponential(BLOCK),
        )


class VersionClients:
    """The clients that tasks of one version are for, as cohorts are drawn: none twice among the first `wanted`.
    So if a version has `wanted` tasks, they are for the cohort of a synchronous round."""

    def __init__(self, seed: int, population: int, version: int, wanted: int):
        self._seed, self._version, self._attempt = seed, version, 0
        self._everyone = np.broadcast_to(0, population)
        self._wanted = Recruiting(max(min(wanted, population), 1))
        self._clients = np.zeros(0, np.int64)

    def first(self, count: int) -> np.ndarray:
        """The clients of the version's first tasks, as positions in the population."""
        while len(self._clients) < count:
            number = self._version + (self._attempt << 32)  # as repeated rounds of a network are drawn
            more = recruit(self._wanted, self._everyone, self._seed, number).clients
            self._clients, self._attempt = np.append(self._clients, more), self._attempt + 1
        return self._clients[:count]
