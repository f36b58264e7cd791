"""Tables and figures of papers, by name: the paper's figures beside ours, as JSON, picture and table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from partwise.checkpoint import write_file
from partwise.experiments import fedrecon
from partwise.experiments.folder import to_json
from partwise.experiments.run import Progress, silent
from partwise.types import UserError, unknown


class Reproduction(NamedTuple):
    """function: (data, folder, seeds, quick, progress) -> {"rows": [...], ...}."""

    summary: str
    function: Callable[..., dict[str, Any]]


REPRODUCTIONS: dict[str, Reproduction] = {
    "fedrecon-table1": Reproduction("FedRecon, Tables 1 and 3: MovieLens", fedrecon.table1),
    "fedrecon-figure3": Reproduction("FedRecon, Figure 3: numbers of steps, MovieLens", fedrecon.figure3),
    "fedrecon-figure4": Reproduction("FedRecon, Figure 4: server optimizers, MovieLens", fedrecon.figure4),
}


def reproduce(
    name: str,
    data: str | None = None,
    out: str | Path | None = None,
    seeds: int = 3,
    quick: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Do it, and write NAME.json and pictures under `out`. `quick` shows that it works, not what it gives."""
    if name not in REPRODUCTIONS:
        raise unknown("reproduction", name, REPRODUCTIONS)
    if seeds < 1:
        raise UserError(f"--seeds must be at least 1, not {seeds}")
    folder, began = Path(out or Path("runs") / name), time.perf_counter()
    result = REPRODUCTIONS[name].function(data, folder, range(seeds), quick, progress)
    result = {
        "name": name,
        **result,
        "quick": quick,
        "seconds": time.perf_counter() - began,
        "folder": str(folder),
    }
    write_file(folder / f"{name}.json", to_json(result))
    return result


def show_table(console: Console, result: Mapping[str, Any]) -> None:
    """Paper beside ours."""
    table = Table("row", "metric", "paper", "ours", "spread", title=result["name"])
    for row in result["rows"]:
        paper = "-" if row["paper"] is None else f"{row['paper']:.4g}"
        table.add_row(row["row"], row["metric"], paper, f"{row['ours']:.4f}", f"± {row['spread']:.4f}")
    console.print(table)
    console.print(f"{result['seconds']:.0f} s; JSON and pictures in {result['folder']}", highlight=False)
