"""What `partwise compare` and `partwise sweep` do."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from partwise.cli import show_sweep
from partwise.cli.interrupt import begin_work, same_command
from partwise.cli.progress import show_progress
from partwise.runs.lock import refuse_if_held
from partwise.types import UserError


def compare(options: argparse.Namespace) -> Mapping[str, Any]:
    """`partwise compare`."""
    from partwise.runs.compare import compare as compare_runs

    compared = compare_runs(options.run_folders, metric=options.metric, out=options.out)
    if not options.json:
        show_sweep.comparison(compared.result, options.out)
    return compared.result


def sweep(options: argparse.Namespace) -> Mapping[str, Any]:
    """`partwise sweep`."""
    from partwise.cli.commands import asked
    from partwise.runs.sweep_plan import parse_grid

    refuse_if_held(options.out)
    task, recorded, changes = asked(options)
    grid = parse_grid(options.grid)
    if options.processes is not None and options.processes < 1:
        raise UserError(f"--processes must be at least 1, not {options.processes}")
    from partwise.runs.sweep import sweep as sweep_task

    begin_work()
    options.again = same_command(options)
    with show_progress(options, task or "planted") as progress:
        swept = sweep_task(
            task,
            grid=grid,
            seeds=options.seeds,
            out=options.out,
            metric=options.metric,
            data=options.data,
            resume=options.resume,
            preset=options.preset,
            processes=options.processes,
            progress=progress,
            told=progress,
            changes=changes,
            recorded=recorded,
        )
    if not options.json:
        show_sweep.sweep(swept.result, swept.folder)
    failed = [name for row in swept.rows for name in row["failed"]]
    return {**swept.result, "folder": str(swept.folder), "failed": failed}
