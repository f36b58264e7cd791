"""Where a data set is: the path that was given, or a folder under PARTWISE_DATA."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from partwise.data.object_store import is_address
from partwise.data.reading import existing, is_there, reading, regular
from partwise.types import UserError


def data_root(path: str | Path | None, what: str, how: str, expected: str) -> Path:
    """The file or folder that was given, or PARTWISE_DATA. `how` (how to get the data) and `expected` are for
    messages."""
    given = path if path is not None else os.environ.get("PARTWISE_DATA")
    if not given:
        raise UserError(
            f"no path to {what} was given: {how}, or set PARTWISE_DATA to the folder that holds it"
        )
    if is_address(given):
        raise UserError(
            f"{what} is read on this machine only: copy '{given}' here. Only Parquet files and client stores "
            f"are read from object stores, for tasks on tables (ratings, events), read_table and open_store"
        )
    return existing(Path(given).expanduser(), expected)


def first_of(root: Path, names: Sequence[str], what: str, remedy: str = "") -> Path:
    """The root itself if it is a file, otherwise the first of these names that exists in it."""
    if not root.is_dir():
        return regular(root, f"give {what}, or a folder that holds it")
    for name in names:
        if is_there(root / name):
            return root / name
    raise UserError(f"{root} holds no {what}: looked for {', '.join(names)}, found {held_by(root)}{remedy}")


def held_by(folder: Path) -> str:
    """The names of what is in a folder, for messages."""
    with reading(folder):
        return ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
