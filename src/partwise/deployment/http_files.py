"""Immutable files over HTTP, for a device: many at a time, bounded in size, checked by their names, tried again.

Any server of static files will do. Nothing that it says is believed: the size of a file is bounded before it is
read, its digest is in its name, and an answer to a Range must be that range.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import TypeVar

import urllib3

from partwise.deployment.files import check_name, fits
from partwise.deployment.link import UnreachableError
from partwise.deployment.page_reader import GoneError as GoneError
from partwise.deployment.ranges import Piece
from partwise.types import UserError

BUSY = {408, 425, 429, 500, 502, 503, 504}  # statuses that may be gone the next time
TRIES = 3  # for a file that does not fit its name
LONGEST_WAIT = 10.0  # seconds between two tries
LONGEST_SILENCE = 20.0  # seconds without a byte, before a request is given up

Given = TypeVar("Given")
Found = TypeVar("Found")


class _Again(Exception):  # noqa: N818
    """This try failed; another may not."""


class HttpFiles:
    """Files under a URL.

    Args:
        url: What comes before `/NAME`.
        patience: Seconds, for each call: how long a server that does not answer is tried.
        connections: How many requests may be under way.
        authority: A file with the certificate that signed the server's; by default those that the system trusts.
        headers: Sent with every request (an access token of a CDN, say).
    """

    def __init__(
        self,
        url: str,
        patience: float = 60.0,
        connections: int = 6,
        authority: str | Path | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        self.url, self.patience, self.connections = url.rstrip("/"), patience, connections
        self.received = 0  # bytes of the files and pieces that it returned
        self._headers = {**(headers or {}), "Accept-Encoding": "identity"}
        trusted = str(authority) if authority else None
        self._pool = urllib3.PoolManager(maxsize=connections, retries=False, ca_certs=trusted)
        self._workers = ThreadPoolExecutor(connections, "partwise-files")

    def get_many(self, bounds: Mapping[str, int]) -> dict[str, bytes]:
        """Files by name, each of at most so many bytes. Raises `GoneError` for one that is not there, `UserError`
        for one that is wrong, and `UnreachableError` if the server does not answer for too long."""
        until = time.monotonic() + self.patience
        names = [check_name(name) for name in bounds]
        found = self._all(lambda name: self._file(name, bounds[name], until), names)
        self.received += sum(map(len, found))
        return dict(zip(names, found, strict=True))

    def get_ranges(self, name: str, pieces: Iterable[Piece]) -> tuple[list[bytes], int]:
        """These pieces of a file, each by a request of its own, and the file's size. They cannot be checked by the
        digest, which is of the whole file. A piece may be cut at the file's end."""
        until, name = time.monotonic() + self.patience, check_name(name)
        ask = lambda piece: self._retried(lambda: self._range(name, piece, until), name, until)
        found = self._all(ask, list(pieces))
        sizes = {size for _, size in found}
        if len(sizes) > 1:
            raise UserError(
                f"'{self.url}/{name}' is said to have {sorted(sizes)} bytes: it cannot have all these"
            )
        self.received += sum(len(data) for data, _ in found)
        return [data for data, _ in found], sizes.pop() if sizes else 0

    def close(self) -> None:
        """Close all connections."""
        self._workers.shutdown(cancel_futures=True)
        self._pool.clear()

    def _all(self, work: Callable[[Given], Found], given: list[Given]) -> list[Found]:
        """The results for all, from as many threads as there are connections. The first error ends all."""
        if len(given) <= 1:
            return [work(each) for each in given]
        results: dict[int, Found] = {}
        waiting = deque(enumerate(given))

        def drain() -> None:
            while True:
                try:
                    place, each = waiting.popleft()
                except IndexError:
                    return
                results[place] = work(each)

        threads = [self._workers.submit(drain) for _ in range(min(self.connections, len(given)))]
        try:
            for thread in as_completed(threads):
                thread.result()
        finally:
            waiting.clear()
        return [results[place] for place in range(len(given))]

    def _file(self, name: str, bound: int, until: float) -> bytes:
        """One file that fits its name. A wrong one is asked for again, past the caches on the way."""
        for more in ({}, *[{"Cache-Control": "no-cache"}] * (TRIES - 1)):
            _, data = self._retried(partial(self._answer, name, 200, bound, more, until), name, until)
            if fits(name, data):
                return data
        raise UserError(
            f"'{self.url}/{name}' came {TRIES} times with other bytes than its name says: it is damaged or foreign"
        )

    def _range(self, name: str, piece: Piece, until: float) -> tuple[bytes, int]:
        span = f"{piece.begin}-{piece.end - 1}"
        told, data = self._answer(name, 206, piece.end - piece.begin, {"Range": f"bytes={span}"}, until)
        said = told.get("Content-Range", "")
        where, _, size = said.removeprefix("bytes ").partition("/")
        if not size.isdecimal() or where != f"{piece.begin}-{min(piece.end, int(size)) - 1}":
            raise UserError(f"'{self.url}/{name}': bytes {span} were asked for, and the answer says {said!r}")
        if len(data) != min(piece.end, int(size)) - piece.begin:
            raise _Again("the answer ended early")
        return data, int(size)

    def _retried(self, work: Callable[[], Found], name: str, until: float) -> Found:
        """Try until it works, later and later, for as long as the patience lasts."""
        tries = 0
        while True:
            try:
                return work()
            except (_Again, urllib3.exceptions.HTTPError) as error:
                wait = min(LONGEST_WAIT, 0.1 * 2**tries) * random.uniform(0.5, 1.0)
                if time.monotonic() + wait > until:
                    raise UnreachableError(f"'{self.url}/{name}' could not be had: {error}") from None
                tries += 1
                time.sleep(wait)

    def _answer(
        self, name: str, status: int, bound: int, more: Mapping[str, str], until: float
    ) -> tuple[Mapping[str, str], bytes]:
        """Headers and body of one answer, which must have this status."""
        left = max(until - time.monotonic(), 0.1)
        answer = self._pool.request(
            "GET",
            f"{self.url}/{name}",
            headers={**self._headers, **more},
            timeout=min(left, LONGEST_SILENCE),
            preload_content=False,
            decode_content=False,
            redirect=False,
        )
        try:
            self._check(name, answer, status, bound)
            data = _body(answer, bound, until)
        except BaseException:
            answer.close()  # its rest is not read, so the connection is of no more use
            raise
        answer.release_conn()
        if len(data) > bound:
            raise self._too_large(name, f"more than {bound:,}", bound)
        return answer.headers, data

    def _check(self, name: str, answer: urllib3.BaseHTTPResponse, status: int, bound: int) -> None:
        """Look at an answer before its body is read."""
        where = f"'{self.url}/{name}'"
        if answer.status in BUSY:
            raise _Again(f"status {answer.status}")
        if answer.status in (404, 410):
            raise GoneError(
                f"{where} is not there: its manifest is stale. Ask the server for the present version"
            )
        if answer.status != status:
            hint = " (it ignores Range: take the whole file)" if (status, answer.status) == (206, 200) else ""
            raise UserError(f"{where}: the answer must have status {status}, and has {answer.status}{hint}")
        if (encoding := answer.headers.get("Content-Encoding", "identity")) != "identity":
            raise UserError(f"{where} came as {encoding}: turn compression off where these files are served")
        size = answer.headers.get("Content-Length", "0")
        if size.isdecimal() and int(size) > bound:
            raise self._too_large(name, f"{int(size):,}", bound)

    def _too_large(self, name: str, size: str, bound: int) -> UserError:
        return UserError(f"'{self.url}/{name}' has {size} bytes, and may have {bound:,} at most")


def _body(answer: urllib3.BaseHTTPResponse, bound: int, until: float) -> bytes:
    """The body, or its first `bound` bytes and one more. A server that sends too slowly is given up."""
    parts, size = [], 0
    while size <= bound and answer.length_remaining != 0 and (part := answer.read1(bound + 1 - size)):
        parts.append(part)
        size += len(part)
        if time.monotonic() > until:
            raise _Again("it comes too slowly")
    return b"".join(parts)
