"""Bodies of requests and answers: bounded in size before they are read, and compressed with zstd where that pays.

A body that is compressed says how large it is inside, and is refused before it is unpacked if that is too
large. What is signed are the bytes that travel.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Mapping
from typing import Any

import zstandard

from partwise.types import UserError

ZSTD = "zstd"
WORTH = 1024  # bytes below which nothing is compressed
GAIN = 0.9  # compressed bodies are sent if they are at most so large
LEVEL = 3


class TooLargeError(Exception):
    """A body of more bytes than there may be."""


async def read_body(parts: AsyncIterable[bytes], most: int) -> bytes:
    """A body, if it is not larger than allowed; a larger one is not read to its end."""
    found, size = [], 0
    async for part in parts:
        size += len(part)
        if size > most:
            raise TooLargeError(f"a body of more than {most:,} bytes")
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
