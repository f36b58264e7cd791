"""A device's way to its run through Flower. `deployment.flower_letters` says what is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from partwise.deployment.files import fits
from partwise.deployment.flower_letters import Letter, Reply, names_digest
from partwise.deployment.http_files import HttpFiles
from partwise.deployment.jobs import Wait, Work
from partwise.deployment.link import Offer, UnreachableError
from partwise.deployment.page_reader import Fetch
from partwise.deployment.ranges import Piece
from partwise.server.round import Accepted, Refused
from partwise.types import UserError


class Mail(Protocol):
    """Where letters come from."""

    def take(self) -> Letter | Wait:
        """The next letter; a `Wait` if none comes soon, or none will come any more."""
        ...

    def answer(self, reply: Reply) -> None:
        """Reply to the letter that was taken last."""
        ...


class FlowerLink:
    """`deployment.link.Link` through Flower.

    A poll returns the work of a letter. The next poll replies to it, with all reports since, and takes another.

    Args:
        mail: Where letters come from.
        authority: A file with the certificate that signed that of the host of files, if letters do not have them.
    """

    def __init__(self, mail: Mail, authority: str | Path | None = None):
        self._mail, self._authority = mail, authority
        self._letter: Letter | None = None
        self._given = False  # whether the letter's work was given out
        self._clients: set[str] = set()
        self._reply = Reply()
        self.bytes_down = self.bytes_up = 0  # of files and reports

    def offer(self) -> Offer:
        """As `Link.offer`."""
        if self._letter is None:
            self._take()
        if self._letter is None:
            raise UnreachableError("the SuperLink has no letter for this node yet")
        return self._letter.offer

    def join(self, clients: Iterable[str]) -> list[str]:
        """As `Link.join`. The server hears of it with the next reply; if it refuses, that is in its log."""
        self._clients |= set(clients)
        return []

    def poll(self, ready: bool, most: int, status: Mapping[str, Any] | None = None) -> Work | Wait:
        """As `Link.poll`."""
        self._reply = self._reply._replace(ready=ready, most=most, status=dict(status or {}))
        if self._letter and self._given:
            self._answer()
        if self._letter is None:
            wait = self._take()
            if wait:
                return wait
        assert self._letter is not None  # it was taken
        self._given = True
        return self._letter.answer

    def slices(self, task: str, keys: Mapping[str, np.ndarray]) -> bytes | Refused:
        """Not through Flower: every question would be a message of its own."""
        raise UserError(ON_DEMAND)

    def private(self, task: str, question: bytes) -> bytes | Refused:
        """As `Link.private`: there is no helper behind a SuperLink."""
        raise UserError("serving.way = private is not for Flower: serve the run over HTTP, with a helper")

    def files(self, url: str) -> Fetch:
        """As `Link.files`. Without a URL they are in the letter."""
        return HttpFiles(url, authority=self._authority) if url else self

    def get_many(self, bounds: Mapping[str, int]) -> dict[str, bytes]:
        """As `Fetch.get_many`, from the letter."""
        files = self._letter.files if self._letter else {}
        for name, bound in bounds.items():
            if name not in files or len(files[name]) > bound or not fits(name, files[name]):
                raise UserError(f"the file '{name}' is not in the letter, or it is not what its name says")
        return {name: files[name] for name in bounds}

    def get_ranges(self, name: str, pieces: Iterable[Piece]) -> tuple[list[bytes], int]:
        """As `Fetch.get_ranges`, from the letter."""
        data = self.get_many({name: 1 << 62})[name]
        return [data[piece.begin : piece.end] for piece in pieces], len(data)

    def report(self, report: bytes) -> Accepted | Refused:
        """As `Link.report`. It leaves with the next reply, and no answer comes back."""
        self._reply = self._reply._replace(reports=(*self._reply.reports, report))
        return Accepted("", valid=True)

    def decline(self, task: str, reason: str) -> Refused | None:
        """As `Link.decline`. It leaves with the next reply, and no answer comes back."""
        self._reply = self._reply._replace(declined=(*self._reply.declined, task))
        return None

    def send_letter(self, task: str, stage: int, letter: bytes) -> Refused | None:
        """Not through Flower: there is no conversation within a round."""
        raise UserError(MASKED_SUMS)

    def answer(self, task: str, stage: int) -> bytes | Wait | Refused:
        """As `send_letter`."""
        raise UserError(MASKED_SUMS)

    def close(self) -> None:
        """Reply to the last letter."""
        if self._letter:
            self._answer()

    def _take(self) -> Wait | None:
        """Take the next letter. Returns why there is none."""
        found = self._mail.take()
        if isinstance(found, Wait):
            return found
        self._letter, self._given = found, False
        self.bytes_down += sum(map(len, found.files.values()))
        return None

    def _answer(self) -> None:
        assert self._letter is not None  # the one that is answered
        new = names_digest(self._clients) != self._letter.joined
        self._mail.answer(self._reply._replace(clients=sorted(self._clients) if new else None))
        self.bytes_up += sum(map(len, self._reply.reports))
        self._letter, self._reply = None, self._reply._replace(reports=(), declined=())


MASKED_SUMS = (
    "privacy.sums = masked is not for Flower: its rounds have four stages, and a node answers once. Serve "
    "the run over HTTP (partwise serve)"
)
ON_DEMAND = (
    "through Flower, slices are files: set serving.way to broadcast (the letters have them), or to pregenerated "
    "with a folder of files that nodes can reach (--files and --place)"
)
