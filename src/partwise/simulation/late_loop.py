"""Rounds of a schedule: who reports when, and with which version it began, is known before (`simulation.fleet`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partwise.algorithm import Build
from partwise.data.store import ClientStore
from partwise.server.cohort import Cohort, Recruiting
from partwise.simulation.backend import owned
from partwise.simulation.compiled import Outcome
from partwise.simulation.fleet.counting import Buffer
from partwise.simulation.late import Ring, compile_late, new_ring, ring_bytes
from partwise.simulation.loop import Simulation
from partwise.simulation.mesh import everywhere
from partwise.simulation.processes import num_processes
from partwise.types import UserError

RING_BYTES = 1 << 33  # the most memory that older versions may take on a device


class ScheduledSimulation(Simulation):
    """A simulation whose rounds are the buffers of a schedule. If no report is late, it is the synchronous program,
    and equals the run of the same cohorts bit for bit.

    Args:
        build: Makes the algorithm from its rates.
        rates: The rates.
        store: The population, in which the buffers' clients are positions.
        buffers: What every version is made of.
        staleness: A late update is divided by this power of 1 + the versions that it is late.
        **more: As for `Simulation`.
    """

    def __init__(
        self,
        build: Build,
        rates: Mapping[str, float],
        store: ClientStore,
        buffers: Sequence[Buffer],
        staleness: float,
        **more: Any,
    ):
        self._buffers = buffers
        self._depth = 1 + max(int((t - each.versions).max(initial=0)) for t, each in enumerate(buffers))
        self._ring: Ring | None = None
        size = min(max(len(each.clients) for each in buffers), store.num_clients)
        super().__init__(build, rates, store, Recruiting(max(size, 1)), **more)
        if self.algorithm.keeps:
            raise UserError(
                "clients of this algorithm keep something from round to round, and a fleet's devices keep nothing: "
                "train with another algorithm, or without --rounds"
            )
        if self.algorithm.aggregator.private:
            raise UserError(
                "a fleet is trained without promises of privacy, as stale updates would need others: leave out "
                "privacy.clip, or --rounds"
            )
        if num_processes() > 1:
            raise UserError(
                "a fleet is trained in one process: start it without --processes, and without others"
            )
        if self._depth > 1:
            factors = ((1.0 + np.arange(self._depth)) ** -staleness).astype(np.float32)
            self._late = compile_late(build, self.mesh, self._rooms, factors)
            self._rounds = self._run_late

    def restart(self, seed: int, rates: Mapping[str, float] | None = None) -> None:
        """Like `Simulation.restart`."""
        super().restart(seed, rates)
        if self._depth == 1:
            return
        needed = ring_bytes(self.algorithm, self._state, self._depth)
        if needed > RING_BYTES:
            raise UserError(
                f"the {self._depth} versions that reports begin with take {needed / 1e9:.1f} GB, more than "
                f"{RING_BYTES / 1e9:.1f}: lower deploy.stalest, with which older reports are refused"
            )
        self._ring = new_ring(self.algorithm, self._state, self._depth)

    def current(self) -> Any:
        """Like `Simulation.current`, with the older versions."""
        return super().current(), self._ring or ()

    def resume(self, saved: Any, round_number: int, capacity: Mapping[str, int] = {}) -> None:
        """Like `Simulation.resume`, with the older versions."""
        before, self._ring = saved[0], owned(saved[1]) or None
        super().resume(before, round_number, capacity)

    def rehearse(self) -> float:
        """Like `Simulation.rehearse`."""
        before, self._ring = self._ring, jax.tree_util.tree_map(jnp.copy, self._ring)
        try:
            return super().rehearse()
        finally:
            self._ring = before

    def _cohorts(self, first: int, end: int) -> tuple[list[Cohort], list[np.ndarray] | None]:
        buffers = self._buffers[first:end]
        cohorts = [Cohort(each.clients, dropped=0, too_small=0, spare=0) for each in buffers]
        return cohorts, [each.versions for each in buffers] if self._depth > 1 else None

    def _place(self) -> None:
        super()._place()
        self._ring = jax.device_put(self._ring, everywhere(self.mesh))

    def _run_late(self, rates: Any, state: Any, *call: Any) -> tuple[Any, Outcome]:
        state, self._ring, outcome = self._late(rates, state, self._ring, *call)
        return state, outcome
