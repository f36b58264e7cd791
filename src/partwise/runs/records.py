"""metrics.jsonl: one line for every round, each with a checksum. The rounds are 1, 2, 3, ... without a gap.

Lines are appended as rounds are run. A checksum is over the line and the run's digest, so that lines of
another run are recognised. Checksum and number show what a kill or a bad disk has damaged. Rounds are read up
to the first damaged line, and never past it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from partwise.runs.document import to_plain
from partwise.types import UserError

if TYPE_CHECKING:  # so that records are read without JAX
    from partwise.server.record import Record

CHECK = b', "crc32": '


def as_record(record: Record) -> dict[str, Any]:
    """A round as a line of metrics.jsonl, without an evaluation yet."""
    line = record._asdict()
    loss = line.pop("loss")
    if not record.serving:
        del line["serving"]
    return line | {
        "train": {"loss": loss},
        "broken": list(record.broken),
        "outliers": list(record.outliers),
        "evaluation": None,
    }


def append_records(path: Path, records: Iterable[Mapping[str, Any]], run: str = "") -> None:
    """Add rounds at the end; `flush_records` makes sure that they are on the disk."""
    with _writing(path, "ab") as file:
        file.write(b"".join(to_line(record, run) for record in records))


def flush_records(path: Path) -> None:
    """Return when all lines are on the disk."""
    with _writing(path, "ab") as file:
        os.fsync(file.fileno())


@contextmanager
def _writing(path: Path, mode: str) -> Iterator[Any]:
    try:
        with open(path, mode) as file:
            yield file
    except OSError as error:
        raise UserError(
            f"could not write '{path}': {error.strerror}. Checkpoints are untouched; make room, then go on with "
            f"--resume (resume=True)."
        ) from None


def to_line(record: Mapping[str, Any], run: str = "") -> bytes:
    """A round as a line with its checksum."""
    text = json.dumps(to_plain(record)).encode()
    return text[:-1] + CHECK + b"%d}\n" % _checksum(text, run)


def from_line(line: bytes, run: str = "") -> dict[str, Any]:
    """The inverse of `to_line`. Raises ValueError with the problem if the line is damaged."""
    start, sign, check = line.rpartition(CHECK)
    text = start + b"}"
    if not sign or check != b"%d}\n" % _checksum(text, run):
        raise ValueError("it does not fit its checksum: it was changed, or is of another run")
    return json.loads(text)


def _checksum(text: bytes, run: str) -> int:
    return zlib.crc32(text, zlib.crc32(run.encode()))


class Sound(NamedTuple):
    """How many rounds of a file are whole, counted from the first."""

    rounds: int
    problem: str  # what is wrong with the next line; empty if nothing is


def iterate_records(path: Path, run: str = "") -> Iterator[dict[str, Any]]:
    """The rounds from the first on. Raises ValueError at a round that is damaged or missing."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            yield to_record(line, number, run)


def to_record(line: bytes, number: int, run: str = "") -> dict[str, Any]:
    """The round with this number. Raises ValueError with the problem if the line is damaged, or of another
    round."""
    record = from_line(line, run)
    if record.get("round") != number:
        raise ValueError(f"it is of round {record.get('round')}, not {number}")
    return record


def how_far(path: Path, run: str = "") -> Sound:
    """Check all lines, one after the other."""
    rounds = 0
    try:
        for _ in iterate_records(path, run):
            rounds += 1
    except FileNotFoundError:
        return Sound(0, "")
    except OSError as error:
        raise cannot_read(path, error) from None
    except ValueError as error:
        return Sound(rounds, str(error))
    return Sound(rounds, "")


def read_records(path: Path, run: str = "") -> list[dict[str, Any]]:
    """All rounds. A last line that was cut short by a kill is left out. Earlier damage raises `UserError`."""
    records: list[dict[str, Any]] = []
    if error := give_records(path, run, records.append):
        raise error
    return records


def give_records(path: Path, run: str, take: Callable[[dict[str, Any]], None]) -> UserError | None:
    """Give every round to `take`, up to the first that is damaged. Returns the error that names it; None if there
    is none. A last line that was cut short, or is still being written, is left out."""
    number = 1
    try:
        for record in iterate_records(path, run):
            take(record)
            number += 1
    except FileNotFoundError:
        return None
    except OSError as error:
        return cannot_read(path, error)
    except ValueError as error:
        return None if _is_cut_short(path, number) else damaged_line(path, number, str(error))
    return None


def cannot_read(path: Path, error: OSError) -> UserError:
    """Return the error for a file that the system does not give."""
    return UserError(f"could not read '{path}': {error.strerror or error}")


def _is_cut_short(path: Path, number: int) -> bool:
    """Whether this line is the last one, and has no end."""
    with open(path, "rb") as file:
        lines = file.readlines()
    return len(lines) == number and not lines[-1].endswith(b"\n")


def damaged_line(path: Path, number: int, problem: str) -> UserError:
    """Return the error for a file that cannot be read past this line."""
    return UserError(
        f"'{path}' is damaged: line {number} should be of round {number}, and {problem or 'is missing'}. Put a "
        f"whole copy of it back, or train again in another folder"
    )


def keep_first(path: Path, rounds: int) -> None:
    """Drop the lines after this round. Their rounds will be run again."""
    if not path.exists():
        return
    with _writing(path, "r+b") as file:
        for _ in range(rounds):
            file.readline()
        file.truncate(file.tell())
        os.fsync(file.fileno())
