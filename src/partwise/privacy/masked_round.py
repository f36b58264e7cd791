"""All parties of a secure sum in one process: for simulations that ask for real cryptography, benchmarks and
tests."""

from __future__ import annotations

import resource
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from partwise.privacy import masked_server
from partwise.privacy.graphs import MaskSettings, mask_settings
from partwise.privacy.masked_client import MaskedClient


class Drops(NamedTuple):
    """The names of those who leave before each stage. Whoever has left does not come back."""

    advertise: Collection[str] = ()
    share: Collection[str] = ()
    mask: Collection[str] = ()
    unmask: Collection[str] = ()


NO_DROPS = Drops()


class RoundLetters(NamedTuple):
    """All that the server has got in a round, by stage and name."""

    advertised: dict[str, bytes]
    shared: dict[str, bytes]
    masked: dict[str, bytes]
    unmasking: dict[str, bytes]


def masked_sum(
    vectors: Mapping[str, np.ndarray],
    context: bytes,
    drop: Drops = NO_DROPS,
    settings: MaskSettings | None = None,
) -> np.ndarray:
    """The sum, modulo 2^32, of the uint32 vectors of those who do not leave before they upload. `TooFewError`
    if too few stay.

    Args:
        vectors: {name of a client: its vector}, all of one length.
        context: Names the run, the round and the attempt; different every time.
        drop: Who leaves before which stage.
        settings: By default those of `mask_settings` for so many clients.
    """
    settings = settings or default_settings(vectors, context)
    return masked_server.unmasked_sum(context, *masked_letters(vectors, context, drop, settings), settings)


def default_settings(vectors: Mapping[str, np.ndarray], context: bytes) -> MaskSettings:
    return mask_settings(len(vectors), b"graph of " + context)


def masked_letters(
    vectors: Mapping[str, np.ndarray], context: bytes, drop: Drops, settings: MaskSettings
) -> RoundLetters:
    """What the server gets from all clients, up to the last letter."""
    clients = {name: MaskedClient(context, name) for name in vectors}
    left = set(drop.advertise)
    advertised = {name: clients[name].advertise() for name in clients if name not in left}
    answers = masked_server.directories(context, advertised, settings)
    left |= set(drop.share)
    shared = {name: clients[name].share(letter) for name, letter in answers.items() if name not in left}
    answers = masked_server.deliveries(context, advertised, shared, settings)
    left |= set(drop.mask)
    masked = {
        name: clients[name].mask(letter, vectors[name])
        for name, letter in answers.items()
        if name not in left
    }
    answers = masked_server.survivors(context, advertised, shared, masked, settings)
    left |= set(drop.unmask)
    unmasking = {name: clients[name].unmask(letter) for name, letter in answers.items() if name not in left}
    return RoundLetters(advertised, shared, masked, unmasking)


def measure_round(n: int, words: int) -> dict[str, float]:
    """What a round of n clients takes, as processor time: of all parties, of one client, and to unmask. A
    tenth of the clients drop out before they upload, and three more before the sum is unmasked."""
    rng = np.random.default_rng(0)
    vectors = {str(number): rng.integers(0, 2**32, words, np.uint32) for number in range(n)}
    names, context, late = list(vectors), b"benchmark", n // 10
    settings = default_settings(vectors, context)
    drop = Drops(mask=names[:late], unmask=names[late : late + 3])
    times = [time.process_time()]
    letters = masked_letters(vectors, context, drop, settings)
    times.append(time.process_time())
    total = masked_server.unmasked_sum(context, *letters, settings)
    times.append(time.process_time())
    if (total != sum(vectors[name] for name in names[late:])).any():
        raise RuntimeError("the secure sum is not the sum")
    return {
        "seconds": times[2] - times[0],
        "client_ms": 1e3 * (times[1] - times[0]) / n,
        "unmask_seconds": times[2] - times[1],
        "degree": settings.degree,
        "threshold": settings.threshold,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "upload_ratio": sum(len(sent[names[-1]]) for sent in letters) / (4 * words),
    }
