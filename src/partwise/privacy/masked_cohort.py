"""Who is where in a round of the secure sum, read from the letters that the server has, with every letter
checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from partwise.privacy.graphs import MaskSettings, harary_graph
from partwise.privacy.masked_letters import (
    COMMITMENT_BYTES,
    KEYS_BYTES,
    SEALED_BYTES,
    STAMP_BYTES,
    TooFewError,
    entries,
    number_bytes,
    opened,
    positions_bytes,
    stamped,
    wrong_length,
)
from partwise.privacy.sharing import SHARE_BYTES
from partwise.types import UserError

Letters = Mapping[str, bytes]  # of one stage, by the client's name


class MaskedCohort(NamedTuple):
    """Those who advertised, by position: names, keys and neighbours. Then the positions of those who shared,
    and of those of them who uploaded."""

    context: bytes
    settings: MaskSettings
    names: list[str]
    keys: list[bytes]
    neighbours: tuple[tuple[int, ...], ...]
    sharing: frozenset[int] = frozenset()
    uploaded: frozenset[int] = frozenset()

    def positions(self, names: Collection[str], what: str) -> frozenset[int]:
        place = {name: position for position, name in enumerate(self.names)}
        if strangers := sorted(set(names) - place.keys()):
            raise UserError(f"client '{strangers[0]}' {what}, but has not advertised keys in this round")
        return frozenset(place[name] for name in names)

    def asked(self, position: int) -> tuple[list[int], list[int]]:
        """Of a client and its neighbours, those who uploaded and those who dropped out after they had
        shared."""
        around = [p for p in sorted((position, *self.neighbours[position])) if p in self.sharing]
        return [p for p in around if p in self.uploaded], [p for p in around if p not in self.uploaded]


def advertised_cohort(context: bytes, advertised: Letters, settings: MaskSettings) -> MaskedCohort:
    """Those who advertised. Positions are those of the sorted names."""
    _check_number(len(advertised), settings, "have advertised keys")
    names = sorted(advertised)
    keys = [opened_keys(context, name, advertised[name]) for name in names]
    single = [key for each in keys for key in (each[: KEYS_BYTES // 2], each[KEYS_BYTES // 2 :])]
    if len(set(single)) < len(single):
        raise UserError("two clients of this round have the same key: each must make its own, every round")
    graph = harary_graph(settings.seed + context, len(names), settings.degree)
    return MaskedCohort(context, settings, names, keys, graph)


def sharing_cohort(
    context: bytes, advertised: Letters, shared: Letters, settings: MaskSettings
) -> MaskedCohort:
    """The same, with those who shared."""
    cohort = advertised_cohort(context, advertised, settings)
    sharing = cohort.positions(shared, "has sent shares")
    _check_number(len(sharing), settings, "have sent shares")
    for position in sharing:
        staying = 1 + sum(other in sharing for other in cohort.neighbours[position])
        if staying < settings.threshold:
            raise TooFewError(
                f"only {staying} of client '{cohort.names[position]}' and its neighbours have sent shares, and "
                f"{settings.threshold} are needed: start the round again"
            )
    return cohort._replace(sharing=sharing)


def uploaded_cohort(
    context: bytes,
    advertised: Letters,
    shared: Letters,
    uploaded: Collection[str],
    settings: MaskSettings,
) -> MaskedCohort:
    """The same, with those who uploaded."""
    cohort = sharing_cohort(context, advertised, shared, settings)
    positions = cohort.positions(uploaded, "has uploaded")
    if early := sorted(positions - cohort.sharing):
        raise UserError(f"client '{cohort.names[early[0]]}' has uploaded, but has not sent shares before")
    _check_number(len(positions), settings, "have uploaded")
    return cohort._replace(uploaded=positions)


def _check_number(number: int, settings: MaskSettings, what: str) -> None:
    if number < max(settings.least, settings.threshold):
        raise TooFewError(
            f"only {number:,} clients {what}, and {max(settings.least, settings.threshold):,} are needed: the "
            f"round stops without a sum. Start it again, with more clients or more time"
        )


def opened_keys(context: bytes, name: str, letter: bytes) -> bytes:
    """The public keys that a client advertised."""
    body = bytes(opened(context, "advertise", name, letter))
    if len(body) != KEYS_BYTES:
        raise wrong_length(name, "advertise", len(body), KEYS_BYTES)
    return body


def opened_share(context: bytes, name: str, letter: bytes, num_neighbours: int) -> tuple[bytes, list[bytes]]:
    """The commitment of a client, and what it has sealed for each neighbour."""
    body = bytes(opened(context, "share", name, letter))
    expected = COMMITMENT_BYTES + SEALED_BYTES * num_neighbours
    if len(body) != expected:
        raise wrong_length(name, "share", len(body), expected)
    return body[:COMMITMENT_BYTES], entries(name, "share", body[COMMITMENT_BYTES:], SEALED_BYTES)


def opened_vector(context: bytes, name: str, letter: bytes, num_words: int) -> np.ndarray:
    """A masked vector, without a copy."""
    body = opened(context, "mask", name, letter)
    if len(body) != 4 * num_words:
        raise wrong_length(name, "mask", len(body), f"{4 * num_words:,}")
    return np.frombuffer(body, "<u4")


def opened_unmasking(context: bytes, name: str, letter: bytes, asked: bytes) -> list[bytes]:
    """The shares of a client, in the order of the letter `survivors` that it was asked with."""
    body = bytes(opened(context, "unmask", name, letter))
    if body[:STAMP_BYTES] != asked[:STAMP_BYTES]:
        raise UserError(
            f"client '{name}' has answered another list of those who uploaded: take no uploads once the list "
            f"is sent"
        )
    expected = STAMP_BYTES + SHARE_BYTES * (len(asked) - STAMP_BYTES - 4) // 4
    if len(body) != expected:
        raise wrong_length(name, "unmask", len(body), expected)
    return entries(name, "unmask", body[STAMP_BYTES:], SHARE_BYTES)


def survivors_letter(cohort: MaskedCohort, position: int) -> bytes:
    """What a client who uploaded is asked with."""
    uploaded, dropped = cohort.asked(position)
    body = number_bytes(len(uploaded)) + positions_bytes([*uploaded, *dropped])
    return stamped(cohort.context, "survivors", cohort.names[position], body)
