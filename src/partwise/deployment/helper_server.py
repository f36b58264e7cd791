"""The helper's HTTP interface, for the first server of a run alone, which has its token.

    POST /v1/runs                                    the agreement (JSON) -> {"public": hex}
    POST /v1/runs/{run}/versions/{version}           all rows as bytes (safetensors)
    POST /v1/runs/{run}/versions/{version}/slices    {task} and a question (safetensors) -> rows under its pad
    POST /v1/runs/{run}/versions/{version}/sum       the reports of a sum (safetensors) -> the helper's share
    GET  /healthz

Devices never talk to it. What is refused has a status of 4xx and {"reason": ..., "what": ...}.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from partwise.checkpoint import from_bytes
from partwise.deployment.bodies import TooLargeError, read_body
from partwise.deployment.helper import Helper, UnknownVersionError
from partwise.types import UserError

logger = logging.getLogger("partwise.helper")
LARGEST = 1 << 34  # bytes of a request: the reports of a whole cohort


def helper_application(helper: Helper) -> Starlette:
    """The application."""

    def post(path: str, work: Callable[[Request, bytes], bytes | None]) -> Route:
        async def answer(request: Request) -> Response:
            body = await read_body(request.stream(), LARGEST)
            found = await asyncio.to_thread(work, request, body)
            return Response(found or b"", media_type="application/octet-stream")

        return Route(path, _guarded(helper, answer), methods=["POST"])

    def agree(request: Request, body: bytes) -> bytes:
        helper.agree(body)
        return helper.public.hex().encode()

    def slices(request: Request, body: bytes) -> bytes:
        arrays, header = from_bytes(body)
        if set(arrays) != {"public", "sealed"} or not isinstance(header.get("task"), str):
            raise UserError(
                "a question has two arrays, 'public' and 'sealed', and the task that it belongs to"
            )
        told = arrays["public"].tobytes(), arrays["sealed"].tobytes()
        return helper.slices(*_place(request), header["task"], *told)

    version = "/v1/runs/{run}/versions/{version:int}"
    return Starlette(
        routes=[
            post("/v1/runs", agree),
            post(version, lambda request, body: helper.put_rows(*_place(request), body)),
            post(f"{version}/slices", slices),
            post(f"{version}/sum", lambda request, body: helper.share(*_place(request), body)),
            Route("/healthz", _health),
        ]
    )


def _place(request: Request) -> tuple[str, int]:
    return request.path_params["run"], request.path_params["version"]


def _guarded(
    helper: Helper, answer: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint for the one who has the token, and whose errors are answers."""

    async def guard(request: Request) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), helper.token.encode()):
            return _refusal(401, "token", "this helper answers the server that has its token")
        try:
            return await answer(request)
        except UnknownVersionError as error:
            return _refusal(404, "version", str(error))
        except TooLargeError as error:
            return _refusal(413, "too large", str(error))
        except UserError as error:
            logger.warning("%s refused: %s", request.url.path, error)
            return _refusal(409, "refused", str(error))
        except Exception as error:
            logger.error("a request failed", exc_info=error)
            return _refusal(500, "error", "the helper made a mistake, which is in its log")

    return guard


async def _health(request: Request) -> Response:
    return JSONResponse({"helper": True})


def _refusal(status: int, reason: str, what: str) -> Response:
    return JSONResponse({"reason": reason, "what": what}, status_code=status)
