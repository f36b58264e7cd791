"""How many clients run side by side: measured, because it depends on the model and on the machine.

One lane is best for dense layers on a CPU, a dozen for small models there, all of them on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

from partwise.simulation.loop import Simulation

CPU_LANES = (8, 32, 2)  # tried in this order; the third only if the second was no better
ACCELERATOR_LANES = (64, 512, 16)


def choose_lanes(make: Callable[[int], Simulation]) -> Simulation:
    """The fastest simulation of `make(lanes)` for a few numbers of lanes, none of it having run yet.

    Memory grows with lanes, so a number for which there is not enough is passed over.
    """
    first, more, fewer = CPU_LANES if jax.default_backend() == "cpu" else ACCELERATOR_LANES
    best, seconds = _timed(make, first)
    if best.lanes < first:  # the whole cohort at once
        return make(best.lanes)
    for lanes in (more, fewer):
        try:
            other, other_seconds = _timed(make, lanes)
        except (MemoryError, jax.errors.JaxRuntimeError):
            continue
        if other_seconds < seconds:
            best, seconds = other, other_seconds
            break
    return best


def _timed(make: Callable[[int], Simulation], lanes: int) -> tuple[Simulation, float]:
    """Seconds of a round, the best of three, on a simulation that is then as it was."""
    simulation = make(lanes)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        simulation.rehearse()
        times.append(time.perf_counter() - began)
    return simulation, min(times[1:])
