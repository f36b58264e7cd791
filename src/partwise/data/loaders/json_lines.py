"""Files with one JSON object per line: plain, gzipped, or the only such file of a zip."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partwise.data.loaders.packed import open_packed
from partwise.types import UserError

MEMBER = "one .json or .jsonl file"


def read_lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """Each line that is not blank, as (words that say where it is, line)."""
    with open_packed(file, only_member, MEMBER) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{file}, line {number}", line


def only_member(names: list[str]) -> str | None:
    """The only .json file of a zip."""
    found = [name for name in names if name.lower().endswith((".json", ".jsonl"))]
    return found[0] if len(found) == 1 else None


def read_object(line: str, where: str, expected: str) -> dict[str, Any]:
    """The object in a line. `where` and `expected` are for messages."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}): expected {expected}. Mend or remove it") from error
    if not isinstance(found, dict):
        raise UserError(f"{where} is {line.strip()[:40]!r}; expected {expected}. Mend or remove it")
    return found
