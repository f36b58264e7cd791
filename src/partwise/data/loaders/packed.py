"""Files as they are distributed: plain, gzipped, or a member of a zip; told apart by their first bytes."""

from __future__ import annotations

import contextlib
import gzip
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

from partwise.types import UserError


@contextlib.contextmanager
def open_packed(file: Path, choose: Callable[[list[str]], str | None]) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked as they are read. `choose` names a zip's member, or None if it has none."""
    try:
        with contextlib.ExitStack() as opened:
            yield opened.enter_context(_open(file, choose, opened))
    except (zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{file} is not a whole packed file ({error}): download it again") from error


def _open(file: Path, choose: Callable[[list[str]], str | None], opened: contextlib.ExitStack) -> IO[bytes]:
    with file.open("rb") as source:
        magic = source.read(4)
    if magic[:2] == b"\x1f\x8b":
        return cast(IO[bytes], gzip.open(file, "rb"))
    if magic != b"PK\x03\x04":
        return file.open("rb")
    archive = opened.enter_context(zipfile.ZipFile(file))
    member = choose(archive.namelist())
    if member is None:
        held = ", ".join(archive.namelist()[:12])
        raise UserError(f"{file} holds none of the files that are read from it, but {held or 'nothing'}")
    return archive.open(member)
