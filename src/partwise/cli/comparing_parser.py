"""The options of `partwise compare` and `partwise sweep`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from partwise.cli import comparing


def add_comparing(
    command: Callable[..., argparse.ArgumentParser], add_task: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Add the commands."""
    more = (
        ": test metrics over seeds, differences of settings, learning curves. Only the runs' files are read."
    )
    sub = command("compare", comparing.compare, "runs side by side", more)
    sub.add_argument("run_folders", nargs="+", metavar="RUN", help="folders of runs, or of sweeps")
    sub.add_argument(
        "--metric", metavar="NAME", help="the metric that is compared (default: the model's first)"
    )
    sub.add_argument("--out", metavar="DIR", help="folder for compare.png and compare.json (default: none)")
    more = ", side by side in one program where only rates differ. The best settings are written as a config."
    sub = command("sweep", comparing.sweep, "train every combination of a grid with several seeds", more)
    add_task(sub)
    sub.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="dotted.key=value,value",
        help="values to try of a setting; may be given for several settings",
    )
    sub.add_argument("--seeds", default="1", metavar="N", help="seeds of every combination (default: 1)")
    sub.add_argument(
        "--metric", metavar="NAME", help="validation metric that chooses (default: the model's first)"
    )
    sub.add_argument(
        "--out", required=True, metavar="DIR", help="folder of the sweep, with a folder for every run"
    )
    sub.add_argument("--resume", action="store_true", help="go on with the sweep in --out")
    sub.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="processes at once, where runs need programs of their own (default: what suits the machine)",
    )
    sub.add_argument("--quiet", action="store_true", help="show no progress")
