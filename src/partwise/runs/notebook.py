"""How far a run is, in a notebook: one line that is shown once and then changed in its place."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from partwise.runs.rounds import OnStatus, Status, silent
from partwise.runs.series import main_metric
from partwise.types import UserError, unknown

AUTO, NONE = "auto", "none"
TERMINAL = "TerminalInteractiveShell"


def make_progress(progress: OnStatus | str, began: float) -> Callable[[Any], None]:
    """What shows a `Status` or a sentence: the given function, or for "auto" a line in a notebook, and nothing
    elsewhere."""
    if not isinstance(progress, str):
        if not callable(progress):
            raise UserError(f"progress must be auto, none or a function of a Status, not {progress!r}")
        return lambda status: progress(status) if isinstance(status, Status) else None
    if progress not in (AUTO, NONE):
        raise unknown("value of progress", progress, (AUTO, NONE))
    return _in_notebook(began) if progress == AUTO and is_notebook() else silent


def is_notebook() -> bool:
    """Whether this code runs in a notebook, whose output can be changed later. IPython in a terminal is none."""
    package = sys.modules.get("IPython")
    shell = package.get_ipython() if package and hasattr(package, "get_ipython") else None
    return shell is not None and type(shell).__name__ != TERMINAL


def _in_notebook(began: float) -> Callable[[Any], None]:
    from IPython.display import display  # pyright: ignore[reportMissingImports]

    shown: dict[str, Any] = {"handle": None, "evaluation": ""}

    def show(status: Any) -> None:
        if isinstance(status, Status):
            shown["evaluation"] = _metrics(status.evaluation) or shown["evaluation"]
        content = _content(status, shown["evaluation"], time.perf_counter() - began)
        if shown["handle"] is None:
            shown["handle"] = display(content, raw=True, display_id=True)
        else:
            shown["handle"].update(content, raw=True)

    return show


def _content(status: Any, evaluation: str, seconds: float) -> dict[str, str]:
    """The line as text and as HTML with a bar."""
    if not isinstance(status, Status):
        return {"text/plain": f"{status} ({seconds:.0f} s)"}
    told = (f"round {status.round} of {status.rounds}", f"training loss {status.loss:.4f}", evaluation)
    text = f"{', '.join(filter(None, told))} ({seconds:.0f} s)"
    bar = f'<progress value="{status.round}" max="{status.rounds}"></progress>'
    return {"text/plain": text, "text/html": f"{bar} {html.escape(text)}"}


def _metrics(evaluation: Mapping[str, Any] | None) -> str:
    """The model's first metric on the validation clients; the loss if it has none."""
    if not evaluation:
        return ""
    name = main_metric(evaluation["over_clients"])
    return f"validation {name} {'undefined' if evaluation[name] is None else f'{evaluation[name]:.4f}'}"
