"""The server of a live page, for this machine alone: a page, and a feed of what is new. It changes nothing.

It listens on the loopback address, answers only if it is addressed by that name (so that a foreign site cannot ask
through the browser), and only under a path that is told to the person who started it.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from partwise.pages.moment import Moment, live_strip, status
from partwise.pages.page import View, make_page, make_view
from partwise.runs.document import to_plain
from partwise.runs.run_view import RunView
from partwise.types import UserError

HOST = "127.0.0.1"
TICK, SHARE = 0.5, 0.2  # seconds between looks; the most of the time that looking may take
HOLD = 20.0  # seconds that a browser waits for news
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Follower(Protocol):
    """What a live page is of."""

    def look(self) -> tuple[RunView, Moment]:
        """The run as it is now."""
        ...


class LivePage:
    """What the page shows, kept up to date by a thread of its own."""

    def __init__(self, follower: Follower):
        self._follower, self._news, self._over = follower, threading.Condition(), threading.Event()
        self.run, self.moment = follower.look()
        self.view, self.number = self._make(), 1
        self._thread = threading.Thread(target=self._keep_looking, name="partwise watch", daemon=True)
        self._thread.start()

    def _make(self) -> View:
        return make_view([self.run], live_strip(self.run, self.moment))

    def _keep_looking(self) -> None:
        took = 0.0
        while not self._over.wait(max(TICK, took / SHARE)):
            began = time.perf_counter()
            before = self._shown()
            self.run, self.moment = self._follower.look()
            if self._shown() != before:
                self._publish(self._make())
            took = time.perf_counter() - began

    def _shown(self) -> Any:
        """What a new view depends on."""
        return (status(self.run, self.moment), self.run.ended, bool(self.run.summary))

    def _publish(self, view: View) -> None:
        with self._news:
            self.view, self.number = view, self.number + 1
            self._news.notify_all()

    def after(self, number: int) -> dict[str, Any]:
        """The newest view as JSON, when there is one after this number, or it took too long."""
        with self._news:
            self._news.wait_for(lambda: self.number != number or self._over.is_set(), HOLD)
            return {"number": self.number, **self.view._asdict()}

    @property
    def over(self) -> bool:
        """Whether nothing new will come."""
        return self._over.is_set()

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        with self._news:
            self._news.notify_all()


class LiveServer:
    """An HTTP server in threads of its own; `url` is where the page is."""

    def __init__(self, page: LivePage, port: int = 0):
        self.page, self._key = page, secrets.token_urlsafe(16)
        try:
            self._server = ThreadingHTTPServer((HOST, port), _handler(page, self._key))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"could not listen on port {port}: {reason}. Choose another with --port"
            ) from None
        self._server.daemon_threads = True
        self.url = f"http://{HOST}:{self._server.server_address[1]}/{self._key}/"
        threading.Thread(target=self._server.serve_forever, name="partwise page", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self.page.close()
        self._server.shutdown()
        self._server.server_close()


def _handler(page: LivePage, key: str) -> type[BaseHTTPRequestHandler]:
    class PageHandler(BaseHTTPRequestHandler):
        server_version, sys_version, protocol_version = "partwise", "", "HTTP/1.1"

        def do_GET(self) -> None:
            port = self.connection.getsockname()[1]
            if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
                return self._answer(403, "text/plain", b"this server is for this machine alone\n")
            asked = urlsplit(self.path)
            answers = {"": self._page, "feed": self._feed, "status": self._status}
            name = asked.path.removeprefix(f"/{key}/")
            if not asked.path.startswith(f"/{key}/") or name not in answers:
                return self._answer(404, "text/plain", b"there is nothing here\n")
            return answers[name](asked.query)

        def _page(self, query: str) -> None:
            self._answer(200, "text/html; charset=utf-8", make_page(page.view, "feed").encode())

        def _feed(self, query: str) -> None:
            number = parse_qs(query).get("after", ["0"])[-1]
            news = page.after(int(number) if number.isdecimal() else 0)
            self.close_connection = page.over
            self._json(news)

        def _status(self, query: str) -> None:
            self._json(status(page.run, page.moment))

        def _json(self, document: dict[str, Any]) -> None:
            self._answer(200, "application/json", json.dumps(to_plain(document)).encode())

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: the terminal is for the run."""

        def handle(self) -> None:
            """Answer, and say nothing of browsers that hang up."""
            try:
                super().handle()
            except ConnectionError:
                self.close_connection = True

    return PageHandler
