"""What it takes to recommend: seconds and memory for catalogues of many items."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

SEEN = 100  # items that are excluded
CALLS = 21
RATINGS = "ratings"
PAGE_KB = 4
COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "ms\na call": lambda line: f"{1e3 * line['seconds']:.1f}",
    "best\nms": lambda line: f"{1e3 * line['seconds_best']:.1f}",
    "first\ncall s": lambda line: f"{line['seconds_first']:.2f}",
    "table\nMB": lambda line: f"{line['table_mb']:.0f}",
    "more\nMB": lambda line: f"{line['growth_mb']:.0f}",
}
NOTE = (
    f"The ten best for one client, without {SEEN} that it has seen. Medians of {CALLS} calls after the first; "
    f"memory is the peak above what the model takes."
)


def measure_recommend(num_items: int, dim: int, model: str) -> dict[str, Any]:
    """Recommend from a catalogue of random vectors with biases: with a model of ratings, or of events (two_tower)
    after what the client has seen."""
    import jax

    personal, local, seen = _client(num_items, dim, model)
    given = None if model == RATINGS else seen
    jax.block_until_ready(jax.numpy.zeros(1) + 1)  # JAX has started
    before = _resident_mb()
    _forget_peak()
    seconds = []
    for _ in range(CALLS + 1):
        began = time.perf_counter()
        personal.recommend(local, k=10, exclude=seen, given=given)
        seconds.append(time.perf_counter() - began)
    return {
        "seconds": float(np.median(seconds[1:])),
        "seconds_best": min(seconds[1:]),
        "seconds_first": seconds[0],
        "table_mb": num_items * (dim + 1) * 4 / 2**20,
        "growth_mb": _peak_mb() - before,
        "device": f"{os.cpu_count()} CPU cores",
    }


def _client(num_items: int, dim: int, model: str) -> tuple[Any, dict[str, np.ndarray], Any]:
    """A personal model, its local part, and what the client has seen."""
    import jax

    from partwise.config.settings import Config
    from partwise.data.store import ClientStore
    from partwise.runs.client_file import Source
    from partwise.runs.personal import Personal
    from partwise.tasks import events, ratings

    rng = np.random.default_rng(0)
    if model == RATINGS:
        setting = ratings.settings(num_items, 1, dim, initial="learned", biases=True)[0]
    else:
        setting = events.settings(num_items, 1, "two_tower", dim)[0]
    wanted = setting.partition.server_shapes.items()
    # arrays of JAX's own, as training and a run's file give them
    params = {
        path: np.asarray(jax.device_put(rng.standard_normal(x.shape, np.float32))) for path, x in wanted
    }
    source = Source({"item": np.arange(num_items)}, {"item": (), "rating": ()}, "user")
    local = {
        path: rng.standard_normal(setting.partition.shapes[path].shape, np.float32)
        for path in setting.partition.local_paths
    }
    seen = rng.choice(num_items, min(SEEN, num_items // 2), replace=False).astype(np.int32)
    store = ClientStore({"item": seen}, np.zeros(1, int), np.array([len(seen)]), np.array([0]))
    return Personal(Config(), setting, params, source), local, store


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_KB / 1024


def _forget_peak() -> None:
    """Let the kernel count the largest size of this process anew."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
