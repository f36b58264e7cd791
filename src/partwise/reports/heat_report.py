"""How many clients hold the keys of a task (FedSubAvg, section 2 and Table 1), before any training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any, get_args

import numpy as np
from matplotlib.figure import Figure

from partwise.checkpoint import write_file
from partwise.data.heat import By, Heat, add, histogram, summarize
from partwise.runs.document import to_json
from partwise.runs.picture import INK, QUIET, save_picture
from partwise.runs.resolve import resolve
from partwise.selection.key_heat import count_heats, save_heats
from partwise.tasks import Task
from partwise.types import UserError, unknown

SPLITS = ("train", "validation", "test")


def measure_heat(
    name: str,
    data: str | None = None,
    changes: Mapping[str, Any] | None = None,
    by: By = "clients",
    split: str = "train",
    out: str | Path | None = None,
) -> dict[str, Any]:
    """The content of `partwise heat`, as a dict for JSON. With `out`, a picture, the JSON and the counts are
    written there too.

    All key spaces of the task are counted, including those that exist only for algorithms without local
    parameters. `split` is train, validation, test or all.
    """
    if by not in get_args(By):
        raise unknown("unit of heat", by, get_args(By))
    task, _ = resolve(name, data, changes or {})
    partition = (task.stateful or task.personal).partition
    if not partition.spaces:
        raise UserError(
            f"no parameter of task '{name}' is keyed, so every client holds all of it and there is no heat to "
            f"tell. `partwise describe {name}` shows the roles of its parameters."
        )
    heats = count_task(task, by, split)
    told = {"task": name, "split": split, "spaces": [summarize(heat) for heat in heats.values()]}
    told["uncounted"] = [space for space in partition.spaces if space not in heats]
    if out is not None:
        _write(Path(out), told, heats)
    return told


def count_task(task: Task, by: By = "clients", split: str = "train") -> dict[str, Heat]:
    """The heat of every key space that has columns, over the clients of one split or of all splits."""
    setting = task.stateful or task.personal
    if split not in (*SPLITS, "all"):
        raise unknown("split", split, (*SPLITS, "all"))
    if split == "all" and task.seen:
        raise UserError(
            f"the test clients of task '{task.name}' are its training clients, so all of them together would be "
            f"counted more than once: use --split train"
        )
    stores = [getattr(task, each) for each in (SPLITS if split == "all" else (split,))]
    counted = [count_heats(store.select(setting.columns), setting.partition, by) for store in stores]
    return {space: reduce(add, (heats[space] for heats in counted)) for space in counted[0]}


def _write(folder: Path, told: Mapping[str, Any], heats: Mapping[str, Heat]) -> None:
    write_file(folder / "heat.json", to_json(told))
    if heats:
        save_heats(folder / "heat.safetensors", heats)
        draw_heat(folder / "heat.png", heats, f"{told['task']}, {told['split']} clients")


def draw_heat(path: Path, heats: Mapping[str, Heat], title: str) -> None:
    """For every space, draw how many keys have how many holders, and the holders of every key, starting with
    the hottest."""
    figure = Figure(figsize=(9, 3.2 * len(heats)), layout="constrained")
    rows = figure.subplots(len(heats), 2, squeeze=False)
    for (left, right), heat in zip(rows, heats.values(), strict=True):
        word = "clients that hold it" if heat.by == "clients" else "samples of the clients that hold it"
        bins = histogram(heat)
        edges = [*(each.low for each in bins), bins[-1].high + 1] if bins else [1, 2]
        left.stairs([each.keys for each in bins] or [0], edges, fill=True, color=INK)
        left.set(xscale="log", xlabel=f"key of '{heat.space}': {word}", ylabel="keys")
        held = np.sort(heat.counts[heat.counts > 0])[::-1]
        right.plot(np.arange(1, len(held) + 1), held, color=INK, linewidth=1.4)
        right.axhline(heat.total, color=QUIET, linewidth=0.8, linestyle="--")
        right.set(xscale="log", yscale="log", xlabel="rank of the key", ylabel=word)
        factor = lambda n, total=heat.total: total / np.maximum(n, 1e-9)  # it is its own inverse
        right.secondary_yaxis("right", functions=(factor, factor)).set_ylabel("factor N / n")
    figure.suptitle(title, fontsize=10)
    save_picture(path, figure)
