"""Reading files of others. Every problem with a file becomes an error that names the file. This is done here,
in one place."""

from __future__ import annotations

import contextlib
import csv
import io
import lzma
import sqlite3
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, ParamSpec, TypeVar

from partwise.data.late_arrow import pa
from partwise.types import UserError

# What readers raise on damaged files, beside Arrow's errors: numpy (TokenError, SyntaxError), zipfile
# (NotImplementedError and RecursionError are RuntimeErrors), json and xml (ValueError, SyntaxError), h5py (OSError,
# RuntimeError, KeyError).
_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    csv.Error,
    sqlite3.Error,
    struct.error,
    tokenize.TokenError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
P = ParamSpec("P")
T = TypeVar("T")

FREE_BYTES = 1 << 26  # unpacked bytes that are always allowed; beyond them, MAX_RATIO is the limit
MAX_RATIO = 200  # unpacked / packed; files of the known data sets have 2 to 73, zeros have a thousand


def read_errors() -> tuple[type[BaseException], ...]:
    """What readers raise on damaged files."""
    return (pa.ArrowException, *_ERRORS)


@contextlib.contextmanager
def reading(place: object, remedy: str = "is it whole? Get or write it again") -> Iterator[None]:
    """Turn what a reader raises into a `UserError` that names the place. An error that names it already is
    not changed."""
    try:
        with naming(place):
            yield
    except UserError:
        raise
    except read_errors() as error:
        raise UserError(f"{_short(place)} cannot be read ({_reason(error)}): {remedy}") from error


@contextlib.contextmanager
def naming(place: object) -> Iterator[None]:
    """Add the place to a `UserError` that does not name it."""
    try:
        yield
    except UserError as error:
        if _short(place) in str(error):
            raise
        raise UserError(f"{_short(place)}: {error}") from error


def _reason(error: BaseException) -> str:
    said = (error.strerror if isinstance(error, OSError) else None) or str(error)
    plain = isinstance(error, OSError | pa.ArrowException | UnicodeError | zipfile.BadZipFile)
    return said[:300] if plain and said else f"{type(error).__name__} {said[:300]}".strip()


def guarded(place: object, read: Callable[P, Iterable[T]]) -> Callable[P, Iterator[T]]:
    """`read`, with every error during its iteration naming `place`."""

    def run(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        with reading(place):
            yield from read(*args, **kwargs)

    return run


def existing(path: str | Path, expected: str) -> Path:
    """Return the path. Raises `UserError` if it does not exist; `expected` is for the message."""
    path = Path(path)
    try:
        path.stat()
    except (OSError, ValueError) as error:
        why = (
            "does not exist"
            if isinstance(error, FileNotFoundError)
            else f"cannot be opened ({_reason(error)})"
        )
        raise UserError(f"{_short(path)} {why}: {expected}") from error
    return path


def regular(path: str | Path, expected: str) -> Path:
    """Return the path of a file. A folder raises `UserError`, and so does a pipe or a device, which may have
    no end."""
    path = existing(path, expected)
    if not path.is_file():
        raise UserError(f"{path} is {'a folder' if path.is_dir() else 'not a regular file'}: {expected}")
    return path


def is_there(path: Path) -> bool:
    """Whether there is a regular file with this name. An invalid name returns False."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _short(place: object) -> str:
    text = str(place)
    return text if len(text) <= 300 else f"{text[:100]}... ({len(text):,} letters)"


def check_growth(where: object, unpacked: int, packed: int) -> None:
    """Raise `UserError` for a file that unpacks to far more than any real one, because it would fill memory
    or disk."""
    if unpacked > FREE_BYTES and unpacked > MAX_RATIO * max(packed, 1):
        raise UserError(
            f"{where} unpacks to more than {MAX_RATIO} times its {packed:,} bytes ({unpacked:,} so far), which no "
            f"real data does: unpack it yourself if you trust it, and give the unpacked file"
        )


class Limited(io.RawIOBase):
    """A compressed stream during unpacking. It raises an error if its size grows beyond the limit."""

    def __init__(self, stream: IO[bytes], packed: int, where: object):
        self._stream, self._packed, self._where, self._read = stream, packed, where, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._read += len(data)
        check_growth(self._where, self._read, self._packed)
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def limited(stream: IO[bytes], packed: int, where: object) -> io.BufferedReader:
    """The stream, buffered, with a limit on its growth."""
    return io.BufferedReader(Limited(stream, packed, where), 1 << 20)
