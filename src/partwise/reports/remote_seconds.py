"""What a round costs if its clients are in an object store, beside the same round on a local disk."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "ms a\nround": lambda line: f"{1e3 * line['seconds_per_round']:.1f}",
    "requests\na round": lambda line: f"{line['requests_per_round']:.0f}",
    "MB a\nround": lambda line: f"{line['mb_per_round']:.2f}",
    "store\nMB": lambda line: f"{line['store_mb']:.0f}",
    "peak\nMB": lambda line: f"{line['peak_memory_mb']:.0f}",
    "load": lambda line: f"{line['load']:.1f}",
}
NOTE = (
    "Medians over calls after the first; waiting for rows counts. The object store is a process of this machine. "
    "The load is that of the last minute."
)
PLACES = {"local disk": None, "object store": 0.0, "50 ms away": 0.05}  # seconds before an answer
WRITERS = {"data.network": "2nn", "algorithm": "fed_avg", "update.epochs": 5, "simulation.lanes": 1}
WRITERS |= {"data.num_clients": 700, "cohort.size": 50, "simulation.rounds_per_call": 2}
RATINGS = {"data.num_clients": 130_000, "data.mean_examples": 100, "cohort.size": 50, "simulation.lanes": 8}
Line = tuple[str, str, Mapping[str, Any], int, float | None]


def cases(quick: bool) -> list[Line]:
    """Name, task, settings, rounds and latency. Five epochs of images are long enough to hide the reading; rounds
    of ratings, which take milliseconds, are not."""
    small = {**WRITERS, "cohort.size": 2}
    tasks = [("writers", small, 4)] if quick else [("writers", WRITERS, 12), ("planted", RATINGS, 150)]
    return [
        (f"{task}, {name}", task, changes, rounds, latency)
        for task, changes, rounds in tasks
        for name, latency in PLACES.items()
    ]


def measure_remote(
    task: str, rounds: int, changes: Mapping[str, Any], latency: float | None
) -> dict[str, Any]:
    """Train on clients of a local disk (`latency` None), or of an object store with so many seconds of latency."""
    from partwise.algorithms.registry import prepare
    from partwise.runs.backends import make_simulation
    from partwise.runs.resolve import resolve
    from partwise.simulation.mesh import use_all_cores

    use_all_cores()
    made, config = resolve(task, None, changes)
    with (
        tempfile.TemporaryDirectory(prefix="partwise-bench-") as place,
        _stored(made.train, place, latency) as (
            store,
            served,
        ),
    ):
        prepared = prepare(made._replace(train=store), config)
        simulation: Any = make_simulation(prepared, config, config.simulation.lanes)
        if simulation.resident:
            raise RuntimeError(
                "the population is small enough to stay on the devices, so nothing is measured"
            )
        before, calls = np.array(served()), []
        for records in simulation.run(rounds):
            calls.append(float(np.mean([record.seconds for record in records])))
        requests, num_bytes = (np.array(served()) - before) / rounds
        size = (Path(place) / "store" / "examples.arrow").stat().st_size
    return {
        "seconds_per_round": float(np.median(calls[1:])),
        "requests_per_round": float(requests),
        "mb_per_round": float(num_bytes) / 1e6,
        "store_mb": size / 1e6,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "load": os.getloadavg()[0],
        "device": f"{os.cpu_count()} CPU cores",
    }


@contextmanager
def _stored(train: Any, place: str, latency: float | None) -> Iterator[tuple[Any, Callable[[], tuple]]]:
    """The training clients, opened from a folder or from an object store, and what was asked of the latter."""
    from partwise.data.store import open_store
    from partwise.reports.slow_store import serve_slowly

    folder = Path(place) / "store"
    train.save(folder)
    if latency is None:
        yield open_store(folder), lambda: (0, 0)
        return
    with serve_slowly(folder, latency) as server:
        yield open_store(server.url), server.served
