"""A fleet of devices on a virtual clock: how many versions a day, how stale, how many bytes, what accuracy by when.

The schedule is made first, on the host (`simulation.fleet`). It depends on ids, a seed and durations, never on
values. With `rounds`, the clients of its first versions are then trained, each from the version that its device
began with (`simulation.late`).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.algorithms.entry import Prepared
from partwise.algorithms.registry import prepare
from partwise.checkpoint import write_file
from partwise.config.settings import Config
from partwise.config.sum_sizes import quorum_of
from partwise.runs.document import to_json
from partwise.runs.fleet_told import available, rules_of, tell
from partwise.runs.fleet_traffic import Messages, messages_of
from partwise.runs.fleet_training import learned, train_schedule
from partwise.runs.folder import Folder
from partwise.runs.resolve import check_resumable, resolve
from partwise.runs.run import Run
from partwise.runs.train import DEFAULT, OnStatus, silent
from partwise.simulation.fleet.arrivals import make_arrivals
from partwise.simulation.fleet.buffered import buffered
from partwise.simulation.fleet.counting import FleetCounts, count_windows
from partwise.simulation.fleet.devices import Devices, fit
from partwise.simulation.fleet.flight import ClientWork, World, seconds_of
from partwise.simulation.fleet.synchronous import in_rounds
from partwise.simulation.fleet.tempo import Tempo
from partwise.simulation.fleet.trace import SPEEDS, read_trace, synthetic_trace, write_trace
from partwise.simulation.mesh import use_all_cores
from partwise.tasks import Task
from partwise.types import Limits, UserError, counted

MADE_UP, RUN = "synthetic", "run"  # the trace that nobody measured; where the trained run is in a folder
LIMITS = {
    "devices": Limits(1, 10**11),
    "hours": Limits(0.01, 24 * 366),
    "every": Limits(0.001, 10**9),
    "edges": Limits(1, 10**6),
    "rounds": Limits(0, 10**8),
}


class FleetResult(NamedTuple):
    """A schedule that was counted, and perhaps trained.

    Attributes:
        result: The content of fleet.json.
        counts: The schedule in numbers: a line for each version, and the first versions' clients.
        run: The trained run; None if nothing was trained.
    """

    result: Mapping[str, Any]
    counts: FleetCounts
    run: Run | None

    def __repr__(self) -> str:
        day = self.result["per_day"]
        return f"FleetResult({self.result['devices']:,} devices, {day['versions']:,.0f} versions a day)"


def fleet(
    task: str | Task | None = None,
    *,
    devices: int = 1_000_000,
    hours: float = 24.0,
    trace: str | Path | None = None,
    every: float = 600.0,
    edges: int = 100,
    rounds: int = 0,
    data: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    preset: str | None = None,
    progress: OnStatus = silent,
    told: Callable[[str], None] = lambda text: None,
    changes: Mapping[str, Any] | None = None,
    recorded: Mapping[str, Any] | None = None,
    **settings: Any,
) -> FleetResult:
    """Simulate a task on a fleet of devices, with rounds or without (`deploy.buffer`).

    Args:
        task: The name of a task, or a `Task` of your own. A device has the examples of one of its training clients.
        devices: How many there are. Time and memory do not depend on it.
        hours: How long is simulated, from midnight in UTC.
        trace: A table of what devices are like (`simulation.fleet.trace`); without it, one that is made up.
        every: Seconds after which an available device asks for work again, on average.
        edges: Places at which a CDN has caches (`serving.way = pregenerated`).
        rounds: How many versions are trained, from the first one; 0 trains nothing.
        data: Where the data of a named task is.
        out: A folder for fleet.json, fleet.png, the made-up trace and the trained run.
        resume: Go on with the training in `out` from its last checkpoint. All else must be as it was.
        preset: A named set of settings of the task, such as "paper".
        progress: Called with a `Status` while the model is trained.
        told: Called with sentences about what happens.
        changes: Settings as dotted keys; the same as `settings`.
        recorded: All settings of another run, to which `changes` are applied.
        **settings: Settings with `__` for the dot: deploy__buffer=1000, deploy__concurrency=10000.

    Returns:
        What comes of it by day and by hour, and the schedule.

    Raises:
        UserError: A setting, the trace or the data does not fit, or no version would ever be made.
    """
    began = time.perf_counter()
    for name, value in {
        "devices": devices,
        "hours": hours,
        "every": every,
        "edges": edges,
        "rounds": rounds,
    }.items():
        LIMITS[name].check(name, value)
    changes = {**(changes or {}), **{key.replace("__", "."): value for key, value in settings.items()}}
    told("loading")
    use_all_cores()
    place = Folder(Path(out) / RUN) if rounds and out is not None else None
    _check_place(place, resume)
    changes |= {"rounds": rounds} if rounds else {}
    found, config = resolve(task or DEFAULT, data, changes, preset, recorded)
    prepared = prepare(found, config)
    seen = synthetic_trace(seed=config.seed) if trace is None else read_trace(trace)
    tempo, messages = tempo_of(prepared, config), messages_of(prepared, config)
    world = make_world(fit(seen), messages, prepared, config, devices, every, 3600 * hours)
    _check_there(world.devices, tempo, devices)
    told("making the schedule")
    clock = time.perf_counter()
    counts = count_windows((buffered if tempo.buffer else in_rounds)(world, tempo), world, rounds)
    seconds = time.perf_counter() - clock
    _check_made(counts, world, tempo, rounds, hours)
    result = {
        "task": config.task,
        "algorithm": config.algorithm,
        "seed": config.seed,
        "devices": devices,
        "hours": hours,
        "trace": MADE_UP if trace is None else str(trace),
        "serving": config.serving.way,
        **rules_of(tempo, config),
        **tell(counts, world, tempo, messages, devices, hours, edges),
        "schedule": _speed(counts, seconds),
    }
    run = None
    if rounds:
        run = train_schedule(found, config, prepared, counts, place, progress, told, began, resume)
        result["trained"] = learned(run, counts)
    result["seconds_total"] = time.perf_counter() - began
    if out is not None:
        _write(Path(out), result, seen if trace is None else None)
    return FleetResult(result, counts, run)


def _check_place(place: Folder | None, resume: bool) -> None:
    """Raise `UserError` early if nothing can be trained there, or nothing was."""
    if resume and not place:
        raise UserError(
            "only a training that is recorded goes on: give the --rounds (rounds=...) and the --out (out=...) with "
            "which it began, or leave out --resume (resume=True)"
        )
    if place and resume:
        check_resumable(place)
    elif place:
        place.check_free()


def tempo_of(prepared: Prepared, config: Config) -> Tempo:
    """How versions are made: by the same settings as over a network."""
    recruiting, part = prepared.recruiting, config.deploy
    refused = {
        "cohort.dropout": (recruiting.dropout, 0, "the trace says how often devices drop out"),
        "cohort.min_examples": (
            recruiting.min_examples,
            0,
            "a device of the fleet has whatever its client has",
        ),
        "cohort.sampling": (recruiting.sampling.name, "fixed", "devices take part when they ask for work"),
    }
    for key, (value, usual, reason) in refused.items():
        if value != usual:
            raise UserError(f"{key} = {value} is not for a fleet: {reason}. Set it to {usual}")
    if not prepared.store.num_clients:
        raise UserError("the task has no training clients, whose examples the devices could have")
    return Tempo(
        seed=config.seed,
        size=recruiting.size,
        asked=recruiting.asked,
        quorum=quorum_of(config),
        deadline=part.deadline,
        buffer=part.buffer,
        concurrency=part.concurrency or recruiting.size,
        stalest=part.stalest,
    ).check()


def make_world(
    devices: Devices,
    messages: Messages,
    prepared: Prepared,
    config: Config,
    num_devices: int,
    every: float,
    horizon: float,
) -> World:
    """What time depends on."""
    work = ClientWork(np.asarray(prepared.store.counts, np.float64), messages.down, messages.up)
    arrivals = make_arrivals(devices, num_devices, every, horizon)
    return World(devices, arrivals, work, config.deploy.lease, horizon)


def _check_there(devices: Devices, tempo: Tempo, num_devices: int) -> None:
    most = available(devices, num_devices).max()
    if tempo.at_once > most:
        remedy = "deploy.concurrency" if tempo.buffer else "cohort.size"
        raise UserError(
            f"{tempo.at_once:,} devices are to work at a time, and of {num_devices:,} at most {most:,.0f} are "
            f"available at once: lower {remedy}, or simulate more devices"
        )


def _check_made(counts: FleetCounts, world: World, tempo: Tempo, rounds: int, hours: float) -> None:
    """Raise `UserError` if there are no versions, or fewer than are to be trained."""
    made = len(counts.made)
    if made and made < rounds:
        raise UserError(
            f"{rounds:,} versions are to be trained, and {hours:g} hours have only {made:,}: simulate more hours "
            f"(--hours), or train fewer (--rounds)"
        )
    if made:
        return
    started, lost = (int(counts.lines[name].sum()) for name in ("started", "lost"))
    usual = _usual_seconds(world)
    what = (
        f"a buffer of {tempo.buffer:,}"
        if tempo.buffer
        else f"a quorum of {tempo.quorum:,} before the deadline"
    )
    slow = f" A task takes {usual:,.3g} s on a usual device, and deploy.deadline is {tempo.deadline:g} s."
    raise UserError(
        f"no version is made in {hours:g} hours: {counted(started, 'task')} began, {lost:,} of them on devices "
        f"that never reported, and there was never {what}.{'' if tempo.buffer else slow} Simulate more hours or "
        f"devices, or ask for less."
    )


def _usual_seconds(world: World) -> float:
    """How long a task of the median client takes on a median device, of the class with most devices."""
    kind = np.array([int(np.argmax(world.devices.class_share))])
    all_of = seconds_of(
        world, np.arange(len(world.work.examples)), kind, np.zeros((len(world.work.examples), len(SPEEDS)))
    )
    return float(np.median(all_of))


def _speed(counts: FleetCounts, seconds: float) -> dict[str, float]:
    """How fast a schedule was made. Memory is that of the whole process."""
    used = float(counts.lines["used"].sum() + counts.lines["unused"].sum())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "reports_per_second": used / seconds, "peak_memory_mb": memory}


def _write(folder: Path, result: Mapping[str, Any], made_up: Mapping[str, np.ndarray] | None) -> None:
    from partwise.runs.fleet_picture import draw_fleet

    write_file(folder / "fleet.json", to_json(result))
    draw_fleet(folder / "fleet.png", result)
    if made_up is not None:
        write_trace(folder / "trace.csv", made_up)
