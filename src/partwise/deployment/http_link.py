"""A device's way to its run over HTTP."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import urllib3

from partwise.checkpoint import to_bytes
from partwise.config.sections import DeployConfig
from partwise.deployment.auth import DeviceKey
from partwise.deployment.bodies import ZSTD, TooLargeError, pack, unpack
from partwise.deployment.http_files import HttpFiles
from partwise.deployment.jobs import Wait, Work
from partwise.deployment.link import PROTOCOL, Offer, UnreachableError, read_answer
from partwise.server.round import Accepted, Refused
from partwise.types import UserError

CONNECT, READ = 10.0, 60.0  # seconds
LARGEST = 1 << 32  # bytes of an answer
AGAIN = (429, 500, 502, 503, 504)  # answers after which a request is tried again


class ClockError(UnreachableError):
    """The server refuses this device because its clock is wrong."""


class UntrustedError(UnreachableError):
    """The server's certificate is not one that this device trusts."""


class HttpLink:
    """`deployment.link.Link` over HTTP, with connections that stay open.

    Args:
        url: Where the server is, as in `https://example.org:8443`.
        key: This device's key.
        authority: A file with the certificate that signed the server's; by default those that the system trusts.
        hold: Seconds that a poll may wait for work; None: as long as the run lets it (`deploy.hold`).
    """

    def __init__(
        self, url: str, key: DeviceKey, authority: str | Path | None = None, hold: float | None = None
    ):
        if not re.match(r"https?://[^/]+", url):
            raise UserError(f"the server's URL must begin with https:// (or http://), not '{url}'")
        self.url, self.key, self._hold, self._authority = url.rstrip("/"), key, hold, authority
        known = trusted(authority)
        self._pool = urllib3.PoolManager(retries=False, ca_certs=known, maxsize=4)
        self._longest = DeployConfig.hold  # until the run is known
        self.bytes_down = self.bytes_up = 0  # of bodies

    def offer(self) -> Offer:
        """As `Link.offer`."""
        told = json.loads(self._good("GET", "/v1/run"))
        if not isinstance(told, dict) or told.get("protocol") != PROTOCOL:
            raise UserError(
                f"{self.url} does not speak protocol {PROTOCOL} of partwise: give the URL of a partwise server, "
                f"and install the version of partwise that it has"
            )
        offer = Offer(**{name: told[name] for name in Offer._fields})
        self._longest = float(offer.settings["deploy.hold"])
        return offer

    def join(self, clients: Iterable[str]) -> list[str]:
        """As `Link.join`."""
        names = list(clients)
        status, data = self._request("POST", "/v1/join", _document({"clients": names}))
        if status == 200:
            return []
        refused, which = _refused(status, data), json.loads(data).get("clients")
        others = [name for name in names if name in which] if isinstance(which, list) else []
        if not others:
            raise self._refusal("/v1/join", refused)
        return others

    def poll(self, ready: bool, most: int, status: Mapping[str, Any] | None = None) -> Work | Wait:
        """As `Link.poll`."""
        hold = self._longest if self._hold is None else self._hold
        said = {"ready": ready, "most": most, "hold": hold, "status": dict(status or {})}
        return read_answer(self._good("POST", "/v1/poll", _document(said)))

    def slices(self, task: str, keys: Mapping[str, np.ndarray]) -> bytes | Refused:
        """As `Link.slices`."""
        status, data = self._request("POST", f"/v1/tasks/{task}/slices", _keys(keys))
        return data if status == 200 else _refused(status, data)

    def private(self, task: str, question: bytes) -> bytes | Refused:
        """As `Link.private`."""
        status, data = self._request("POST", f"/v1/tasks/{task}/private", question)
        return data if status == 200 else _refused(status, data)

    def model(self, keys: Mapping[str, np.ndarray]) -> bytes:
        """Slices of the newest version of the model."""
        return self._good("POST", "/v1/model/slices", _keys(keys))

    def files(self, url: str) -> HttpFiles:
        """As `Link.files`."""
        return HttpFiles(url or f"{self.url}/v1/files", authority=self._authority)

    def report(self, report: bytes) -> Accepted | Refused:
        """As `Link.report`."""
        status, data = self._request("POST", "/v1/reports", report)
        return Accepted(**json.loads(data)) if status == 200 else _refused(status, data)

    def decline(self, task: str, reason: str) -> Refused | None:
        """As `Link.decline`."""
        status, data = self._request("POST", f"/v1/tasks/{task}/decline", _document({"reason": reason}))
        return None if status == 200 else _refused(status, data)

    def send_letter(self, task: str, stage: int, letter: bytes) -> Refused | None:
        """As `Link.send_letter`."""
        status, data = self._request("POST", f"/v1/tasks/{task}/letters/{stage}", letter)
        return None if status == 200 else _refused(status, data)

    def answer(self, task: str, stage: int) -> bytes | Wait | Refused:
        """As `Link.answer`."""
        status, data = self._request("GET", f"/v1/tasks/{task}/letters/{stage}")
        if status == 202:
            return Wait(float(json.loads(data)["wait"]))
        return data if status == 200 else _refused(status, data)

    def _good(self, method: str, path: str, body: bytes = b"", most: int = LARGEST) -> bytes:
        status, data = self._request(method, path, body, most)
        if status != 200:
            raise self._refusal(path, _refused(status, data))
        return data

    def _refusal(self, path: str, refused: Refused) -> UserError:
        return UserError(f"{self.url}{path} refused ({refused.reason}): {refused.what}")

    def _request(self, method: str, path: str, body: bytes = b"", most: int = LARGEST) -> tuple[int, bytes]:
        """Status and body of the answer; errors of the network or the server mean: try again."""
        packed, headers = pack(body)
        headers |= {"accept-encoding": ZSTD} | self.key.headers(method, path, packed)
        try:
            answer = self._pool.request(
                method,
                self.url + path,
                body=packed or None,
                headers=headers,
                preload_content=False,
                timeout=urllib3.Timeout(connect=CONNECT, read=READ + max(self._longest, self._hold or 0.0)),
            )
            data = answer.read(most + 1, decode_content=False)
            answer.release_conn()
        except urllib3.exceptions.HTTPError as error:
            raise _unreachable(self.url, error) from None
        self.bytes_up, self.bytes_down = self.bytes_up + len(packed), self.bytes_down + len(data)
        if answer.status in AGAIN:
            raise UnreachableError(f"{self.url} answered with status {answer.status}")
        if len(data) > most:
            raise UserError(f"{self.url}{path} sends more than the {most:,} bytes that were expected")
        try:
            data = unpack(data, answer.headers.get("content-encoding", ""), most)
        except TooLargeError as error:
            raise UserError(f"{self.url}{path} sends {error}") from None
        if answer.status == 401 and (refused := _refused(401, data)).reason == "clock":
            raise ClockError(refused.what)
        return answer.status, data


def trusted(authority: str | Path | None) -> str | None:
    """The file of the authority's certificate, if one is given. Raises `UserError` if there is none in it."""
    if authority is None:
        return None
    try:
        ssl.create_default_context(cafile=str(authority))
    except OSError as error:  # errors of TLS are some of these
        raise UserError(
            f"'{authority}' holds no certificate ({error.strerror or error}): give --authority the PEM file of the "
            f"certificate that signed the server's"
        ) from None
    return str(authority)


def _unreachable(url: str, error: urllib3.exceptions.HTTPError) -> UnreachableError:
    """What is said of a server that cannot be asked."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        why = str(error).partition("certificate verify failed: ")[2].partition(" (_ssl")[0]
        return UntrustedError(
            f"the certificate of {url} cannot be trusted ({why}): give --authority the certificate that signed it, "
            f"if that is not a public one, and the name that the certificate is for"
        )
    hint = " (if it has TLS, its URL begins with https://)" if url.startswith("http://") else ""
    return UnreachableError(f"{url} does not answer: {error}{hint}")


def _keys(keys: Mapping[str, np.ndarray]) -> bytes:
    return to_bytes({space: each.astype(np.int32) for space, each in keys.items()})


def _document(values: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(values)).encode()


def _refused(status: int, data: bytes) -> Refused:
    try:
        found = json.loads(data)
        return Refused(found["reason"], found["what"])
    except (ValueError, LookupError, TypeError):
        raise UnreachableError(f"the server answered with status {status} and no reason") from None
