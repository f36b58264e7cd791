"""When a device may work: only while it is charging, on a network that costs nothing, idle; or as one's own
function says. And what it can tell of itself: battery, network, load.

A text names policies, all of which must agree: "charging,idle". "package.module:function" is one of your own: it
takes nothing, and returns whether the device may work now. Packages can add names with entry points of the group
`partwise.policies`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from partwise import plugins
from partwise.types import UserError

log = logging.getLogger("partwise.agent")

Policy = Callable[[], bool]
GROUP = "partwise.policies"  # the group of entry points
BUSY = 0.7  # load per core from which on a device is not idle
NETWORK_SECONDS = 30  # how long an answer about the network is believed
METERED = {"u 1": True, "u 3": True, "u 2": False, "u 4": False}  # NetworkManager's answers; "u 0": not known
ASK_NETWORK = (
    "busctl",
    "get-property",
    "org.freedesktop.NetworkManager",
    "/org/freedesktop/NetworkManager",
    "org.freedesktop.NetworkManager",
    "Metered",
)


class Power(NamedTuple):
    """A device's battery: how full it is, from 0 to 1, and whether it is on mains. None: not known, or none."""

    battery: float | None
    charging: bool | None


def charging() -> bool:
    """Whether the device is on mains; a device without a battery always is."""
    now = power()
    return now.battery is None or bool(now.charging)


def unmetered() -> bool:
    """Whether the network is not known to cost by the byte."""
    return metered() is not True


def idle() -> bool:
    """Whether the load of the last minute is below `BUSY` per core. The agent's own work counts too."""
    return load() < BUSY


POLICIES: dict[str, Any] = {"charging": charging, "unmetered": unmetered, "idle": idle}


def policy_of(text: str) -> Policy:
    """The policy that a text names: all of its parts must agree. An empty text: always.

    A policy that fails is one that says no, with a line in the log.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    policies = [(part, _find(part)) for part in parts]
    return lambda: all(_asked(name, policy) for name, policy in policies)


def status() -> dict[str, float | bool | None]:
    """What a device can tell of itself. None: not known."""
    now = power()
    return {"battery": now.battery, "charging": now.charging, "metered": metered(), "load": round(load(), 2)}


def power() -> Power:
    """The device's battery."""
    found = _psutil().sensors_battery() if hasattr(_psutil(), "sensors_battery") else None
    return Power(None, None) if found is None else Power(found.percent / 100, found.power_plugged)


def metered() -> bool | None:
    """Whether the network costs by the byte, as NetworkManager says (Linux); None where nobody can say."""
    return _metered(int(time.monotonic() // NETWORK_SECONDS))


@functools.lru_cache(maxsize=1)
def _metered(moment: int) -> bool | None:
    if shutil.which(ASK_NETWORK[0]) is None:
        return None
    try:
        found = subprocess.run(ASK_NETWORK, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return METERED.get(found.stdout.strip())


def load() -> float:
    """The processes of the last minute that wanted to run, per core."""
    return _psutil().getloadavg()[0] / (os.cpu_count() or 1)


def _psutil() -> Any:
    try:
        import psutil
    except ImportError:
        raise UserError(
            "policies need a package that is not installed: pip install 'partwise[deploy]'"
        ) from None
    return psutil


def _find(name: str) -> Policy:
    if ":" not in name:
        return plugins.find(POLICIES, GROUP, "policy", name)
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"the policy '{name}' cannot be imported ({error}): give 'package.module:function'"
        ) from None
    if not callable(found):
        raise UserError(f"the policy '{name}' is a {type(found).__name__}: give a function without arguments")
    return lambda: bool(found())


def _asked(name: str, policy: Policy) -> bool:
    try:
        return bool(policy())
    except UserError:
        raise
    except Exception as error:  # of somebody else's function: the device then does not work
        log.warning("the policy '%s' failed, which counts as no: %r", name, error)
        return False
