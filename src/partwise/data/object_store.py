"""Object stores (S3, and whatever speaks its protocol), through pyarrow's file systems.

An address is `s3://BUCKET/PREFIX?region=...&endpoint_override=HOST:PORT&scheme=http`, with the options of pyarrow's
S3 file system. Its keys come from where pyarrow looks for them: the environment, the files of the AWS command line,
the machine's role. Errors that may pass are tried again; those that do not become `UserError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from partwise.data.late_arrow import pa
from partwise.types import UserError

CONNECTIONS = 32  # requests to an object store at a time
WAITS = (0.25, 1.0, 4.0, 15.0)  # seconds before another try
TIMEOUTS = {"connect_timeout": 5.0, "request_timeout": 10.0}  # seconds without a connection, without a byte
SECRETS = ("access_key", "secret_key", "session_token")  # options that a run must not record
PASSING = "NETWORK_CONNECTION"
REMEDIES = {  # words of an error -> what to do
    "RESOURCE_NOT_FOUND": "The file is gone: write it again, or name another one",
    "NO_SUCH_BUCKET": "Make the bucket first, or name another one",
    "ACCESS_DENIED": "Give keys that may read, write and list it (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)",
    "INVALID_ACCESS_KEY": "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "SIGNATURE": "Check AWS_SECRET_ACCESS_KEY and the machine's clock",
    PASSING: "Check the address (endpoint_override, scheme, region) and the network",
    os.strerror(errno.ENOSPC): "Make room; what was there before is untouched",
}
T = TypeVar("T")


class Place(NamedTuple):
    """A file or a folder in an object store."""

    system: Any  # a pyarrow.fs.FileSystem
    path: str  # in the system
    shown: str  # in messages: the address without its options

    def __str__(self) -> str:
        return self.shown

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]

    def of(self, name: str) -> Place:
        """What has this name in the folder."""
        return Place(self.system, f"{self.path}/{name}", f"{self.shown}/{name}")


def is_address(place: str | Path) -> bool:
    """Whether this is an address (s3://...) and not a path of this machine."""
    return "://" in str(place)


def shown_place(place: str | Path) -> str:
    """A path or an address, for messages: without options and keys."""
    if not is_address(place):
        return str(place)
    parts = urllib.parse.urlsplit(str(place))
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")


def open_address(url: str, tries: int = 1) -> Place:
    """The place with this address. `tries` is how often pyarrow itself tries a request. What it does unasked takes
    minutes, and `patiently` tries again anyway."""
    parts, shown = urllib.parse.urlsplit(url), shown_place(url)
    if "@" in parts.netloc or any(name in urllib.parse.parse_qs(parts.query) for name in SECRETS):
        raise UserError(
            f"the address of {shown} holds keys, and runs record addresses: leave them out, and set "
            f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"
        )
    with telling(shown):
        pa.set_io_thread_count(max(pa.io_thread_count(), CONNECTIONS))  # also bounds the connections
        system, path = open_system(url)
    return Place(_trying(system, tries), path.rstrip("/"), shown)


def open_system(url: str) -> tuple[Any, str]:
    """pyarrow's file system of an address, and the path in it. Small files take one request to be written, where
    pyarrow knows how."""
    from pyarrow import ArrowInvalid, fs

    delayed = f"{url}{'&' if '?' in url else '?'}allow_delayed_open=true"
    for each in (delayed, url):
        try:
            return fs.FileSystem.from_uri(each)
        except ArrowInvalid as error:
            wrong = error
    raise UserError(f"'{url}' is no address of a bucket: {wrong}")


def _trying(system: Any, tries: int) -> Any:
    """The file system with another number of tries, which an address cannot say."""
    from pyarrow import fs

    if system.type_name != "s3":
        return system
    _, (options,) = system.__reduce__()  # all that pyarrow read in the address, as it is pickled
    strategy = fs.AwsStandardS3RetryStrategy(max_attempts=tries)
    return fs.S3FileSystem(**{**options, **TIMEOUTS}, retry_strategy=strategy)


def patiently(action: Callable[[], T]) -> T:
    """What the action returns. If it fails in a way that may pass, it is tried again after a while."""
    for wait in WAITS:
        try:
            return action()
        except OSError as error:
            if _is_final(error):
                raise
        time.sleep(wait * random.uniform(0.5, 1))  # so that many readers do not come back at once
    return action()


def _is_final(error: OSError) -> bool:
    known = any(words in str(error) for words in REMEDIES if words != PASSING)
    return isinstance(error, FileNotFoundError | PermissionError) or known


@contextlib.contextmanager
def telling(where: object) -> Iterator[None]:
    """Errors of a place as `UserError`, with the place and what to do."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"there is no such file in '{where}': {error.filename or error}") from error
    except OSError as error:
        remedy = [remedy for words, remedy in REMEDIES.items() if words in str(error)]
        raise UserError(f"'{where}': {error}. {' '.join(remedy)}".strip()) from error
