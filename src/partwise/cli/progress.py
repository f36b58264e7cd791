"""Where a run is, while it runs: a bar on a terminal, a line at every evaluation elsewhere."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from partwise.cli.show import err

Show = Callable[[Any], None]
NARROW = 80  # columns; below, neither the loss nor the time left is shown


@contextmanager
def show_progress(options: argparse.Namespace, title: str) -> Iterator[Show]:
    """A function that shows a `Status`; nothing with --json or --quiet."""
    if options.json or options.quiet:
        yield lambda status: None
    elif err.is_terminal:
        with _bar() as bar:
            yield _on_bar(bar, title)
    else:
        yield _as_lines(title)


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[rounds]}"),
        TimeElapsedColumn(),
        *([TimeRemainingColumn()] if err.width >= NARROW else []),
        TextColumn("{task.fields[metric]}"),
        console=err,
    )


def _on_bar(bar: Progress, title: str) -> Show:
    """Rounds done of all and the running metrics; while programs are compiled, the seconds go on."""
    job = bar.add_task(title, total=None, rounds="", metric="compiling")
    last = {"evaluation": ""}

    def show(status: Any) -> None:
        if status.note:
            _say(title, status.note)
            return
        last["evaluation"] = _metric(status.evaluation) or last["evaluation"]
        wide = err.width >= NARROW or not last["evaluation"]
        told = [f"loss {status.loss:.4f}"] * wide + [last["evaluation"]]
        bar.update(
            job,
            description=" ".join(filter(None, (title, status.part))) if wide else status.part or title,
            completed=status.round,
            total=status.rounds,
            rounds=f"{status.round}/{status.rounds}",
            metric=" ".join(filter(None, told)),
        )

    return show


def _as_lines(title: str) -> Show:
    """A line at every evaluation, and where there is none at the end of every training of several."""
    began = time.perf_counter()

    def show(status: Any) -> None:
        if status.note:
            _say(title, status.note)
            return
        if status.evaluation is None and not (status.part and status.round == status.rounds):
            return
        told = (
            f"round {status.round} of {status.rounds}",
            f"loss {status.loss:.4f}",
            _metric(status.evaluation),
        )
        name = ", ".join(filter(None, (title, status.part)))
        text = f"{name}: {', '.join(filter(None, told))} ({time.perf_counter() - began:.0f} s)"
        err.print(text, highlight=False, markup=False, soft_wrap=True)

    return show


def _say(title: str, note: str) -> None:
    """What goes on, in a line of its own (above the bar, if there is one)."""
    err.print(f"{title}: {note}", highlight=False, markup=False, soft_wrap=True)


def _metric(evaluation: Any) -> str:
    """The first metric that is not the loss."""
    if not evaluation:
        return ""
    name = next((name for name in evaluation if name != "loss"), "loss")
    return f"{name} undefined" if evaluation[name] is None else f"{name} {evaluation[name]:.4f}"
