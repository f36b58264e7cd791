"""What operators may ask of a server, with their token. No key of a device reaches these.

GET  /metrics                     for Prometheus
GET  /v1/operator/status          the round, and the records of the last versions
GET  /v1/operator/keys            devices and operators
POST /v1/operator/enroll          {"public": "base64", "label": "ann's phone", "days": 365}
POST /v1/operator/revoke          {"name": "id or label"}
GET  /v1/operator/audit           who did what
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from partwise.deployment.auth import KeyRow, device_of, verify_operator
from partwise.deployment.bodies import read_body, read_json
from partwise.deployment.hub import Hub
from partwise.deployment.key_ring import acts, note
from partwise.deployment.meters import Meters
from partwise.types import UserError

MOST = 1 << 16  # bytes of a request
SHOWN = 20  # versions in the status
DAY = 86_400

Answer = Callable[[Request], Awaitable[Response]]
Guarded = Callable[[str, Answer], Answer]


def operator_routes(hub: Hub, meters: Meters, guarded: Guarded) -> list[Route]:
    """The routes. `guarded` makes errors into answers."""

    def route(path: str, work: Callable[[str, bytes], Any], method: str = "GET") -> Route:
        async def answer(request: Request) -> Response:
            who = verify_operator(request.headers, hub.keys.get, time.time())
            body = await read_body(request.stream(), MOST)
            found = await asyncio.to_thread(work, who, body)
            return found if isinstance(found, Response) else JSONResponse(found)

        return Route(path, guarded(path, answer), methods=[method])

    def status(who: str, body: bytes) -> Any:
        row = hub.round()
        last = range(max(1, row.number - SHOWN + 1), row.number + 1)
        found = [version for version in map(hub.version, last) if version]
        records = [
            json.loads(each.record) | ({"metrics": json.loads(each.metrics)} if each.metrics else {})
            for each in found
        ]
        return {**row._asdict(), "rounds": hub.coordinator.rules.rounds, "versions": records}

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
