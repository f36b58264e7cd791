"""Where a run is, while it runs: a bar on a terminal, a line at every evaluation elsewhere.

Its seconds are those of the summary at the end: they count from the start of the command.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from partwise.cli.show import err, say

Show = Callable[[Any], None]
NARROW = 100  # columns; below, neither the training loss nor the time left is shown
OLD = 600  # seconds; no command takes so long to begin, so a clock that says so is wrong


def process_start() -> float:
    """The `time.perf_counter()` at which this process began, where the system tells (Linux); else now."""
    now = time.perf_counter()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return now
    return now - age if 0 <= age < OLD else now


@contextmanager
def show_progress(options: argparse.Namespace, title: str) -> Iterator[Show]:
    """A function that shows a `Status`, or words about what goes on; nothing with --json or --quiet."""
    if options.json or options.quiet:
        yield lambda status: None
    elif err.is_terminal:
        with _bar() as bar:
            yield _on_bar(bar, title, options.began)
    else:
        yield _as_lines(title, options.began)


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[rounds]}"),
        TimeElapsedColumn(),
        *([TimeRemainingColumn()] if err.width >= NARROW else []),
        TextColumn("{task.fields[metric]}", markup=False),
        console=err,
        get_time=time.perf_counter,
    )


def _on_bar(bar: Progress, title: str, began: float) -> Show:
    """Rounds done of all and the running metrics; while programs are compiled, the seconds go on."""
    job = bar.add_task(title, total=None, rounds="", metric="compiling")
    bar.tasks[0].start_time = began
    last = {"evaluation": ""}

    def show(status: Any) -> None:
        if isinstance(status, str):
            bar.update(job, metric=status)
            if status.endswith("."):  # a sentence, to be read later too
                _say(title, status)
            return
        last["evaluation"] = _metric(status.evaluation) or last["evaluation"]
        wide = err.width >= NARROW or not last["evaluation"]
        told = [f"training loss {status.loss:.4f}"] * wide + [last["evaluation"]]
        bar.update(
            job,
            description=" ".join(filter(None, (title, status.part))) if wide else status.part or title,
            completed=status.round,
            total=status.rounds,
            rounds=f"{status.round}/{status.rounds}",
            metric=" ".join(filter(None, told)),
        )

    return show


def _as_lines(title: str, began: float) -> Show:
    """A line at every evaluation, and where there is none at the end of every training of several."""

    def show(status: Any) -> None:
        if isinstance(status, str):
            if status != "loading":  # most mistakes are found then, and are told alone
                _say(title, status)
            return
        if status.evaluation is None and not (status.part and status.round == status.rounds):
            return
        told = (
            f"round {status.round} of {status.rounds}",
            f"training loss {status.loss:.4f}",
            _metric(status.evaluation),
        )
        name = ", ".join(filter(None, (title, status.part)))
        text = f"{name}: {', '.join(filter(None, told))} ({time.perf_counter() - began:.0f} s)"
        say(text, err)

    return show


def _say(title: str, note: str) -> None:
    """What goes on, in a line of its own (above the bar, if there is one)."""
    say(f"{title}: {note}", err)


def _metric(evaluation: Any) -> str:
    """The first metric of the model on the validation clients (without any, the loss); or the first number that is
    told of something else."""
    if not evaluation:
        return ""
    judged = evaluation.get("over_clients")
    name = next((name for name in judged or evaluation if name != "loss"), "loss")
    value = "undefined" if evaluation[name] is None else f"{evaluation[name]:.4f}"
    return f"{'validation ' if judged else ''}{name} {value}"
