"""The first server's way to the helper, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import numpy as np
import urllib3

from partwise.checkpoint import from_bytes, read_file, to_bytes
from partwise.deployment.helper import write_reports
from partwise.privacy.sum_words import SumWords
from partwise.privacy.two_servers import Agreement, ForHelper
from partwise.types import UserError

CONNECT, READ = 10.0, 600.0  # seconds; the sum of a large cohort takes a while


class HelperDownError(Exception):
    """The helper does not answer now: what was asked can be tried again."""


class VersionMissingError(Exception):
    """The helper does not have the rows of this version (any more)."""


class HelperLink(Protocol):
    """The way to the helper of a run."""

    def agree(self, agreement: Agreement) -> bytes:
        """Agree on a run. Returns the helper's public key."""
        ...

    def put_rows(self, run: str, version: int, rows: Mapping[str, np.ndarray]) -> None:
        """Send it the rows of a version."""
        ...

    def slices(self, run: str, version: int, task: str, public: bytes, sealed: bytes) -> bytes:
        """Bring it a client's question: what both servers are told, and its box."""
        ...

    def share(
        self, agreement: Agreement, version: int, reports: list[ForHelper]
    ) -> tuple[SumWords, list[int]]:
        """Its share of the sum of reports, and the places of those that it cannot read."""
        ...


class HttpHelper:
    """`HelperLink` over HTTP.

    Args:
        url: Where the helper is.
        token: The file with the token that its operator gave to this server.
        authority: A file with the certificate that signed the helper's; by default those that the system trusts.
    """

    def __init__(self, url: str, token: str | Path, authority: str | Path | None = None):
        if not url.startswith(("https://", "http://")):
            raise UserError(f"the helper's URL must begin with https:// (or http://), not '{url}'")
        self.url, self._token = url.rstrip("/"), read_file(Path(token)).decode().strip()
        timeout = urllib3.Timeout(connect=CONNECT, read=READ)
        trusted = str(authority) if authority else None
        self._pool = urllib3.PoolManager(timeout=timeout, retries=False, ca_certs=trusted, maxsize=8)

    def agree(self, agreement: Agreement) -> bytes:
        """As `HelperLink.agree`."""
        return bytes.fromhex(self._post("/v1/runs", agreement.to_json().encode()).decode())

    def put_rows(self, run: str, version: int, rows: Mapping[str, np.ndarray]) -> None:
        """As `HelperLink.put_rows`."""
        self._post(_path(run, version), to_bytes(rows))

    def slices(self, run: str, version: int, task: str, public: bytes, sealed: bytes) -> bytes:
        """As `HelperLink.slices`."""
        arrays = {"public": np.frombuffer(public, np.uint8), "sealed": np.frombuffer(sealed, np.uint8)}
        return self._post(f"{_path(run, version)}/slices", to_bytes(arrays, {"task": task}))

    def share(
        self, agreement: Agreement, version: int, reports: list[ForHelper]
    ) -> tuple[SumWords, list[int]]:
        """As `HelperLink.share`."""
        body = self._post(f"{_path(agreement.run, version)}/sum", write_reports(agreement, reports))
        arrays, header = from_bytes(body)
        tables = {space: arrays[f"table:{space}"] for space in agreement.tables}
        return SumWords(arrays["dense"], tables), list(header["refused"])

    def _post(self, path: str, body: bytes) -> bytes:
        headers = {"authorization": f"Bearer {self._token}"}
        try:
            answer = self._pool.request("POST", self.url + path, body=body, headers=headers)
        except urllib3.exceptions.HTTPError as error:
            raise HelperDownError(f"the helper at {self.url} does not answer: {error}") from None
        if answer.status >= 500:
            raise HelperDownError(f"the helper at {self.url} answered with status {answer.status}")
        if answer.status == 200:
            return answer.data
        try:
            found = json.loads(answer.data)
            reason, what = found["reason"], found["what"]
        except (ValueError, LookupError, TypeError):
            raise UserError(f"{self.url} is no helper of partwise (status {answer.status})") from None
        if reason == "version":
            raise VersionMissingError(what)
        raise UserError(f"the helper at {self.url} refused: {what}")


def _path(run: str, version: int) -> str:
    return f"/v1/runs/{quote(run, safe='')}/versions/{version}"
