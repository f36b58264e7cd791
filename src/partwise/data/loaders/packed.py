"""Files as they are distributed: plain, gzipped, or a member of a zip. The first bytes tell which."""

from __future__ import annotations

import contextlib
import gzip
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

from partwise.data.reading import check_growth, limited, reading, regular
from partwise.types import UserError

ZIPS = (b"PK\x03\x04", b"PK\x05\x06")  # with files, and without
Choose = Callable[[list[str]], str | None]


@contextlib.contextmanager
def open_packed(file: Path, choose: Choose, expected: str) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked as they are read. `choose` returns the name of a zip's member, or None if
    there is none. `expected` describes what it looks for."""
    regular(file, "give the file as it was downloaded")
    with reading(file, "is it whole? Download it again"), contextlib.ExitStack() as opened:
        yield opened.enter_context(_open(file, choose, expected, opened))


def _open(file: Path, choose: Choose, expected: str, opened: contextlib.ExitStack) -> IO[bytes]:
    with file.open("rb") as source:
        magic = source.read(4)
    size = file.stat().st_size
    if magic[:2] == b"\x1f\x8b":
        return limited(cast(IO[bytes], gzip.open(file, "rb")), size, file)
    if magic not in ZIPS and file.suffix.lower() != ".zip":
        return file.open("rb")
    archive = opened.enter_context(zipfile.ZipFile(file))
    member = choose(archive.namelist())
    if member is None:
        held = ", ".join(archive.namelist()[:12])
        raise UserError(
            f"{file} holds {held or 'nothing'}: give a zip with {expected} in it, or that file itself"
        )
    return open_member(archive, member, file, size)


def open_member(archive: zipfile.ZipFile, member: str, file: Path, size: int) -> IO[bytes]:
    """Open a member of a zip file; `size` is the size of the zip."""
    info = archive.getinfo(member)
    packed, where = min(info.compress_size, size), f"{file}/{member}"
    check_growth(where, info.file_size, packed)
    return limited(archive.open(member), packed, where)
