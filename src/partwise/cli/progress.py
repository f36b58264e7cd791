"""How far a run is, while it runs: a bar on a terminal, otherwise a line at every evaluation.

The seconds are the same as in the summary at the end: they are counted from the start of the command.
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
from partwise.runs.series import main_metric

Show = Callable[[Any], None]
NARROW = 100  # columns; on a narrower terminal, training loss and remaining time are not shown
OLD = 600  # seconds; no command takes this long to start, so a larger value means that the clock is wrong


def process_start() -> float:
    """The `time.perf_counter()` at which this process began, if the system tells it (Linux); otherwise now."""
    now = time.perf_counter()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return now
    return now - age if 0 <= age < OLD else now


@contextmanager
def show_progress(options: argparse.Namespace, title: str) -> Iterator[Show]:
    """A function that shows a `Status`, or words about what happens. With --json or --quiet it shows nothing."""
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
    """Show the rounds done, the total, and the current metrics. While programs are compiled, the seconds
    still count."""
    job = bar.add_task(title, total=None, rounds="", metric="compiling")
    bar.tasks[0].start_time = began
    last = {"evaluation": ""}

    def show(status: Any) -> None:
        if isinstance(status, str):
            bar.update(job, metric=status)
            if status.endswith("."):  # a sentence, which should stay visible
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
    """Show a line at every evaluation. For several trainings without evaluations, show a line at the end of
    each."""

    def show(status: Any) -> None:
        if isinstance(status, str):
            if status != "loading":  # most errors are found then, and only the error should be shown
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
    """Print what happens, on a separate line (above the bar, if there is one)."""
    say(f"{title}: {note}", err)


def _metric(evaluation: Any) -> str:
    """The first metric of the model on the validation clients (the loss if there is none). For results that
    are not evaluations, the first number."""
    if not evaluation:
        return ""
    judged = evaluation.get("over_clients")
    name = main_metric(judged or evaluation)
    value = "undefined" if evaluation[name] is None else f"{evaluation[name]:.4f}"
    return f"{'validation ' if judged else ''}{name} {value}"
