"""A device's way to its run over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import urllib3

from partwise.checkpoint import to_bytes
from partwise.deployment.auth import DeviceKey
from partwise.deployment.coordinator import Wait, Work
from partwise.deployment.link import Offer, read_answer
from partwise.server.round import Accepted, Refused
from partwise.types import UserError

TIMEOUT = urllib3.Timeout(connect=10, read=120)


class UnreachableError(Exception):
    """The server does not answer, or not as it should: try again later."""


class HttpLink:
    """`deployment.link.Link` over HTTP, with connections that stay open.

    Args:
        url: Where the server is, as in `https://example.org:8443`.
        key: This device's key.
        authority: A file with the certificate that signed the server's; by default those that the system trusts.
    """

    def __init__(self, url: str, key: DeviceKey, authority: str | Path | None = None):
        self.url, self.key = url.rstrip("/"), key
        trusted = str(authority) if authority else None
        self._pool = urllib3.PoolManager(timeout=TIMEOUT, retries=False, ca_certs=trusted)

    def offer(self) -> Offer:
        """As `Link.offer`."""
        return Offer(**self._json("GET", "/v1/run"))

    def join(self, clients: Iterable[str]) -> None:
        """As `Link.join`."""
        self._json("POST", "/v1/join", {"clients": list(clients)})

    def poll(self, ready: bool, most: int) -> Work | Wait:
        """As `Link.poll`."""
        return read_answer(self._good("POST", "/v1/poll", _document({"ready": ready, "most": most})))

    def slices(self, task: str, keys: Mapping[str, np.ndarray]) -> bytes | Refused:
        """As `Link.slices`."""
        body = to_bytes({space: each.astype(np.int32) for space, each in keys.items()})
        status, data = self._request("POST", f"/v1/tasks/{task}/slices", body)
        return data if status == 200 else _refused(status, data)

    def report(self, report: bytes) -> Accepted | Refused:
        """As `Link.report`."""
        status, data = self._request("POST", "/v1/reports", report)
        return Accepted(**json.loads(data)) if status == 200 else _refused(status, data)

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return json.loads(self._good(method, path, None if body is None else _document(body)))

    def _good(self, method: str, path: str, body: bytes | None = None) -> bytes:
        status, data = self._request(method, path, body)
        if status != 200:
            refused = _refused(status, data)
            raise UserError(f"{self.url}{path} refused ({refused.reason}): {refused.what}")
        return data

    def _request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of the answer; errors of the network or the server mean: try again."""
        try:
            headers = self.key.headers(method, path, body or b"")
            answer = self._pool.request(method, self.url + path, body=body, headers=headers)
        except urllib3.exceptions.HTTPError as error:
            raise UnreachableError(f"{self.url} does not answer: {error}") from None
        if answer.status >= 500:
            raise UnreachableError(f"{self.url} answered with status {answer.status}")
        return answer.status, answer.data


def _document(values: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(values)).encode()


def _refused(status: int, data: bytes) -> Refused:
    try:
        found = json.loads(data)
        return Refused(found["reason"], found["what"])
    except (ValueError, LookupError, TypeError):
        raise UnreachableError(f"the server answered with status {status} and no reason") from None
