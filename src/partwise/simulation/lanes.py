"""How many clients run side by side. This is measured, because it depends on the model and on the machine.

One lane is best for dense layers on a CPU, a dozen for small models on a CPU, and all clients on a GPU. A
measurement costs a compilation, so it is made only for runs that are long enough to gain from it. The result
is stored on disk, so that the same run on the same machine has the same lanes, and the same sums to the last
bit. It is stored only if the machine was otherwise idle during the measurement, because a measurement beside
other work says nothing about the next time. (A recorded run stores its lanes in its own folder.)
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax

from partwise.checkpoint import load_json, save_json
from partwise.simulation.exchange import agreed
from partwise.simulation.loop import Simulation
from partwise.simulation.mesh import device_memory, fills_a_core
from partwise.simulation.processes import is_writer
from partwise.types import UserError

CPU_LANES = (8, 32, 1)  # the first is the default
LARGE_CPU_LANES = (1, 4)  # for clients that are large enough to fill a core's cache
ACCELERATOR_LANES = (4096, 512, 64)
LONG_ROUND = 2  # seconds; a longer one is timed once
WORTH_SECONDS = 30  # a run that will take longer than this is measured
QUIET = 0.2  # the largest part of a core that other processes may use during a measurement


def choose_lanes(make: Callable[[int], Simulation], num_rounds: int, name: str) -> Simulation:
    """`make(lanes)` with the fastest number of lanes. `name` must describe everything that the speed may
    depend on.

    Memory grows with lanes. Numbers of lanes for which there is not enough memory are skipped. All others are
    measured with one simulation, as its tables may be large. Of several processes, the first decides for all: with
    other lanes they would wait for each other forever.
    """
    remembered = agreed(_remembered(name))
    if remembered:
        return make(remembered)
    simulation = make(CPU_LANES[0])
    lane_bytes = simulation.lane_bytes()
    on_cpu = LARGE_CPU_LANES if fills_a_core(lane_bytes) else CPU_LANES
    candidates = on_cpu if jax.default_backend() == "cpu" else ACCELERATOR_LANES
    most = agreed(device_memory() // (4 * lane_bytes))
    candidates = [lanes for lanes in candidates if lanes <= most] or [1]
    began, others = time.perf_counter(), _others()
    seconds: dict[int, float] = {}  # by lanes, of which a small cohort has no more than clients
    for lanes in candidates:
        simulation.use_lanes(lanes)
        if simulation.lanes not in seconds:
            seconds[simulation.lanes] = _seconds(simulation)
        if min(seconds.values()) * num_rounds < WORTH_SECONDS and len(seconds) == 1:
            return simulation
    simulation.use_lanes(min(seconds, key=lambda lanes: seconds[lanes]))
    if is_writer() and abs(_others() - others) <= QUIET * (time.perf_counter() - began):
        _remember(name, simulation.lanes)
    return simulation


def _others() -> float:
    """Seconds of CPU time that other processes have used so far, on all cores; infinite if the system does
    not tell."""
    try:
        user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
    except (OSError, ValueError):
        return math.inf
    used = user + nice + system + sum(rest)
    return used / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def _seconds(simulation: Simulation) -> float:
    """The seconds of a round: the best of three if it is short. The simulation's state does not change."""
    first = agreed(simulation.rehearse())
    return first if first > LONG_ROUND else agreed(min(simulation.rehearse() for _ in range(3)))


def _file(name: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    machine = f"{jax.__version__} {jax.device_count()} {jax.devices()[0].device_kind} {name}"
    return cache / "partwise" / "lanes" / f"{hashlib.sha256(machine.encode()).hexdigest()[:24]}.json"


def _remembered(name: str) -> int | None:
    """The lanes that were measured before. A missing or damaged file returns None."""
    try:
        lanes = load_json(_file(name))["lanes"]
    except (UserError, KeyError):
        return None
    return lanes if isinstance(lanes, int) and 0 < lanes <= max(ACCELERATOR_LANES) else None


def _remember(name: str, lanes: int) -> None:
    try:
        save_json(_file(name), {"lanes": lanes})
    except UserError:
        return  # the cache cannot be written, so the lanes will be measured again
