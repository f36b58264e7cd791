"""`partwise report`: runs as one file that can be read anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from partwise.checkpoint import write_file
from partwise.pages.details import read_detailed
from partwise.pages.page import make_page, make_view
from partwise.runs.run_view import RunView
from partwise.types import UserError


def report(runs: str | Path | Sequence[str | Path], out: str | Path = "report.html") -> Path:
    """Write a report on runs: one HTML file that needs no network.

    Args:
        runs: The folder of a run or of a sweep, or several. Runs that differ only in their seed are shown as one.
        out: The file.

    Returns:
        The file.

    Raises:
        UserError: A folder holds no run, or the file cannot be written. Damaged and unfinished runs are shown as
            such.
    """
    write_report(read_detailed([runs] if isinstance(runs, str | Path) else runs), out)
    return Path(out)


def write_report(runs: Sequence[RunView], out: str | Path) -> int:
    """Write the report of runs that were read. Returns how many bytes it has."""
    path, page = Path(out), make_page(make_view(runs)).encode()
    if path.is_dir():
        raise UserError(
            f"'{path}' is a folder: give a file for the report, as in --out {path / 'report.html'}"
        )
    write_file(path, page)
    return len(page)
