"""The letters of a secure sum: bytes with a fixed layout, which say for whom and for which round they are.

A letter is a stamp of 16 bytes and a body. The stamp is a hash of the round's context, the stage, the
client's name and the body: letters that were cut, changed on the way or meant for another client or round are
refused. It is no signature: whoever can write letters can stamp them. Numbers are little-endian, positions
have 4 bytes, and clients are listed in rising order of position, which is their place among the sorted names
of all who advertised.

| stage       | from   | body |
|-------------|--------|------|
| `advertise` | client | public mask key (32), public letter key (32) |
| `directory` | server | threshold (4), own position (4), then of every neighbour: position (4), its two keys (64) |
| `share`     | client | commitment to its own mask (16), then for every neighbour: encrypted shares (50) |
| `deliver`   | server | of every neighbour who shared: position (4), encrypted shares for this client (50) |
| `mask`      | client | the masked vector, uint32 |
| `survivors` | server | number of those who uploaded (4), their positions, then the positions of those who dropped out |
| `unmask`    | client | stamp of the letter it answers (16), then 17 bytes for each in that letter: a share of the own mask of those who uploaded, of the key seed of those who dropped out |
"""  # noqa: E501

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from partwise.privacy.sharing import SHARE_BYTES
from partwise.types import UserError

STAMP_BYTES = 16
KEYS_BYTES = 64
COMMITMENT_BYTES = 16
SEALED_BYTES = 2 * SHARE_BYTES + 16
_POSITION = np.dtype("<u4")


class LetterSizes(NamedTuple):
    """Bytes of a client's letters in a round."""

    up: Mapping[str, int]  # stage -> bytes that the client sends
    down: Mapping[str, int]  # stage -> bytes that it is sent


def letter_sizes(num_neighbours: int, num_words: int) -> LetterSizes:
    """The letters of a client with so many neighbours, if nobody drops out."""
    keys, shares = 4 + KEYS_BYTES, 4 + SEALED_BYTES
    up = {
        "advertise": KEYS_BYTES,
        "share": COMMITMENT_BYTES + SEALED_BYTES * num_neighbours,
        "mask": 4 * num_words,
        "unmask": STAMP_BYTES + SHARE_BYTES * (num_neighbours + 1),
    }
    down = {
        "directory": 8 + keys * num_neighbours,
        "deliver": shares * num_neighbours,
        "survivors": 4 + 4 * (num_neighbours + 1),
    }
    stamped_size = lambda sizes: {stage: STAMP_BYTES + size for stage, size in sizes.items()}
    return LetterSizes(stamped_size(up), stamped_size(down))


class TooFewError(UserError):
    """So few clients are left that the round must stop. Nothing of it may be used or published."""


def stamped(context: bytes, stage: str, name: str, body: bytes) -> bytes:
    return stamp(context, stage, name, body) + body


def stamp(context: bytes, stage: str, name: str, body: bytes | memoryview) -> bytes:
    """What a letter of this client, stage and round with this body begins with."""
    found = hashlib.blake2b(digest_size=STAMP_BYTES, person=b"secure sum 1")
    for part in (context, stage.encode(), name.encode()):
        found.update(len(part).to_bytes(4, "little") + part)
    found.update(body)
    return found.digest()


def opened(context: bytes, stage: str, name: str, letter: bytes) -> memoryview:
    """The body of a letter, without a copy, if it is one of this client, stage and round."""
    if not isinstance(letter, bytes | bytearray | memoryview):
        raise UserError(f"client '{name}': a letter is bytes, not {type(letter).__name__}")
    body = memoryview(letter)[STAMP_BYTES:]
    if len(letter) < STAMP_BYTES or bytes(letter[:STAMP_BYTES]) != stamp(context, stage, name, body):
        raise UserError(
            f"client '{name}': this is not the letter '{stage}' of this client in this round, or it was cut or "
            f"changed on the way: send it again as it was made"
        )
    return body


def cut(name: str, stage: str, body: memoryview, *sizes: int) -> list[bytes]:
    """The first parts of a body, of these sizes, and the rest."""
    ends = np.cumsum([0, *sizes]).tolist()
    if len(body) < ends[-1]:
        raise wrong_length(name, stage, len(body), f"at least {ends[-1]}")
    parts = [bytes(body[a:b]) for a, b in pairwise(ends)]
    return [*parts, bytes(body[ends[-1] :])]


def entries(name: str, stage: str, data: bytes, size: int) -> list[bytes]:
    """Parts of one size."""
    if len(data) % size:
        raise wrong_length(name, stage, len(data), f"a multiple of {size}")
    return [data[start : start + size] for start in range(0, len(data), size)]


def wrong_length(name: str, stage: str, given: int, expected: object) -> UserError:
    return UserError(
        f"client '{name}': the letter '{stage}' has {given:,} bytes where {expected} were expected: both sides "
        f"must run the same version and round"
    )


def number_bytes(number: int) -> bytes:
    return number.to_bytes(4, "little")


def number_from(data: bytes) -> int:
    return int.from_bytes(data, "little")


def positions_bytes(positions: Iterable[int]) -> bytes:
    return np.fromiter(positions, _POSITION).tobytes()


def positions_from(data: bytes) -> list[int]:
    return np.frombuffer(data, _POSITION).tolist()


def with_positions(name: str, stage: str, data: bytes, size: int) -> Iterator[tuple[int, bytes]]:
    """Entries that begin with a position, which must rise."""
    last = -1
    for entry in entries(name, stage, data, 4 + size):
        position = number_from(entry[:4])
        if position <= last:
            raise UserError(
                f"client '{name}': the letter '{stage}' lists position {position} after {last}: clients are listed "
                f"once, in order"
            )
        last = position
        yield position, entry[4:]
