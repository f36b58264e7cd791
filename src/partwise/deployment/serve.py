"""A server process: the HTTP interface of a run under uvicorn, with TLS, until it is told to stop or the run
ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn

from partwise.deployment.federation import open_run
from partwise.deployment.helper import Helper
from partwise.deployment.helper_link import HttpHelper
from partwise.deployment.helper_server import helper_application
from partwise.deployment.http_server import application
from partwise.deployment.hub import Hub
from partwise.deployment.journal import JournalDownError
from partwise.deployment.listening import check_address, check_certificate, is_local
from partwise.types import UserError

logger = logging.getLogger("partwise.server")
CHECKED = 0.2  # seconds between looks whether the run has ended
LAST_ANSWERS = 3.0  # seconds for devices to hear that it has
GRACE = 2  # seconds for requests that are being answered when the server stops


class Serving(NamedTuple):
    """How a run is served.

    host, port:   where the server listens; port 0: any that is free
    certificate:  a PEM file with the server's certificate and those that lead to its authority
    key:          a PEM file with the certificate's private key
    proxy:        whether TLS ends at a proxy on the same host or in the same network
    journal:      URL of the journal's database, if it has a password; None: where the run was begun with it
    files:        URL at which devices find files of slices; "": at the server
    place:        where files of slices are written: a folder or an s3:// URL; "": the run's folder
    until_end:    whether the server stops when the run has ended
    helper:       URL of the second server, if the run has two
    helper_token: the file with the token that its operator gave
    helper_authority: a file with the certificate that signed the helper's; None: those that the system trusts
    """

    host: str = "127.0.0.1"
    port: int = 8443
    certificate: str | None = None
    key: str | None = None
    proxy: bool = False
    journal: str | None = None
    files: str = ""
    place: str = ""
    until_end: bool = False
    helper: str | None = None
    helper_token: str | None = None
    helper_authority: str | None = None

    def check(self) -> Serving:
        """Itself, if nobody but devices and server can read what they send, and if the server can listen."""
        check_certificate(self.certificate, self.key)
        if not (self.certificate or self.proxy or is_local(self.host)):
            raise UserError(
                f"without TLS, the server listens on this machine only, not on {self.host}: give --certificate and "
                f"--key, or --proxy if TLS ends at a proxy before it"
            )
        check_address(self.host, self.port)
        return self


def serve(run: str | Path, how: Serving, told: Callable[[str], None] = lambda url: None) -> Hub:
    """Serve a run until SIGINT or SIGTERM, or until it ends. `told` is called with the server's URL."""
    how.check()
    hub, offer, files = open_run(run, how.journal, how.files, how.place, helper=_helper(how))
    app = application(hub, offer, bool(how.certificate or how.proxy), files)
    ended = (lambda: _has_ended(hub)) if how.until_end else _never
    listen(app, how, told, ended, app.state.wake)
    return hub


def serve_helper(helper: Helper, how: Serving, told: Callable[[str], None] = lambda url: None) -> None:
    """Be the second of two servers until SIGINT or SIGTERM. `told` is called with the server's URL."""
    listen(helper_application(helper), how, told)
    helper.close()


async def _never() -> bool:
    return False


def listen(
    app: Any,
    how: Serving,
    told: Callable[[str], None],
    ended: Callable[[], Awaitable[bool]] = _never,
    at_stop: Callable[[], Any] = lambda: None,
) -> None:
    """Run an application until SIGINT or SIGTERM, or until it has `ended`. `at_stop` is called before it stops."""
    config = uvicorn.Config(
        app,
        host=how.host,
        port=how.port,
        ssl_certfile=how.certificate,
        ssl_keyfile=how.key,
        proxy_headers=how.proxy,
        forwarded_allow_ips="*" if how.proxy else None,
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=4096,
        timeout_graceful_shutdown=GRACE,
    )
    server = uvicorn.Server(config)
    with (
        contextlib.suppress(KeyboardInterrupt),
        asyncio.Runner(loop_factory=config.get_loop_factory()) as loop,
    ):
        loop.run(_serve(server, how, told, ended, at_stop))


def _helper(how: Serving) -> HttpHelper | None:
    if how.helper is None:
        return None
    if how.helper_token is None:
        raise UserError(
            "a helper answers who has its token: give --helper-token FILE, from the helper's folder"
        )
    return HttpHelper(how.helper, how.helper_token, how.helper_authority)


async def _serve(server: uvicorn.Server, *watched: Any) -> None:
    watching = asyncio.create_task(_watch(server, *watched))
    try:
        await server.serve()
    finally:
        watching.cancel()


async def _watch(
    server: uvicorn.Server,
    how: Serving,
    told: Callable[[str], None],
    ended: Callable[[], Awaitable[bool]],
    at_stop: Callable[[], Any],
) -> None:
    """Tell where the server listens, and stop it when the run has ended."""
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    scheme = "https" if how.certificate else "http"
    told(f"{scheme}://{how.host}:{port}")
    while not server.should_exit:
        await asyncio.sleep(CHECKED)
        if await ended():
            await asyncio.sleep(LAST_ANSWERS)
            server.should_exit = True
    at_stop()


async def _has_ended(hub: Hub) -> bool:
    """Whether the run has ended. A journal that does not answer now will later."""
    try:
        row = await asyncio.wrap_future(hub.clerk.submit(lambda book: book.round()))
    except JournalDownError:
        return False
    return row.phase == "ended"


class JsonLines(logging.Formatter):
    """Log lines as JSON, one object in a line."""

    def format(self, record: logging.LogRecord) -> str:
        """A line."""
        told = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told)


def log_to_stderr(as_json: bool) -> None:
    """Write the log of partwise to standard error, for people or as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    words = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if as_json else words)
    logging.getLogger("partwise").addHandler(handler)
    logging.getLogger("partwise").setLevel(logging.INFO)
