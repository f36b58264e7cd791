"""The Chromium of the system, without a window."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
LONGEST = 60.0  # seconds for any answer of a browser


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """A headless Chromium; `chromium.open(url)` is a page."""
    connecting = pytest.importorskip(
        "websockets.sync.client", reason="the extra `test` has websockets, which drives Chromium"
    )
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    profile, connect = tmp_path_factory.mktemp("chromium"), connecting.connect
    with running(program, profile) as address, connect(address, max_size=None) as socket:
        yield Chromium(socket)


@contextlib.contextmanager
def running(program: str, profile: Path) -> Iterator[str]:
    """A browser process with a profile of its own; where its protocol (CDP) is spoken."""
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        told, until = profile / "DevToolsActivePort", time.monotonic() + LONGEST
        while not (told.exists() and len(told.read_text().split()) == 2):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("Chromium did not start")
            time.sleep(0.05)
        yield "ws://127.0.0.1:{}{}".format(*told.read_text().split())
    finally:
        process.terminate()
        process.wait(LONGEST)


class Chromium:
    """A headless browser, driven by its own protocol."""

    def __init__(self, socket: Any):
        self._socket, self._numbers = socket, itertools.count(1)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        self._socket.send(json.dumps(message | ({"sessionId": session} if session else {})))
        while True:
            answer = json.loads(self._socket.recv(timeout=LONGEST))
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def open(self, url: str) -> Page:
        """A page in a context of its own: another person's browser, with its own storage."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        page.visit(url)
        return page


class Page:
    """A page of `Chromium`."""

    def __init__(self, browser: Chromium, session: str):
        self._browser, self._session = browser, session

    def visit(self, url: str) -> None:
        """Go there, and wait until the page's own script says that it is ready."""
        found = self._browser.call("Page.navigate", self._session, url=url)
        if "errorText" in found:
            raise RuntimeError(f"{url}: {found['errorText']}")
        self.wait(f"location.href.startsWith('{url}') && document.body?.dataset.ready === 'yes'")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        found = self._browser.call(
            "Runtime.evaluate",
            self._session,
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
        )
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description") or details["text"])
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + LONGEST
        while True:
            try:
                if self.run(expression):
                    return
            except RuntimeError:  # the page is being replaced
                if time.monotonic() > until:
                    raise
            if time.monotonic() > until:
                raise TimeoutError(f"still not true: {expression}; the page says: {self.text('status')!r}")
            time.sleep(0.05)

    def text(self, element: str) -> str:
        """The words of an element."""
        return self.run(f"document.getElementById('{element}')?.textContent")

    def click(self, element: str) -> None:
        """Press a button."""
        self.run(f"document.getElementById('{element}').click()")

    def fill(self, element: str, words: str) -> None:
        """Write into a field."""
        self.run(f"document.getElementById('{element}').value = {json.dumps(words)}; 0")
