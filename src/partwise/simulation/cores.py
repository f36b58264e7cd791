"""The cores of this machine. This module imports nothing large, because commands look before JAX starts."""

from __future__ import annotations

import os


def own_cores() -> list[int]:
    """The cores that this process may use."""
    known = hasattr(os, "sched_getaffinity")
    return sorted(os.sched_getaffinity(0)) if known else list(range(os.cpu_count() or 1))
