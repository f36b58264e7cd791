"""An object store of this machine that answers late, for benchmarks: the files of a folder, over HTTP, by range.

It knows the two requests with which S3 is read (HEAD and GET), and asks for no keys.
"""

from __future__ import annotations

import asyncio
import email.utils
import multiprocessing
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

BUCKET = "bench"


class Answered(NamedTuple):
    """What a server has answered so far."""

    requests: int
    num_bytes: int


class SlowStore:
    """The server of a folder, as seen from the process that started it."""

    def __init__(self, port: int, counts: Any):
        self._port, self._counts = port, counts

    @property
    def url(self) -> str:
        """The address of the folder."""
        return f"s3://{BUCKET}/store?region=us-east-1&scheme=http&endpoint_override=127.0.0.1:{self._port}"

    def served(self) -> Answered:
        """What it has answered so far."""
        return Answered(*self._counts)


@contextmanager
def serve_slowly(folder: Path, seconds: float) -> Iterator[SlowStore]:
    """A server in a process of its own. Every answer begins so many seconds after its request."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.setdefault(name, "nobody")
    spawn = multiprocessing.get_context("spawn")
    counts, port = spawn.Array("q", 2), spawn.Queue()
    process = spawn.Process(target=_serve, args=(folder, seconds, counts, port), daemon=True)
    process.start()
    try:
        yield SlowStore(port.get(timeout=60), counts)
    finally:
        process.kill()
        process.join()


def _serve(folder: Path, seconds: float, counts: Any, port: Any) -> None:
    async def forever() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = (await reader.readuntil(b"\r\n\r\n")).decode()
                await asyncio.sleep(seconds)
                await _answer(folder, request, writer, counts)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    asyncio.run(forever())


async def _answer(folder: Path, request: str, writer: asyncio.StreamWriter, counts: Any) -> None:
    method, path, _ = request.split(" ", 2)
    file = folder / path.split("?")[0].rpartition("/")[2]
    if not file.is_file():
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        return await writer.drain()
    about, found = file.stat(), re.search(r"(?i)\r\nrange: bytes=(\d+)-(\d+)", request)
    first, last = (int(found[1]), int(found[2])) if found else (0, about.st_size - 1)
    head = [
        f"HTTP/1.1 {'206 Partial Content' if found else '200 OK'}",
        f"Content-Length: {last - first + 1}",
        f"Last-Modified: {email.utils.formatdate(about.st_mtime, usegmt=True)}",
        f'ETag: "{about.st_mtime_ns}"',
        *([f"Content-Range: bytes {first}-{last}/{about.st_size}"] if found else []),
    ]
    counts[0] += 1  # before it is sent, so that whoever has the answer finds it counted
    counts[1] += last - first + 1 if method == "GET" else 0
    writer.write("\r\n".join([*head, "", ""]).encode())
    if method == "GET":
        await writer.drain()
        with file.open("rb") as source:
            loop = asyncio.get_running_loop()
            await loop.sendfile(writer.transport, source, first, last - first + 1)
    return await writer.drain()
