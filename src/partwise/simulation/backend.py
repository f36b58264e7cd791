"""What runs rounds: the compiled cohort (`loop.Simulation`) or the plain loop (`plain.PlainSimulation`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from partwise.algorithm import Algorithm
from partwise.server.record import Record
from partwise.server.step import ServerState


class Backend(Protocol):
    """A population, an algorithm and its state."""

    algorithm: Algorithm
    lanes: int  # clients side by side on a device
    round: int  # rounds that are done
    state: ServerState

    def run(self, num_rounds: int) -> Iterator[list[Record]]:
        """Run that many rounds; yields records as they come, with `state` and `round` up to date."""
        ...

    def restart(self, seed: int, rates: Mapping[str, float] | None = None) -> None:
        """Begin anew with another seed, and perhaps other rates."""
        ...

    def snapshot(self) -> Any:
        """All that the next round depends on, to be saved; `resume` takes it back."""
        ...

    def resume(self, saved: Any, round_number: int) -> None:
        """Go on from a snapshot taken after that many rounds."""
        ...

    def kept_of(self, client_ids: np.ndarray) -> dict[str, np.ndarray]:
        """What these clients are judged with [clients, ...]: what they keep, zeros of who never took part."""
        ...
