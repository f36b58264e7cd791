"""The server's HTTP interface, as an ASGI application: who asks is known, how much may be sent is limited.

    GET  /v1/run                      what the run is (`link.Offer`, JSON)
    POST /v1/join                     {"clients": [...]}
    POST /v1/poll                     {"ready": true, "most": 1} -> tasks, or how long to wait
    POST /v1/tasks/{task}/slices      keys by space (safetensors) -> slices (safetensors)
    POST /v1/reports                  a report (safetensors) -> {"client": ..., "valid": ...}
    GET  /healthz                     the round that is going on

What is refused has a status of 4xx and {"reason": ..., "what": ...}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from partwise.checkpoint import from_bytes
from partwise.deployment.auth import WINDOW, NotAllowedError, verify
from partwise.deployment.hub import Hub
from partwise.deployment.journal import Journal
from partwise.deployment.link import Offer, write_answer
from partwise.server.messages import LARGEST_HEADER, report_shapes
from partwise.server.round import Refused
from partwise.types import UserError

SAFETENSORS = "application/x-safetensors"
SMALL = 1 << 20  # bytes of a request that is JSON
TICK = 0.05  # seconds between looks whether a round is due
STATUS = {"malformed": 400, "keys": 400, "not finite": 400, "weight": 400, "task": 404}  # others: 409

Authenticate = Callable[[Request, bytes], str]  # (request, its body) -> the device; raises NotAllowedError


class TooLargeError(Exception):
    """A body of more bytes than there may be."""


def signed(journal: Journal) -> Authenticate:
    """Requests are signed by devices whose keys are in the journal."""

    def authenticate(request: Request, body: bytes) -> str:
        now = time.time()
        first_time = lambda device, nonce: journal.first_time(device, nonce, now, now - 2 * WINDOW)
        return verify((request.method, request.url.path, request.headers, body), journal.key, first_time, now)

    return authenticate


def application(hub: Hub, offer: Offer, authenticate: Authenticate | None = None) -> Starlette:
    """The application of one run; by default its devices sign their requests."""
    authenticate = authenticate or signed(hub.journal)
    largest = _largest_report(hub)
    partition = hub.coordinator.server.algorithm.partition
    asked_for = LARGEST_HEADER + 8 * sum(partition.all_keys.values())

    def endpoint(work: Callable[[str, bytes, Request], Response], most: int) -> Callable[[Request], Any]:
        """A request whose body is read up to a limit, whose device is known, and that works in a thread."""

        async def answer(request: Request) -> Response:
            try:
                body = await _body(request, most)
                device = await run_in_threadpool(authenticate, request, body)
                return await run_in_threadpool(work, device, body, request)
            except TooLargeError as error:
                return _refusal(413, "too large", str(error))
            except NotAllowedError as error:
                return _refusal(error.status, "not allowed", str(error))
            except UserError as error:
                return _refusal(400, "malformed", str(error))

        return answer

    def describe(device: str, body: bytes, request: Request) -> Response:
        return JSONResponse(offer._asdict())

    def join(device: str, body: bytes, request: Request) -> Response:
        clients = _read(body, "clients", list)
        if not all(isinstance(name, str) and 0 < len(name) <= 200 for name in clients):
            raise UserError("clients must be names of 1 to 200 characters")
        refused = hub.join(device, clients)
        return _refused(refused) if refused else JSONResponse({"clients": len(clients)})

    def poll(device: str, body: bytes, request: Request) -> Response:
        ready, most = _read(body, "ready", bool), _read(body, "most", int)
        return Response(write_answer(hub.poll(device, ready, max(1, most))), media_type="application/json")

    def slices(device: str, body: bytes, request: Request) -> Response:
        keys, _ = from_bytes(body)
        found = hub.slices(device, request.path_params["task"], _as_keys(keys))
        return _refused(found) if isinstance(found, Refused) else Response(found, media_type=SAFETENSORS)

    def report(device: str, body: bytes, request: Request) -> Response:
        found = hub.report(device, body)
        return _refused(found) if isinstance(found, Refused) else JSONResponse(found._asdict())

    def health(request: Request) -> Response:
        row = hub.round()
        return JSONResponse({"run": offer.run, "version": row.number, "phase": row.phase})

    @contextlib.asynccontextmanager
    async def closing(app: Starlette) -> AsyncIterator[None]:
        """Close rounds while the application runs."""
        work = asyncio.create_task(_keep_closing(hub))
        try:
            yield
        finally:
            work.cancel()

    routes = [
        Route("/v1/run", endpoint(describe, 0)),
        Route("/v1/join", endpoint(join, SMALL), methods=["POST"]),
        Route("/v1/poll", endpoint(poll, SMALL), methods=["POST"]),
        Route("/v1/tasks/{task}/slices", endpoint(slices, asked_for), methods=["POST"]),
        Route("/v1/reports", endpoint(report, largest), methods=["POST"]),
        Route("/healthz", health),
    ]
    return Starlette(routes=routes, lifespan=closing)


async def _keep_closing(hub: Hub) -> None:
    while True:
        published = await run_in_threadpool(hub.tick)
        await asyncio.sleep(0 if published else TICK)


async def _body(request: Request, most: int) -> bytes:
    """The request's body, if it is not larger than allowed; a larger one is not read to its end."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise TooLargeError(f"a body of more than {most:,} bytes")
        parts.append(part)
    return b"".join(parts)


def _read(body: bytes, name: str, kind: type) -> Any:
    """A value of a JSON body."""
    try:
        found = json.loads(body)[name]
    except (ValueError, LookupError, TypeError):
        raise UserError(f"the body must be JSON with '{name}'") from None
    if type(found) is not kind:
        raise UserError(f"'{name}' must be of type {kind.__name__}, not {type(found).__name__}")
    return found


def _as_keys(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        space: keys.astype(np.int64) if keys.dtype.kind in "iu" else keys for space, keys in arrays.items()
    }


def _largest_report(hub: Hub) -> int:
    """Bytes of a report about all keys."""
    algorithm = hub.coordinator.server.algorithm
    shapes = report_shapes(algorithm.aggregator, algorithm.partition, algorithm.partition.all_keys)
    return LARGEST_HEADER + sum(each.size * each.dtype.itemsize for each in shapes.values())


def _refused(found: Refused) -> Response:
    return _refusal(STATUS.get(found.reason, 409), found.reason, found.what)


def _refusal(status: int, reason: str, what: str) -> Response:
    return JSONResponse({"reason": reason, "what": what}, status_code=status)
