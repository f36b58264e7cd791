"""The devices over which a cohort is spread.

On CPU there is one XLA device per core, because small loop bodies do not use several cores by themselves. JAX
must know this before it starts. So `use_all_cores` is the first thing that a training or an evaluation does.
No import, no building of a model and no serving of one client starts JAX or changes its configuration.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax._src.distributed import global_state  # what is public starts JAX
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partwise.randomness import AXIS
from partwise.simulation.cores import own_cores
from partwise.types import UserError

LARGE_BYTES = 1 << 20
RUNS = "runs"  # the axis of runs that are side by side
FORCED = "xla_force_host_platform_device_count"


def use_all_cores() -> None:
    """Start JAX, unless it has started, with one CPU device per core, or as many as the user has set. If it has
    started with one device, warn that only one core is used.

    XLA adds up a product of large matrices in as many pieces as it has threads, which are as many as cores unless
    NPROC says otherwise. Here they are as many as the run has CPU devices in all its processes: on their number the
    last digits depend anyway."""
    ask_for_all_cores()
    with _environment(NPROC=str(_own_devices() * (global_state.num_processes or 1))):
        jax.devices()


def ask_for_all_cores() -> None:
    """What `use_all_cores` does before JAX starts."""
    cores = len(own_cores())
    if FORCED in os.environ.get("XLA_FLAGS", "") or jax.config.jax_num_cpu_devices > 0:  # pyright: ignore[reportAttributeAccessIssue]
        return
    try:
        jax.config.update("jax_num_cpu_devices", cores)
    except RuntimeError:  # JAX has started: use the devices it has
        _tell_slow(cores)


def _own_devices() -> int:
    """The CPU devices that JAX is asked for."""
    forced = re.findall(rf"{FORCED}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(forced[-1]) if forced else max(jax.config.jax_num_cpu_devices, 1)  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def _environment(**words: str) -> Iterator[None]:
    """The environment with these words, unless it has them. Later processes do not inherit them."""
    mine = words.keys() - os.environ.keys()
    os.environ |= {name: words[name] for name in mine}
    try:
        yield
    finally:
        for name in mine:
            del os.environ[name]


def _tell_slow(cores: int) -> None:
    if cores > 1 and jax.default_backend() == "cpu":
        warnings.warn(  # Python shows it once
            f"JAX was used before this training, so it runs on one of {cores} cores. To use all, begin the program "
            f'with: import jax; jax.config.update("jax_num_cpu_devices", {cores})',
            RuntimeWarning,
            stacklevel=1,
        )


def make_mesh(num_devices: int | None = None) -> Mesh:
    """All devices (or the first `num_devices`) along the client axis."""
    use_all_cores()
    devices = jax.devices()[:num_devices]
    if num_devices and num_devices > len(devices):
        raise UserError(f"{num_devices} devices were asked for, but there are only {len(devices)}")
    return Mesh(np.array(devices), (AXIS,))


def make_runs_mesh(num_runs: int) -> Mesh:
    """All devices along the axis of runs and the client axis. Runs on different devices need not wait for each
    other, so as many devices as divide the runs are along theirs."""
    devices = make_mesh().devices
    apart = math.gcd(num_runs, devices.size)
    return Mesh(devices.reshape(apart, -1), (RUNS, AXIS))


def everywhere(mesh: Mesh) -> NamedSharding:
    """The sharding with a copy on every device."""
    return NamedSharding(mesh, P())


def device_memory() -> int:
    """Bytes of memory of a device: its own, or its share of the machine's."""
    device = jax.devices()[0]
    statistics = device.memory_stats() if device.platform != "cpu" else None
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.device_count()


def fills_a_core(lane_bytes: int) -> bool:
    """Whether a client of this size fills a CPU core's cache, so that no other client should run beside it."""
    return jax.default_backend() == "cpu" and lane_bytes > LARGE_BYTES
