"""A resident node of a Flower federation: letters and replies over the SuperLink's Fleet API, in one process.

Flower's own SuperNode starts a new process for every message, in which nothing is compiled yet. This node stays. It
also runs no code that others send: messages that are not partwise's are refused.

It uses parts of Flower that are not promised to stay, so the extra `flower` asks for the version that they are of.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from partwise.checkpoint import read_file
from partwise.deployment.flower_letters import Letter, Reply, read_letter, write_reply
from partwise.deployment.jobs import Wait
from partwise.deployment.link import UnreachableError
from partwise.types import UserError

log = logging.getLogger("partwise.agent")

SCHEMES = {"flower+https": True, "flower+http": False}  # whether there is TLS
HOLD = 10.0  # seconds that a node waits for a letter before it looks whether it is to stop
SHORTEST, LONGEST = 0.05, 1.0  # seconds between two looks for a letter
TROUBLE = (httpx.HTTPError, RuntimeError, OSError)


class Fleet(NamedTuple):
    """What a node can do at the SuperLink."""

    receive: Callable[[], Any]
    send: Callable[..., tuple[set[str], str]]
    pull: Callable[[int, str], bytes]
    push: Callable[[int, str, str, bytes], None]
    confirm: Callable[[int, str], None]


class FleetMail:
    """`deployment.flower_link.Mail` at a SuperLink.

    Args:
        fleet: What it can do there.
        hold: Seconds that it waits for a letter.
    """

    def __init__(self, fleet: Fleet, hold: float = HOLD):
        self._fleet, self._hold = fleet, hold
        self._message: Message | None = None

    def take(self) -> Letter | Wait:
        """As `Mail.take`."""
        end, pause = time.monotonic() + self._hold, SHORTEST
        while time.monotonic() < end:
            message = self._received()
            if message is not None:
                self._message = message
                try:
                    return read_letter(message.content)
                except UserError as error:
                    log.warning("a message of run %d is refused: %s", message.metadata.run_id, error)
                    self._send(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)))
            time.sleep(pause)
            pause = min(LONGEST, pause * 1.5)
        return Wait(SHORTEST)

    def answer(self, reply: Reply) -> None:
        """As `Mail.answer`. A reply to a run that is over is not sent."""
        self._send(write_reply(reply))

    def _received(self) -> Message | None:
        try:
            found = self._fleet.receive()
            if found is None:
                return None
            message, tree = found
            run = message.metadata.run_id
            whole = pull_and_inflate_object_from_tree(
                tree,
                lambda name: self._fleet.pull(run, name),
                lambda name: self._fleet.confirm(run, name),
                return_type=Message,
                initial_backoff=SHORTEST,
            )
        except RunNotRunningException:
            return None
        except TROUBLE as error:
            raise UnreachableError(f"the SuperLink does not answer: {error}") from None
        whole.metadata.__dict__["_message_id"] = tree.object_id
        return whole

    def _send(self, content: RecordDict | Error) -> None:
        assert self._message is not None  # it replies to one
        reply = Message(content, reply_to=self._message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        run, self._message = reply.metadata.run_id, None
        try:
            with no_object_id_recompute():
                wanted, session = self._fleet.send(reply, get_object_tree(reply), 0.0)
                push = lambda name, data: self._fleet.push(run, session, name, data)
                push_objects(get_all_nested_objects(reply), push, object_ids_to_push=wanted)
        except RunNotRunningException:
            log.info("Flower's run %d is over: the last reply was not sent", run)
        except TROUBLE as error:
            raise UnreachableError(f"the SuperLink did not take a reply: {error}") from None


@contextlib.contextmanager
def node_at(
    url: str, authority: str | Path | None = None, key: str | Path | None = None
) -> Iterator[FleetMail]:
    """The mail of a node at a SuperLink, for as long as the node is there.

    Args:
        url: `flower+https://HOST:PORT`, or `flower+http://...` without TLS.
        authority: A file with the certificate that signed the SuperLink's.
        key: An ECDSA key in OpenSSH's form that is registered at the SuperLink. Without one, the node is a new one
            each time.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.hostname or not parts.port:
        raise UserError(f"the SuperLink's URL must be as flower+https://example.org:8000, not '{url}'")
    tls = SCHEMES[parts.scheme]
    if key and not tls:
        raise UserError(f"Flower takes keys of nodes over TLS only: give flower+https://, not '{url}'")
    keys = _keys(key) if key else None
    trusted = read_file(Path(authority)) if authority else None
    try:
        with http_request_response(parts.netloc, not tls, trusted, keys) as found:
            node, receive, send, _, _, pull, push, confirm = found
            log.info("this is node %d", node)
            yield FleetMail(Fleet(receive, send, pull, push, confirm))
    except SystemExit:
        raise UserError(
            f"the SuperLink at {url} does not take this node: see the lines above. Is the key registered (`flwr "
            f"supernode register`), and does the SuperLink use TLS?"
        ) from None


def _keys(path: str | Path) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]:
    try:
        key = load_ssh_private_key(read_file(Path(path)), None)
    except ValueError as error:
        raise UserError(f"'{path}' is not a private key in OpenSSH's form: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"'{path}' is not an ECDSA key, which Flower needs: `ssh-keygen -t ecdsa -b 384`")
    return key, key.public_key()
