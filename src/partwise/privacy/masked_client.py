"""A client of the secure sum (SecAgg+, Bell et al., CCS 2020, against an honest but curious server): the
server gets the sum of the vectors of those who stay, and nothing else about any one of them.

The vector is hidden under a mask for every neighbour, which the neighbour subtracts, and under a mask of its
own. Both can be removed from the sum with the help of `threshold` neighbours: the own mask of a client who
uploaded, or the masks it has with neighbours if it did not. Nobody may remove both, so a client answers once,
and gives one of the two shares that it holds of each neighbour. `masked_letters` has the layout of letters.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from partwise.privacy import masks
from partwise.privacy.masked_letters import (
    COMMITMENT_BYTES,
    KEYS_BYTES,
    SEALED_BYTES,
    STAMP_BYTES,
    TooFewError,
    cut,
    number_from,
    opened,
    positions_from,
    stamp,
    stamped,
    with_positions,
    wrong_length,
)
from partwise.privacy.sharing import SECRET_BYTES, SHARE_BYTES, share_to_bytes, split
from partwise.types import UserError

STAGES = ("advertise", "share", "mask", "unmask", "end")


class Neighbour(NamedTuple):
    """Another client with which this one has a mask. `letter_key` is the key of letters between the two."""

    keys: bytes
    letter_key: bytes

    @property
    def mask_key(self) -> bytes:
        return self.keys[: masks.PUBLIC_BYTES]


class HeldShares(NamedTuple):
    """What a client keeps of another one's two secrets, as bytes."""

    own_mask: bytes
    key_seed: bytes


class MaskedClient:
    """One client in one round: call `advertise`, `share`, `mask` and `unmask`, each once, with what the
    server answers in between. A letter that is refused may be replaced by the right one. Keep what was
    returned if it may have to be sent again, and make a new client for a new round or another attempt.

    Args:
        context: Names the run, the round and the attempt. It must be different every time.
        name: The client's name, under which the server has it.
        random: `number -> bytes`, from the operating system. Anything else is for tests.
    """

    def __init__(self, context: bytes, name: str, random: Callable[[int], bytes] = os.urandom):
        self._context, self._name, self._random = context, name, random
        self._stage = "advertise"
        self._own_mask, self._key_seed = random(SECRET_BYTES), random(SECRET_BYTES)
        self._mask_key = masks.mask_key(self._key_seed, context)
        self._letter_key = masks.private_key(random(masks.PUBLIC_BYTES))
        self._keys = masks.public_bytes(self._mask_key) + masks.public_bytes(self._letter_key)
        self._position, self._threshold = -1, 0
        self._neighbours: dict[int, Neighbour] = {}
        self._held: dict[int, HeldShares] = {}  # by position; of itself too

    def advertise(self) -> bytes:
        """Stage 0: the public keys of this round."""
        self._must_be_at("advertise")
        return self._answer("advertise", self._keys)

    def share(self, directory: bytes) -> bytes:
        """Stage 1: given the keys of its neighbours, shares of its two secrets, encrypted for each of
        them."""
        self._must_be_at("share")
        self._read_directory(directory)
        positions = sorted([*self._neighbours, self._position])
        holders = [position + 1 for position in positions]
        parts = [
            split(secret, holders, self._threshold, self._random)
            for secret in (self._own_mask, self._key_seed)
        ]
        shares = {
            position: HeldShares(share_to_bytes(own_mask), share_to_bytes(key_seed))
            for position, own_mask, key_seed in zip(positions, *parts, strict=True)
        }
        self._held = {self._position: shares.pop(self._position)}
        body = [commitment(self._own_mask, self._context)]
        body += [self._sealed(self._neighbours[position], each) for position, each in shares.items()]
        return self._answer("share", b"".join(body))

    def mask(self, shares: bytes, vector: np.ndarray) -> bytes:
        """Stage 2: given the shares that neighbours sent to it, the masked vector. Neighbours who sent none
        have left, and there is no mask with them."""
        self._must_be_at("mask")
        if vector.dtype != np.uint32 or vector.ndim != 1 or not vector.size:
            raise UserError(
                f"the vector of a secure sum is one line of uint32, not {vector.dtype} of shape {vector.shape}"
            )
        held = self._read_shares(shares)
        letter = np.empty(STAMP_BYTES + 4 * len(vector), np.uint8)
        hidden = letter[STAMP_BYTES:].view(masks.WORD)
        hidden[:] = vector
        masks.apply_masks(hidden, *self._mask_seeds(list(held)))
        mark = stamp(self._context, "mask", self._name, letter.data[STAMP_BYTES:])
        letter[:STAMP_BYTES] = np.frombuffer(mark, np.uint8)
        self._held |= held
        self._stage = "unmask"
        return letter.tobytes()

    def unmask(self, survivors: bytes) -> bytes:
        """Stage 3: given who uploaded and who dropped out, the shares with which the sum is unmasked."""
        self._must_be_at("unmask")
        uploaded, dropped = self._read_survivors(survivors)
        body = bytes(survivors[:STAMP_BYTES])
        body += b"".join(self._held[position].own_mask for position in uploaded)
        body += b"".join(self._held[position].key_seed for position in dropped)
        self._held = {}
        return self._answer("unmask", body)

    def _must_be_at(self, stage: str) -> None:
        if self._stage != stage:
            raise UserError(
                f"client '{self._name}' was asked to {stage}, but its next step is '{self._stage}': every step is "
                f"answered once in a round. Send again what it returned, or start another attempt"
            )

    def _answer(self, stage: str, body: bytes) -> bytes:
        self._stage = STAGES[STAGES.index(stage) + 1]
        return stamped(self._context, stage, self._name, body)

    def _error(self, text: str) -> UserError:
        return UserError(f"client '{self._name}' leaves the round: {text}")

    def _read_directory(self, letter: bytes) -> None:
        body = opened(self._context, "directory", self._name, letter)
        threshold, position, rest = cut(self._name, "directory", body, 4, 4)
        found = dict(with_positions(self._name, "directory", rest, KEYS_BYTES))
        self._threshold, self._position = number_from(threshold), number_from(position)
        if self._position in found:
            raise self._error("it is listed as its own neighbour")
        if not found:
            raise self._error("it has no neighbour, and a sum of its own vector alone is that vector")
        _check_keys(self._name, [self._keys, *found.values()])
        if not (len(found) + 1) / 2 < self._threshold <= len(found) + 1:
            raise self._error(
                f"its secrets would open with {self._threshold} shares of {len(found) + 1}: more than half are "
                f"needed, or a server could ask for both secrets"
            )
        self._neighbours = {p: Neighbour(keys, self._shared_letter_key(keys)) for p, keys in found.items()}

    def _shared_letter_key(self, keys: bytes) -> bytes:
        secret = masks.agreed(self._letter_key, keys[masks.PUBLIC_BYTES :])
        return masks.derived(secret, "letters", self._context, *sorted((self._keys, keys)))

    def _mask_seeds(self, positions: list[int]) -> tuple[list[bytes], list[bytes]]:
        """The seeds of the masks that are added, its own among them, and of those that are subtracted."""
        own = self._keys[: masks.PUBLIC_BYTES]
        seeds: dict[bool, list[bytes]] = {True: [masks.self_seed(self._own_mask, self._context)], False: []}
        for neighbour in (self._neighbours[position] for position in positions):
            seed = masks.pair_seed(self._mask_key, own, neighbour.mask_key, self._context)
            seeds[self._is_first(neighbour)].append(seed)
        return seeds[True], seeds[False]

    def _is_first(self, neighbour: Neighbour) -> bool:
        """Of two neighbours, the one with the smaller key adds their mask, and the other one subtracts it."""
        return self._keys < neighbour.keys

    def _sealed(self, neighbour: Neighbour, shares: HeldShares) -> bytes:
        about = masks.packed(self._context, self._keys, neighbour.keys)
        return masks.sealed(neighbour.letter_key, self._is_first(neighbour), b"".join(shares), about)

    def _unsealed(self, position: int, data: bytes) -> HeldShares:
        neighbour = self._neighbours[position]
        about = masks.packed(self._context, neighbour.keys, self._keys)
        text = masks.unsealed(neighbour.letter_key, not self._is_first(neighbour), data, about)
        if text is None:
            raise self._error(f"the shares from position {position} were changed or are not for it")
        return HeldShares(text[:SHARE_BYTES], text[SHARE_BYTES:])

    def _read_shares(self, letter: bytes) -> dict[int, HeldShares]:
        body = bytes(opened(self._context, "deliver", self._name, letter))
        found = dict(with_positions(self._name, "deliver", body, SEALED_BYTES))
        if strangers := sorted(found.keys() - self._neighbours.keys()):
            raise self._error(f"it got shares from position {strangers[0]}, which is no neighbour")
        if len(found) + 1 < self._threshold:
            raise self._too_few(len(found) + 1, "are left")
        return {position: self._unsealed(position, data) for position, data in found.items()}

    def _read_survivors(self, letter: bytes) -> tuple[list[int], list[int]]:
        body = opened(self._context, "survivors", self._name, letter)
        count, rest = cut(self._name, "survivors", body, 4)
        if len(rest) % 4 or len(rest) // 4 < number_from(count):
            raise wrong_length(self._name, "survivors", len(body), "4 for each position that it counts")
        positions = positions_from(rest)
        uploaded, dropped = positions[: number_from(count)], positions[number_from(count) :]
        if len(set(positions)) < len(positions):
            raise self._error("a neighbour is listed twice; both of its secrets are never given")
        if strangers := set(positions) - self._held.keys():
            raise self._error(f"it holds no share of position {min(strangers)}")
        if self._position not in uploaded:
            raise self._error("it has uploaded, and is said to have dropped out")
        if len(uploaded) < self._threshold:
            raise self._too_few(len(uploaded), "have uploaded")
        return uploaded, dropped

    def _too_few(self, number: int, what: str) -> TooFewError:
        return TooFewError(
            f"client '{self._name}' leaves the round: {number} of it and its neighbours {what}, and "
            f"{self._threshold} are needed"
        )


def commitment(own_mask: bytes, context: bytes) -> bytes:
    """What the server can compare the secret of a client's own mask with, and learns nothing from."""
    return masks.derived(own_mask, "commitment", context, length=COMMITMENT_BYTES)


def _check_keys(name: str, keys: list[bytes]) -> None:
    """No key twice: not even one client's two keys may be the same."""
    single = [key for each in keys for key in (each[: masks.PUBLIC_BYTES], each[masks.PUBLIC_BYTES :])]
    if len(set(single)) < len(single):
        raise UserError(f"client '{name}' leaves the round: two keys of the directory are the same")
