"""Bodies of requests and answers: bounded in size before they are read, and compressed with zstd where that pays.

All devices of a cohort may send large reports at once. A large body is on the disk while it comes, and in memory
when its turn has come (`Bodies`).

A body that is compressed says how large it is inside, and is refused before it is unpacked if that is too
large. What is signed are the bytes that travel.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import zstandard

from partwise.types import UserError

ZSTD = "zstd"
SMALL = 1 << 20  # bytes of a body that is never kept waiting
ROOM = 64 << 20  # bytes of large bodies that are in memory at a time
FRAME_HEADER = 18  # bytes at the begin of what is compressed, which say how large it is
WORTH = 1024  # bytes below which nothing is compressed
GAIN = 0.9  # compressed bodies are sent if they are at most so large
LEVEL = 3


class TooLargeError(Exception):
    """A body of more bytes than there may be."""


class Bodies:
    """Large bodies of requests, of which only some are in memory at a time, in the order in which they have come.

    Args:
        folder: Where they wait, in files without a name.
        most: Bytes in memory at a time; a larger body is there alone.
    """

    def __init__(self, folder: Path, most: int = ROOM):
        self._folder, self._most, self._used = folder, most, 0
        self._turn, self._left = asyncio.Lock(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def taken(self, parts: AsyncIterable[bytes], encoding: str, most: int) -> AsyncIterator[bytes]:
        """A body, if it is not larger than allowed. It is to be let go of within the block."""
        with tempfile.SpooledTemporaryFile(SMALL, dir=str(self._folder)) as file:
            size = await _copy(parts, file, most)
            size += _size_inside(file.read(FRAME_HEADER), most) if encoding == ZSTD else 0
            file.seek(0)
            if size <= SMALL:
                yield file.read()
                return
            async with self._room(size):
                yield file.read()

    @contextlib.asynccontextmanager
    async def _room(self, size: int) -> AsyncIterator[None]:
        async with self._turn:
            while self._used and self._used + size > self._most:
                self._left.clear()
                await self._left.wait()
            self._used += size
        try:
            yield
        finally:
            self._used -= size
            self._left.set()


async def _copy(parts: AsyncIterable[bytes], file: Any, most: int) -> int:
    """Write a body to a file, if it is not larger than allowed, and go to its begin. Returns its size."""
    size = 0
    async for part in parts:
        size += len(part)
        _check_size(size, most)
        file.write(part)
    file.seek(0)
    return size


def _size_inside(begin: bytes, most: int) -> int:
    """How large a compressed body may become when it is unpacked, by its first bytes."""
    try:
        size = zstandard.frame_content_size(begin)
    except zstandard.ZstdError:
        return 0  # it is refused
    return size if 0 <= size <= most else most


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise TooLargeError(f"a body of more than {most:,} bytes")


async def read_body(parts: AsyncIterable[bytes], most: int) -> bytes:
    """A body, if it is not larger than allowed; a larger one is not read to its end."""
    found, size = [], 0
    async for part in parts:
        size += len(part)
        _check_size(size, most)
        found.append(part)
    return b"".join(found)


def unpack(body: bytes, encoding: str, most: int) -> bytes:
    """The content of a body with this Content-Encoding, if it is not larger than allowed."""
    if not encoding or encoding == "identity":
        return body
    if encoding != ZSTD:
        raise UserError(f"bodies can be compressed with {ZSTD}, not with '{encoding[:40]}'")
    try:
        size = zstandard.frame_content_size(body)
        if size > most:
            raise TooLargeError(f"a body of {size:,} bytes when unpacked, where {most:,} are allowed")
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            content = reader.read(most + 1)
    except zstandard.ZstdError as error:
        raise UserError(f"the body is not {ZSTD}: {error}") from None
    if len(content) > most:
        raise TooLargeError(f"a body of more than {most:,} bytes when unpacked")
    return content


def pack(content: bytes, accepted: str = ZSTD) -> tuple[bytes, dict[str, str]]:
    """A body and its headers: compressed if the other side accepts that, and if it pays."""
    if len(content) < WORTH or ZSTD not in accepted:
        return content, {}
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(content)
    return (packed, {"content-encoding": ZSTD}) if len(packed) <= GAIN * len(content) else (content, {})


def read_json(body: bytes, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a JSON object. `wanted` has an example for each, of the right type; one that may be missing has
    the example as its value then."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise UserError(f"the body must be JSON with {', '.join(wanted)}") from None
    if not isinstance(found, dict):
        raise UserError(f"the body must be a JSON object with {', '.join(wanted)}")
    values = {name: found.get(name, example) for name, example in wanted.items()}
    for name, example in wanted.items():
        given = values[name]
        if type(given) is int and type(example) is float:
            values[name] = given = float(given)
        if type(given) is not type(example):
            kind = type(example).__name__
            raise UserError(f"'{name}' must be of type {kind}, not {type(given).__name__}")
    return values
