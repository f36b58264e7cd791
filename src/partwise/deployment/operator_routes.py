"""What operators may ask of a server, with their token. No key of a device reaches these.

GET  /metrics                     for Prometheus
GET  /v1/operator/status?after=N  the round, and the records of the versions after N (by default, of the last)
GET  /v1/operator/keys            devices and operators
POST /v1/operator/enroll          {"public": "base64", "label": "ann's phone", "days": 365}
POST /v1/operator/revoke          {"name": "id or label"}
GET  /v1/operator/audit           who did what
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sized
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from partwise.deployment.auth import KeyRow, device_of, verify_operator
from partwise.deployment.bodies import read_body, read_json
from partwise.deployment.book import RoundRow
from partwise.deployment.hub import Hub
from partwise.deployment.key_ring import acts, note
from partwise.deployment.meters import Meters
from partwise.types import UserError

MOST = 1 << 16  # bytes of a request
SHOWN, AT_ONCE = 20, 500  # versions in the status: unless it is asked after which; at most
DAY = 86_400

Answer = Callable[[Request], Awaitable[Response]]
Guarded = Callable[[str, Answer], Answer]


def operator_routes(
    hub: Hub, meters: Meters, guarded: Guarded, settings: Mapping[str, Any], waiting: Sized = ()
) -> list[Route]:
    """The routes. `guarded` makes errors into answers. `settings` are those of the run, and `waiting` the devices
    that wait for work."""

    def route(path: str, work: Callable[[str, bytes], Any], method: str = "GET") -> Route:
        """`work` gets who asks, and what: the body of a POST, the query of a GET."""

        async def answer(request: Request) -> Response:
            who = verify_operator(request.headers, hub.keys.get, time.time())
            body = await read_body(request.stream(), MOST)
            body = body if method == "POST" else request.url.query.encode()
            found = await asyncio.to_thread(work, who, body)
            return found if isinstance(found, Response) else JSONResponse(found)

        return Route(path, guarded(path, answer), methods=[method])

    def status(who: str, body: bytes) -> Any:
        row, after = hub.round(), _after(body)
        first = max(0, row.number - SHOWN if after is None else after) + 1
        last = range(first, min(row.number + 1, first + AT_ONCE))
        found = [version for version in map(hub.version, last) if version]
        records = [
            json.loads(each.record) | ({"metrics": json.loads(each.metrics)} if each.metrics else {})
            for each in found
        ]
        told = {**row._asdict(), "rounds": hub.coordinator.rules.rounds, "versions": records}
        return told | {"settings": dict(settings), "errors": meters.errors()} | devices(row)

    def devices(row: RoundRow) -> dict[str, Any]:
        """What the round's devices do. If clients are promised privacy, how many there are is not told."""
        if hub.coordinator.server.algorithm.aggregator.private:
            return dict.fromkeys(("waiting", "tasks", "refused"))
        counts = hub.clerk.do(lambda book: book.tally("train", row.number, row.attempt, time.time()))
        tasks = {"asked": counts.clients, "reported": counts.reported, "lost": counts.lost}
        return {"waiting": len(waiting), "tasks": tasks, "refused": meters.refusals()}

    def keys(who: str, body: bytes) -> Any:
        shown = ("device", "label", "expires", "revoked", "role")
        return {"keys": [{name: getattr(row, name) for name in shown} for row in hub.keys.all()]}

    def enroll(who: str, body: bytes) -> Any:
        given = read_json(body, {"public": "", "label": "", "days": 365.0})
        try:
            public = base64.b64decode(given["public"], validate=True)
        except ValueError:
            public = b""
        if len(public) != 32:
            raise UserError("public must be the 32 bytes of an Ed25519 public key, in base64")
        if not 0 < given["days"] <= 36_500:
            raise UserError(f"days must be more than 0 and at most 36,500, not {given['days']:g}")
        row = KeyRow(device_of(public), public, given["label"][:200], time.time() + given["days"] * DAY)
        hub.keys.enroll(row, who)
        return {"device": row.device, "label": row.label, "expires": row.expires}

    def revoke(who: str, body: bytes) -> Any:
        return {"device": hub.keys.revoke(read_json(body, {"name": ""})["name"], who).device}

    def audit(who: str, body: bytes) -> Any:
        hub.clerk.do(lambda book: note(book, who, "read the audit log"))
        return {"audit": [act._asdict() for act in hub.clerk.do(acts)]}

    return [
        route("/metrics", lambda who, body: Response(meters.text(), media_type="text/plain; version=0.0.4")),
        route("/v1/operator/status", status),
        route("/v1/operator/keys", keys),
        route("/v1/operator/enroll", enroll, "POST"),
        route("/v1/operator/revoke", revoke, "POST"),
        route("/v1/operator/audit", audit),
    ]


def _after(query: bytes) -> int | None:
    """The version after which an operator wants to know more."""
    given = parse_qs(query.decode()).get("after")
    if given is None:
        return None
    if not re.fullmatch(r"\d{1,9}", given[-1], re.ASCII):
        raise UserError(f"after must be the number of a version, not '{given[-1][:40]}'")
    return int(given[-1])
