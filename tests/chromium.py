"""The Chromium of the system, without a window. A conftest.py loads this file and has its fixture `chromium`."""

from __future__ import annotations

import base64
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
LONGEST = 300.0  # seconds for any answer of a browser


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
        self.events: list[dict[str, Any]] = []  # what the browser said without being asked

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
            self.events.append(answer)

    def open(self, url: str, **how: Any) -> Page:
        """A page in a context of its own: another person's browser, with its own storage. `how` is as in
        `Page.show`."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        page.show(**how)
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

    def show(self, width: int = 1280, height: int = 900, dark: bool = False, offline: bool = False) -> None:
        """The size of the window, the colours that the person likes, and whether there is a network."""
        call = lambda method, **params: self._browser.call(method, self._session, **params)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        call("Emulation.setEmulatedMedia", features=[scheme])
        rates = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        call("Network.emulateNetworkConditions", offline=offline, **rates)

    def problems(self) -> list[str]:
        """What the browser complained about on this page: errors of scripts, of the console, of its policy."""
        self.run("0")  # what was said before is here then
        mine = [each for each in self._browser.events if each.get("sessionId") == self._session]
        thrown = [str(each["params"]) for each in mine if each["method"] == "Runtime.exceptionThrown"]
        entries = [each["params"]["entry"] for each in mine if each["method"] == "Log.entryAdded"]
        said = [each["params"] for each in mine if each["method"] == "Runtime.consoleAPICalled"]
        bad = [str(entry) for entry in entries if entry["level"] in ("error", "warning")]
        return thrown + bad + [str(each) for each in said if each["type"] in ("error", "warning", "assert")]

    def requests(self) -> list[str]:
        """The URLs that the page asked for."""
        self.run("0")
        mine = [each for each in self._browser.events if each.get("sessionId") == self._session]
        return [
            each["params"]["request"]["url"] for each in mine if each["method"] == "Network.requestWillBeSent"
        ]

    def mouse(self, kind: str, x: float, y: float, pressed: bool = False) -> None:
        """Move the mouse, press it or let it go."""
        button = (
            {"button": "left", "buttons": 1 if pressed else 0, "clickCount": 1}
            if kind != "Moved" or pressed
            else {}
        )
        self._browser.call("Input.dispatchMouseEvent", self._session, type=f"mouse{kind}", x=x, y=y, **button)

    def press(self, key: str) -> None:
        """Press a key and let it go."""
        code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}.get(key, 0)
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = {"windowsVirtualKeyCode": code, **(text if kind == "keyDown" else {})}
            self._browser.call("Input.dispatchKeyEvent", self._session, type=kind, key=key, **more)

    def tree(self) -> list[tuple[str, str]]:
        """The accessibility tree: roles and names."""
        nodes = self._browser.call("Accessibility.getFullAXTree", self._session)["nodes"]
        named = [
            (each["role"]["value"], each.get("name", {}).get("value", "")) for each in nodes if "role" in each
        ]
        return [(role, name) for role, name in named if role not in ("none", "generic", "InlineTextBox")]

    def picture(self, path: Path) -> None:
        """Write what the window shows as a PNG file."""
        found = self._browser.call("Page.captureScreenshot", self._session, format="png")
        path.write_bytes(base64.b64decode(found["data"]))
