"""Trains one family of a sweep in a process of its own: `python -m partwise.runs.sweep_worker OUT FAMILY CORES`.

It prints one JSON document per line: how far it is, warnings, and an error if the sweep cannot go on. It ends when
its standard input does, so that it does not outlive the sweep that started it.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from partwise.checkpoint import load_json
from partwise.runs.document import to_plain
from partwise.runs.parent import end_with_parent
from partwise.runs.run_view import SWEEP
from partwise.runs.sweep_plan import find_family, from_document
from partwise.types import RunWarning, UserError


def main(arguments: list[str]) -> int:
    """Train the family, and return the exit code."""
    out, family, cores = (
        Path(arguments[0]),
        int(arguments[1]),
        [int(core) for core in arguments[2].split(",")],
    )
    end_with_parent()  # the sweep decides when to stop
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    warnings.simplefilter("always", RunWarning)
    warnings.showwarning = lambda message, category, *place, **more: tell(
        {"warning": str(message), "of_run": issubclass(category, RunWarning)}
    )
    try:
        _train(out, family)
    except UserError as error:
        tell({"error": str(error)})
        return 2
    return 0


def _train(out: Path, family: int) -> None:
    from partwise.runs.sweep_family import train_family

    plan = from_document(load_json(out / SWEEP)["plan"])
    show = lambda status: tell({"status": status._asdict()})
    train_family(plan, find_family(plan, family), out, progress=show, told=lambda text: tell({"told": text}))


def tell(document: dict[str, Any]) -> None:
    """Print a line for the sweep."""
    sys.stdout.write(json.dumps(to_plain(document)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
