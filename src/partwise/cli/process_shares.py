"""The share of this machine that each of several processes has: cores, and GPUs if JAX would use them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from partwise.simulation.cores import own_cores
from partwise.types import UserError, counted

LOST = 75  # exit code of a process that has lost others (EX_TEMPFAIL)
MOST = 1024
DRIVER = Path("/proc/driver/nvidia/gpus")  # has a folder for every GPU
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
FORCED = "xla_force_host_platform_device_count"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def joins(text: str | None, environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several that were started already, by --processes N or by a launcher."""
    started = environment.get("PARTWISE_PROCESSES")
    return text is not None and (text == "auto" or started is not None) and started != "1"


def number_to_start(text: str | None, environment: Mapping[str, str]) -> int:
    """How many processes --processes asks to start on this machine; 0 if it is trained in this one."""
    if text is None or text == "auto":
        return 0
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise UserError(f"--processes must be a number from 1 to {MOST}, or auto, not '{text}'")
    return 0 if int(text) == 1 or "PARTWISE_PROCESSES" in environment else int(text)


class MachineShare(NamedTuple):
    """What one process has of the machine."""

    cores: Sequence[int]
    environment: Mapping[str, str]


def shares(number: int) -> list[MachineShare]:
    """So many equal shares. What does not divide is left over, because sums need as many devices everywhere."""
    cores, gpus = own_cores(), _gpus(os.environ)
    if gpus and len(gpus) < number:
        raise UserError(
            f"{number} processes need a GPU each, and there {'is' if len(gpus) == 1 else 'are'} only "
            f"{counted(len(gpus), 'GPU')}: use --processes {len(gpus)}, or JAX_PLATFORMS=cpu"
        )
    return [_share(cores, gpus, number, index) for index in range(number)]


def _share(cores: Sequence[int], gpus: Sequence[str], number: int, index: int) -> MachineShare:
    each = max(len(cores) // number, 1)
    first = index * each % len(cores)
    said = "JAX_NUM_CPU_DEVICES" in os.environ or FORCED in os.environ.get("XLA_FLAGS", "")
    found = {} if said else {"JAX_NUM_CPU_DEVICES": str(each)}
    if gpus:
        mine = len(gpus) // number
        found[VISIBLE] = ",".join(gpus[index * mine : (index + 1) * mine])
    return MachineShare(cores[first : first + each], found)


def _gpus(environment: Mapping[str, str]) -> list[str]:
    """The NVIDIA GPUs that JAX would use, by number."""
    platforms = environment.get("JAX_PLATFORMS", "cuda")
    if not ("cuda" in platforms or "gpu" in platforms) or not any(map(importlib.util.find_spec, PLUGINS)):
        return []
    if VISIBLE in environment:
        return [name for name in environment[VISIBLE].split(",") if name]
    return [str(number) for number in range(len(list(DRIVER.iterdir())))] if DRIVER.exists() else []
