"""The interface of what runs rounds: the compiled cohort (`loop.Simulation`) or the plain loop
(`plain.PlainSimulation`)."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from partwise.algorithm import Algorithm
from partwise.selection.serving import Sizes, sizes_of
from partwise.server.record import Record
from partwise.server.step import ServerState
from partwise.simulation.spread import SpreadTable


def calls_of(first: int, last: int, size: int, ends: Collection[int] = ()) -> list[tuple[int, int]]:
    """The rounds from `first` up to `last` in calls [begin, end) of at most `size` rounds. A call ends at each of
    `ends`."""
    calls = []
    for stop in sorted({last, *(end for end in ends if first < end < last)}):
        calls += [(begin, min(begin + size, stop)) for begin in range(first, stop, size)]
        first = stop
    return calls


def costs_of(algorithm: Algorithm) -> Sizes:
    """The sizes of what goes to a client and back, from which `selection.serving.serve` computes the costs."""
    return sizes_of(algorithm.partition, algorithm.choose, algorithm.aggregator.zero)


def copied(tree: Any) -> Any:
    """A tree whose arrays no later round writes. Copies on the host cannot be written at all, so who goes on from
    them makes copies."""
    return jax.tree_util.tree_map(_copied, tree)


def owned(tree: Any) -> Any:
    """A tree that a run may use up, with copies of the arrays that others may still read."""
    fixed = lambda leaf: isinstance(leaf, np.ndarray) and not leaf.flags.writeable
    return jax.tree_util.tree_map(lambda leaf: leaf if fixed(leaf) else leaf.copy(), tree)


def _copied(leaf: Any) -> Any:
    copy = leaf.copy() if isinstance(leaf, jax.Array | SpreadTable) else np.array(leaf)
    if isinstance(copy, np.ndarray):
        copy.flags.writeable = False
    return copy


class Backend(Protocol):
    """A population, an algorithm and its state."""

    algorithm: Algorithm
    lanes: int  # clients that run side by side on a device
    round: int  # number of rounds that are done

    @property
    def state(self) -> ServerState:
        """The server's state after these rounds."""
        ...

    @property
    def capacity(self) -> Mapping[str, int]:
        """How long arrays of the last call were, by name. Programs for other lengths may round sums in another way,
        so a run that goes on is given this again."""
        ...

    def run(self, num_rounds: int, ends: Collection[int] = ()) -> Generator[list[Record], None, None]:
        """Run this many rounds. Yields lists of records as rounds are done; `state` and `round` are then up
        to date. One list ends with each of the rounds in `ends`."""
        ...

    def restart(self, seed: int, rates: Mapping[str, float] | None = None) -> None:
        """Start again with another seed, and with other rates if they are given."""
        ...

    def current(self) -> Any:
        """Everything that the next round depends on, as it is: the next round may write over it."""
        ...

    def snapshot(self) -> Any:
        """A copy of everything that the next round depends on, to be kept and given to `resume`."""
        ...

    def resume(self, saved: Any, round_number: int, capacity: Mapping[str, int] = {}) -> None:
        """Continue from a snapshot that was taken after this many rounds, with the `capacity` at that time."""
        ...

    def kept_of(self, client_ids: np.ndarray) -> dict[str, np.ndarray]:
        """What these clients keep and are evaluated with [clients, ...]; zeros for clients that never took
        part."""
        ...
