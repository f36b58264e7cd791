"""The server's HTTP interface, as an ASGI application: who asks is known, how much may be sent is limited.

    GET  /v1/run                      what the run is (`link.Offer`, JSON)
    POST /v1/join                     {"clients": [...]}
    POST /v1/poll                     {"ready": true, "most": 1, "hold": 20} -> tasks, or how long to wait
    POST /v1/tasks/{task}/slices      keys by space (safetensors) -> slices (safetensors)
    POST /v1/tasks/{task}/private     a question that says no keys (safetensors) -> slices (safetensors)
    POST /v1/tasks/{task}/decline     {"reason": "client"}: the device will not do it
    POST /v1/tasks/{task}/letters/{stage}   a letter, if sums are masked (bytes)
    GET  /v1/tasks/{task}/letters/{stage}   the answer to it (bytes), or 202 and how long to wait
    POST /v1/reports                  a report (safetensors) -> {"client": ..., "valid": ...}
    POST /v1/model/slices             keys by space -> slices of the newest version, to use it
    GET  /v1/files/{name}             a file of slices
    GET  /healthz                     the round that is going on

and what operators may ask (`deployment.operator_routes`). What is refused has a status of 4xx and
{"reason": ..., "what": ...}. docs/protocol.md has all of it for those who write a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from partwise.checkpoint import from_bytes
from partwise.deployment.auth import NotAllowedError, Signed, verify
from partwise.deployment.bodies import SMALL, Bodies, TooLargeError, pack, read_json, unpack
from partwise.deployment.book import RoundRow
from partwise.deployment.clerk import Answer
from partwise.deployment.helper_link import HelperDownError
from partwise.deployment.hub import Hub, OwnFaultError
from partwise.deployment.jobs import Wait
from partwise.deployment.journal import JournalDownError, SqlBook
from partwise.deployment.link import DECLINES, Offer, write_answer
from partwise.deployment.meters import Meters
from partwise.deployment.operator_routes import operator_routes
from partwise.deployment.rules import longest_hold
from partwise.deployment.waiting import Allowance, Waiting
from partwise.server.messages import LARGEST_HEADER
from partwise.server.private_slices import largest_question
from partwise.server.round import Refused
from partwise.types import UserError, counted

logger = logging.getLogger("partwise.server")
SAFETENSORS, JSON = "application/x-safetensors", "application/json"
BYTES = "application/octet-stream"
TICK = 0.2  # seconds between looks whether a round is due, if nothing happens
STATUS = {"malformed": 400, "keys": 400, "not finite": 400, "weight": 400, "task": 404}  # others: 409

FAULT = 60.0  # seconds after a mistake of the server in which it says that it is not ready

Answering = Callable[[Signed, bytes, Request], Awaitable[Response]]


def application(hub: Hub, offer: Offer, tls: bool = False, files: Path | None = None) -> Starlette:
    """The application of one run.

    Args:
        hub: This process's share of the run.
        offer: What devices are told of it. Its settings `deploy.requests` and `deploy.hold` are kept.
        tls: Whether requests must have come over TLS, to this process or to a proxy before it.
        files: The folder of the files of slices, if this server hands them out itself.
    """
    return _Application(hub, offer, tls, files).starlette()


class _Application:
    def __init__(self, hub: Hub, offer: Offer, tls: bool, files: Path | None):
        self.hub, self.tls, self.files = hub, tls, files
        self.offer, self.offered = offer, json.dumps(offer._asdict()).encode()
        self.requests = offer.settings["deploy.requests"]
        self.waiting, self.allowance, self.meters = Waiting(), Allowance(self.requests), Meters()
        self.between_stages, self.bodies = Waiting(), Bodies(hub.folder)
        self.faults: dict[str, float] = {}  # where the server made a mistake, and when
        self.rules, pair = hub.coordinator.rules, hub.pair
        # A run that was begun before longer ones were refused may have one.
        self.hold = min(offer.settings["deploy.hold"], longest_hold(self.rules.fresh))
        self.question = largest_question(pair.agreement) if pair else 0
        self.privately = offer.settings.get("serving.way") == "private"

    def starlette(self) -> Starlette:
        """The application with its routes."""
        server = self.hub.coordinator.server
        keys = LARGEST_HEADER + 8 * sum(server.algorithm.partition.all_keys.values())
        post = lambda path, work, most: Route(path, self.endpoint(path, work, most), methods=["POST"])
        get = lambda path, work: Route(path, self.endpoint(path, work, 0))
        routes = [
            get("/v1/run", self.describe),
            post("/v1/join", self.join, SMALL),
            post("/v1/poll", self.poll, SMALL),
            post("/v1/tasks/{task}/slices", self.slices, keys),
            post("/v1/tasks/{task}/private", self.private, self.question),
            post("/v1/tasks/{task}/decline", self.decline, SMALL),
            post("/v1/tasks/{task}/letters/{stage:int}", self.letter, SMALL),
            get("/v1/tasks/{task}/letters/{stage:int}", self.answer),
            post("/v1/reports", self.report, server.largest),
            post("/v1/model/slices", self.model, keys),
            Route("/v1/files/{name}", self.guarded("/v1/files", self.file)),
            Route("/healthz", self.health),
            *operator_routes(self.hub, self.meters, self.guarded, self.offer.settings, self.waiting),
        ]
        app = Starlette(routes=routes, lifespan=self.lifespan)
        app.state.wake = self.wake_all  # before the server stops
        return app

    def endpoint(self, path: str, work: Answering, most: int) -> Callable[[Request], Awaitable[Response]]:
        """A request of a device: its body is read up to a limit, and its device is known."""

        async def answer(request: Request) -> Response:
            encoding = request.headers.get("content-encoding", "")
            async with self.bodies.taken(request.stream(), encoding, most) as raw:
                asked = (request.method, request.url.path, request.headers, raw)
                signed = verify(asked, self.hub.keys.get, time.time())
                if not self.allowance.take(signed.device, time.monotonic()):
                    told = f"device {signed.device} makes more than {self.requests} requests a minute"
                    return refusal(429, "too many", told)
                response = await work(signed, unpack(raw, encoding, most), request)
            if response.status_code >= 400:
                logger.info("%s of %s: %s", path, signed.device, bytes(response.body).decode())
            return response

        return self.guarded(path, answer)

    def guarded(
        self, path: str, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint whose errors are answers, and that is measured."""

        async def guard(request: Request) -> Response:
            begin = time.perf_counter()
            try:
                if self.tls and request.url.scheme != "https":
                    raise NotAllowedError(403, "https", "this server is reached over https only")
                response = await answer(request)
            except Exception as error:
                response = _answer_to(error)
                if response.status_code in (401, 403):
                    logger.info("%s refused: %s", path, error)
            if response.status_code == 500:
                self.faults[path] = time.monotonic()
            elif response.status_code < 400:
                self.faults.pop(path, None)
            self.meters.answered(path, response.status_code, time.perf_counter() - begin)
            return response

        return guard

    # What devices ask

    async def describe(self, signed: Signed, body: bytes, request: Request) -> Response:
        return answer_with(request, self.offered, JSON)

    async def join(self, signed: Signed, body: bytes, request: Request) -> Response:
        clients = read_json(body, {"clients": []})["clients"]
        wrong = [name for name in clients if not _is_name(name)]
        if wrong or not clients:
            told = "clients must be names of 1 to 200 characters, at least one, without control characters"
            return refusal(400, "malformed", told, clients=wrong)
        found = await _decided(self.hub.join(signed.device, clients, signed.nonce))
        if isinstance(found, Refused):
            return _refused(found)
        if found:
            told = f"{counted(len(found), 'client')} on another device, such as '{found[0]}'"
            return refusal(409, "client", told, clients=found)
        return JSONResponse({"clients": len(clients)})

    async def poll(self, signed: Signed, body: bytes, request: Request) -> Response:
        said = read_json(body, {"ready": True, "most": 1, "hold": 0.0, "status": {}})
        ready, most = said["ready"] and self.rules.may_work(said["status"]), min(max(1, said["most"]), 1000)
        hold = min(said["hold"], self.hold)
        turn = self.waiting.begin(signed.device)
        try:
            found = await _decided(self.hub.poll(signed.device, ready, most, signed.nonce))
            if isinstance(found, Wait) and not found.ended and hold > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(turn, hold)
                    found = await _decided(self.hub.poll(signed.device, ready, most))
        finally:
            self.waiting.end(signed.device, turn)
        if isinstance(found, Refused):
            return _refused(found)
        return Response(write_answer(found), media_type=JSON)

    async def slices(self, signed: Signed, body: bytes, request: Request) -> Response:
        if self.privately:
            return refusal(409, "keys", "the slices of this run are fetched privately: say no keys")
        keys, task = _keys(body), request.path_params["task"]
        row = await _decided(self.hub.grant(signed.device, task, keys, signed.nonce))
        if isinstance(row, Refused):
            return _refused(row)
        message = await asyncio.to_thread(self.hub.message, row, keys)
        self.meters.sent(len(message))
        return answer_with(request, message, SAFETENSORS)

    async def private(self, signed: Signed, body: bytes, request: Request) -> Response:
        if not self.privately:
            return refusal(404, "private", "the slices of this run are not fetched privately")
        row = await asyncio.wrap_future(
            self.hub.renew(signed.device, request.path_params["task"], signed.nonce)
        )
        if isinstance(row, Refused):
            return _refused(row)
        message = await asyncio.to_thread(self.hub.private_message, row, body)
        self.meters.sent(len(message))
        return answer_with(request, message, SAFETENSORS)

    async def letter(self, signed: Signed, body: bytes, request: Request) -> Response:
        task, stage = request.path_params["task"], request.path_params["stage"]
        refused = await asyncio.wrap_future(self.hub.letter(signed.device, task, stage, body, signed.nonce))
        self.waiting.news.set()
        return _refused(refused) if refused else JSONResponse({"task": task})

    async def answer(self, signed: Signed, body: bytes, request: Request) -> Response:
        asked = (signed.device, request.path_params["task"], request.path_params["stage"])
        turn = self.between_stages.begin(signed.device)
        try:
            found = await asyncio.wrap_future(self.hub.answer(*asked, signed.nonce))
            if isinstance(found, Wait) and self.hold > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(turn, self.hold)
                    found = await asyncio.wrap_future(self.hub.answer(*asked))
        finally:
            self.between_stages.end(signed.device, turn)
        if isinstance(found, Wait):
            return JSONResponse({"wait": found.seconds}, status_code=202)
        return _refused(found) if isinstance(found, Refused) else answer_with(request, found, BYTES)

    async def report(self, signed: Signed, body: bytes, request: Request) -> Response:
        found = await _decided(self.hub.report(signed.device, body, signed.nonce))
        self.waiting.news.set()
        if isinstance(found, Refused):
            self.meters.refused(found.reason)
            return _refused(found)
        self.meters.accepted(len(body))
        return JSONResponse(found._asdict())

    async def decline(self, signed: Signed, body: bytes, request: Request) -> Response:
        reason, task = read_json(body, {"reason": ""})["reason"], request.path_params["task"]
        if reason not in DECLINES:
            raise UserError(f"reason must be one of {', '.join(DECLINES)}, not '{reason[:40]}'")
        refused = await _decided(self.hub.decline(signed.device, task, signed.nonce))
        if refused:
            return _refused(refused)
        logger.info("device %s declines task %s (%s)", signed.device, task, reason)
        self.waiting.news.set()
        return JSONResponse({"task": task})

    async def model(self, signed: Signed, body: bytes, request: Request) -> Response:
        found = await asyncio.to_thread(self.hub.newest, _keys(body))
        return _refused(found) if isinstance(found, Refused) else answer_with(request, found, SAFETENSORS)

    async def file(self, request: Request) -> Response:
        """A file of slices. Who has its name, which only devices are told, may have it, as from nginx or a CDN."""
        name = request.path_params["name"]
        path = self.files / name if self.files and name.replace(".", "").isalnum() else None
        if path is None or not path.is_file():
            return refusal(404, "file", f"there is no file '{name[:80]}' here")
        return FileResponse(path, media_type=BYTES)

    async def health(self, request: Request) -> Response:
        try:
            row = await asyncio.wrap_future(self.hub.clerk.submit(lambda book: book.round()))
        except JournalDownError as error:
            return _answer_to(error)
        broken = sorted(path for path, when in self.faults.items() if time.monotonic() - when < FAULT)
        if broken:
            return refusal(
                503, "error", f"the server made a mistake, which is in its log: {', '.join(broken)}"
            )
        return JSONResponse({"run": self.offer.run, "version": row.number, "phase": row.phase})

    # Rounds

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Close rounds while the application runs."""
        work = asyncio.create_task(self.keep_closing())
        try:
            yield
        finally:
            self.wake_all()
            work.cancel()

    async def keep_closing(self) -> None:
        """Look whether something is due, again and again, whatever happens."""
        seen: Any = None
        while True:
            try:
                seen = await self.look(seen)
            except (JournalDownError, HelperDownError) as error:
                logger.warning("%s (trying again)", error)
                await asyncio.sleep(1)
            except Exception:
                logger.exception("a round could not be looked after; trying again")
                self.faults["rounds"] = time.monotonic()
                await asyncio.sleep(1)
            else:
                self.faults.pop("rounds", None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.waiting.news.wait(), TICK)
            self.waiting.news.clear()

    async def look(self, seen: Any) -> Any:
        """Do what is due, and wake the devices for which there is something new since `seen`."""
        while await asyncio.to_thread(self.hub.tick):
            pass
        row, devices = await asyncio.wrap_future(
            self.hub.clerk.submit(lambda book: self.situation(book, seen))
        )
        self.meters.round(row.number, row.phase, len(self.waiting))
        if _moment(row) != seen:
            self.waiting.wake(None if row.phase == "ended" else devices)
            self.between_stages.wake()
        return _moment(row)

    def wake_all(self) -> None:
        """Answer all that wait."""
        self.waiting.wake()
        self.between_stages.wake()

    def situation(self, book: SqlBook, seen: Any) -> tuple[RoundRow, set[str]]:
        """The round, and if it is at another moment than `seen` the devices that have something to do."""
        self.hub.keys.look(book)
        row = book.round()
        return row, book.devices_with_tasks() if _moment(row) != seen else set()


def _moment(row: RoundRow) -> tuple[int, int, str, int]:
    """Where a round is."""
    return row.number, row.attempt, row.phase, row.stage


def answer_with(request: Request, content: bytes, kind: str) -> Response:
    """An answer, compressed if that is accepted and pays."""
    packed, headers = pack(content, request.headers.get("accept-encoding", ""))
    return Response(packed, media_type=kind, headers=headers)


async def _decided(future: Future[Answer]) -> Answer:
    """A decision of the hub. What it was given was read before, so errors in what it reads are the server's own."""
    try:
        return await asyncio.wrap_future(future)
    except UserError as error:
        raise OwnFaultError(str(error)) from error


def refusal(status: int, reason: str, what: str, **more: Any) -> Response:
    """Why a request is refused."""
    headers = {"retry-after": "1"} if status in (429, 503) else None
    # In ASCII, whatever it is that a device sent and is told of.
    body = json.dumps({"reason": reason, "what": what, **more})
    return Response(body, status_code=status, headers=headers, media_type=JSON)


def _answer_to(error: Exception) -> Response:
    if isinstance(error, TooLargeError):
        return refusal(413, "too large", str(error))
    if isinstance(error, NotAllowedError):
        return refusal(error.status, error.reason, str(error))
    if isinstance(error, UserError):
        return refusal(400, "malformed", str(error))
    if isinstance(error, HelperDownError):
        logger.warning("%s", error)
        return refusal(503, "helper", "the second server does not answer now: try again")
    if isinstance(error, JournalDownError):
        logger.warning("%s", error)
        return refusal(503, "journal", "the server's journal does not answer now: try again")
    logger.error("a request failed", exc_info=error)
    return refusal(500, "error", "the server made a mistake, which is in its log")


def _refused(found: Refused) -> Response:
    return refusal(STATUS.get(found.reason, 409), found.reason, found.what)


def _keys(body: bytes) -> Mapping[str, np.ndarray]:
    """Keys by space."""
    arrays, _ = from_bytes(body)
    return {
        space: each.astype(np.int64) if each.dtype.kind in "iu" else each for space, each in arrays.items()
    }


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable()
