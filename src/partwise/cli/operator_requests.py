"""Requests that the commands of an operator make to a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from partwise.types import UserError

SCHEMES = ("http://", "https://")
Request = Callable[[str, str, bytes | None], bytes]


def is_url(text: str) -> bool:
    """Whether a run is given by the URL of its server. Raises `UserError` for URLs of another kind."""
    if "://" in text and not text.startswith(SCHEMES):
        raise UserError(
            f"'{text}' is no URL of a server, which begins with {' or '.join(SCHEMES)}, and no folder"
        )
    return text.startswith(SCHEMES)


def as_operator(url: str, token: str | None, authority: str | None) -> Request:
    """A function (method, path, body) -> the body of the answer. It raises `UserError` if the server refuses or
    does not answer.

    Args:
        url: Where the server is.
        token: The file of an operator's token.
        authority: The file of the certificate that signed the server's.
    """
    import urllib3

    if not token:
        raise UserError(
            "a server at a URL needs an operator's token: --token FILE (`partwise enroll RUN --operator NAME`)"
        )
    from partwise.deployment.auth import read_token
    from partwise.deployment.http_link import trusted

    headers = {"authorization": f"Bearer {read_token(token)}"}
    pool = urllib3.PoolManager(ca_certs=trusted(authority), retries=False, timeout=30)

    def request(method: str, path: str, body: bytes | None) -> bytes:
        try:
            answer = pool.request(method, url.rstrip("/") + path, body=body, headers=headers)
        except urllib3.exceptions.HTTPError as error:
            raise UserError(f"{url} does not answer: {error}") from None
        if answer.status != 200:
            raise UserError(f"{url} refused: {answer.data.decode(errors='replace')}")
        return answer.data

    return request


def status_asker(url: str, token: str | None, authority: str | None) -> Callable[[int], dict[str, Any]]:
    """A function that returns what a server says of its run, with the records of the versions after this one."""
    request = as_operator(url, token, authority)

    def ask(after: int) -> dict[str, Any]:
        try:
            found = json.loads(request("GET", f"/v1/operator/status?after={after}", None))
            return {"versions": found["versions"], "phase": found["phase"], **found}
        except UserError:
            raise
        except (ValueError, LookupError, TypeError):
            raise UserError(
                f"{url} answers, but not as the server of a run: give the URL of `partwise serve`"
            ) from None

    return ask
