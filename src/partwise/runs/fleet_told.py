"""What a fleet's schedule comes to, as a dict for JSON: by day, by hour, by class of devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from partwise.config.settings import Config
from partwise.runs.fleet_traffic import Messages, cached
from partwise.simulation.fleet.counting import FleetCounts, by_hour, seconds_of_tasks, staleness_of
from partwise.simulation.fleet.devices import Devices
from partwise.simulation.fleet.flight import World
from partwise.simulation.fleet.tempo import Tempo

BUSY = 0.1  # a larger share of the available devices at work at once is worth a note


def available(devices: Devices, num_devices: int) -> np.ndarray:
    """[quarters of a day]: how many devices are available."""
    return num_devices * devices.presence().sum(axis=1)


def rules_of(tempo: Tempo, config: Config) -> dict[str, Any]:
    part = config.deploy
    if tempo.buffer:
        names = {"buffer": tempo.buffer, "concurrency": tempo.concurrency, "stalest": tempo.stalest}
        return {"mode": "buffer", "rules": names | {"staleness": part.staleness, "lease": part.lease}}
    names = {"cohort": tempo.size, "asked": tempo.asked, "quorum": tempo.quorum}
    return {"mode": "rounds", "rules": names | {"deadline": tempo.deadline, "lease": part.lease}}


def tell(
    counts: FleetCounts,
    world: World,
    tempo: Tempo,
    messages: Messages,
    num_devices: int,
    hours: float,
    edges: int,
) -> dict[str, Any]:
    """What a schedule comes to."""
    lines, days = counts.lines, hours / 24
    total = lambda name: float(lines[name].sum())
    caches = cached(
        messages.pages, total("started") / len(counts.made), total("used") / len(counts.made), edges
    )
    there, repeated = available(world.devices, num_devices), int((~lines["made"][:-1]).sum())
    reached = _reached(counts, world.devices, num_devices, days)
    traffic = lambda started, versions, down, up: _bytes(messages, caches, started, versions, down, up)
    per_day = {
        "versions": len(counts.made) / days,
        "tasks": total("started") / days,
        "lost": total("lost") / days,
        "reports": (total("used") + total("unused")) / days,
        "used": total("used") / days,
        "unused": total("unused") / days,
        "repeated": repeated / days,
        "devices_reached": reached,
        **{
            name: value / days
            for name, value in traffic(total("started"), len(counts.made), total("down"), total("up")).items()
        },
    }
    each_hour = [
        line | traffic(line["started"], line["versions"], line.pop("bytes_down"), line.pop("bytes_up"))
        for line in by_hour(counts, hours)
    ]
    return {
        "per_day": per_day,
        "staleness": staleness_of(counts),
        "staleness_counts": counts.staleness.tolist(),
        "seconds_of_tasks": seconds_of_tasks(counts),
        "available": {"least": float(there.min()), "mean": float(there.mean()), "most": float(there.max())},
        "available_by_hour": there.reshape(24, -1).mean(axis=1).tolist(),
        "classes": _classes(counts, world.devices),
        "bytes_of_tasks": {"down": float(messages.down.mean()), "up": float(messages.up.mean())},
        "caches": {"edges": edges, **caches} if messages.pages else None,
        "by_hour": each_hour,
        "notes": _notes(tempo, there, len(counts.made), repeated),
    }


def _bytes(
    messages: Messages, caches: Mapping[str, Any], started: float, versions: float, down: float, up: float
) -> dict[str, float]:
    """Bytes that leave the server, that come to it, and that leave the CDN."""
    own = down if messages.by_server is None else started * messages.by_server
    fetched = versions * (messages.each_version + caches["fetched_per_version"])
    return {
        "bytes_from_server": own + fetched,
        "bytes_to_server": up,
        "bytes_from_cdn": down - own if messages.pages else 0.0,
    }


def _reached(counts: FleetCounts, devices: Devices, num_devices: int, days: float) -> float:
    """How many different devices have a task in a day, on average: those of a class are drawn at random."""
    there = num_devices * devices.class_share
    return float((there * -np.expm1(-counts.classes_started / days / there)).sum())


def _classes(counts: FleetCounts, devices: Devices) -> list[dict[str, Any]]:
    shares = devices.class_share, counts.classes_started, counts.classes
    each = [(part / part.sum()).tolist() for part in shares]
    return [
        {"name": name, "share": share, "share_of_tasks": tasks, "share_of_used": used}
        for name, share, tasks, used in zip(devices.names, *each, strict=True)
    ]


def _notes(tempo: Tempo, there: np.ndarray, made: int, repeated: int) -> list[str]:
    notes, least = [], there.min()
    if repeated > made:
        notes.append(
            f"{repeated:,} rounds were tried again and {made:,} made a version: lower deploy.quorum, ask more "
            f"devices (cohort.over_selection), or give them longer (deploy.deadline)"
        )
    if tempo.at_once > BUSY * least:
        notes.append(
            f"{tempo.at_once:,} devices work at a time, and at the quietest hour {least:,.0f} are available. "
            f"Devices are drawn anew for every task, so one may have two at once: the figures are a little too good"
        )
    return notes
