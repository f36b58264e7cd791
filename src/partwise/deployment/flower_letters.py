"""What a server and a node write to each other through Flower: letters with work, and replies with reports.

Flower carries messages from its ServerApp to nodes, and one reply to each. So a letter has all that a device would
ask a server for: what the run is, the answer to a poll, and the files with the slices. The reply has what it
would send: its clients, whether it may work, and its reports. A letter needs nothing from an earlier one, as Flower
may start a new process for each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from partwise.deployment.jobs import Wait, Work
from partwise.deployment.link import PROTOCOL, Offer, read_answer, write_answer
from partwise.types import UserError

RECORD, FILES = "partwise", "partwise.files"


class Letter(NamedTuple):
    """From the server to a node."""

    offer: Offer
    answer: Work | Wait
    joined: str  # digest of the names of the node's clients that the server knows
    files: Mapping[str, bytes] = {}


class Reply(NamedTuple):
    """From a node to the server."""

    clients: list[str] | None = None  # None: those that the server knows
    ready: bool = True
    most: int = 1
    status: Mapping[str, Any] = {}
    reports: tuple[bytes, ...] = ()
    declined: tuple[str, ...] = ()  # tasks that it will not do


def names_digest(names: Iterable[str]) -> str:
    """A digest of a set of clients."""
    return hashlib.sha256(json.dumps(sorted(names)).encode()).hexdigest()


def write_letter(letter: Letter) -> RecordDict:
    """A letter as Flower's records. Files are arrays: Flower keeps equal ones once, and sends them in parts."""
    said = {
        "offer": json.dumps(letter.offer._asdict()).encode(),
        "answer": write_answer(letter.answer),
        "joined": letter.joined,
    }
    files = {name: Array(np.frombuffer(data, np.uint8)) for name, data in letter.files.items()}
    return RecordDict({RECORD: ConfigRecord(said), FILES: ArrayRecord(files)})


def read_letter(content: RecordDict) -> Letter:
    """The inverse of `write_letter`."""
    said = _said(content)
    try:
        told = json.loads(said["offer"])
        if told.get("protocol") != PROTOCOL:
            raise UserError(
                f"the letter is of protocol {told.get('protocol')}, and this is {PROTOCOL}: install the same "
                f"version of partwise at the SuperLink and at its nodes"
            )
        offer = Offer(**{name: told[name] for name in Offer._fields})
        arrays = cast(ArrayRecord, content.get(FILES, ArrayRecord()))
        files = {name: array.numpy().tobytes() for name, array in arrays.items()}
        return Letter(offer, read_answer(said["answer"]), str(said["joined"]), files)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"a letter from the SuperLink cannot be read: {error}") from None


def write_reply(reply: Reply) -> RecordDict:
    """A reply as Flower's records."""
    rest = {name: getattr(reply, name) for name in ("clients", "ready", "most", "declined")}
    rest["status"] = dict(reply.status)
    said = {"said": json.dumps(rest).encode(), "reports": list(reply.reports)}
    return RecordDict({RECORD: ConfigRecord(said)})


def read_reply(content: RecordDict) -> Reply:
    """The inverse of `write_reply`."""
    said = _said(content)
    try:
        rest = json.loads(said["said"])
        clients, most, reports = rest["clients"], int(rest["most"]), tuple(said["reports"])
        if not (clients is None or all(isinstance(each, str) and each.isprintable() for each in clients)):
            raise ValueError("its clients are not names")
        if not all(isinstance(each, bytes) for each in reports):
            raise ValueError("its reports are not bytes")
        declined = tuple(rest["declined"])
        if not all(isinstance(each, str) for each in declined):
            raise ValueError("its declined tasks are not names")
        ready, status = bool(rest["ready"]), dict(rest["status"])
        return Reply(clients, ready, min(max(1, most), 1000), status, reports, declined)
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"a node's reply cannot be read: {error}") from None


def _said(content: RecordDict) -> Mapping[str, Any]:
    record = content.get(RECORD)
    if not isinstance(record, ConfigRecord):
        raise UserError("the message is not partwise's: it has no record 'partwise'")
    return record
