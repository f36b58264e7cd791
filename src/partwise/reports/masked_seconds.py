"""How long a sum under masks takes on this machine (SecAgg+, `privacy.masked_client`), if nobody drops out.

Shares are made for as many neighbours as a client has. Masks are put on among a few clients, and their times are
scaled to all neighbours and clients.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from partwise.privacy import masked_server
from partwise.privacy.graphs import COMPLETE, MaskSettings, mask_settings
from partwise.privacy.masked_client import MaskedClient
from partwise.privacy.masked_round import RoundLetters
from partwise.privacy.sharing import combine
from partwise.reports.privacy_seconds import GROUP, REPEATS, WORDS, Seconds, timed

CONTEXT = b"measured"


def measure_masked(num_clients: int, num_words: int) -> Seconds:
    """A round of so many clients, with vectors of so many words."""
    settings, words = mask_settings(num_clients, CONTEXT), min(num_words, WORDS)
    share, directory = _sharing(settings)
    group = min(num_clients, GROUP)
    few = mask_settings(group, CONTEXT)
    mask, letters = _masking(group, words, few)
    opened = timed(lambda: masked_server.unmasked_sum(CONTEXT, *letters, few)) / group
    neighbours, longer = settings.degree + 1, num_words / words
    return Seconds(
        client=share + mask * longer * neighbours / group,
        server=num_clients * (opened * longer + directory) + _secrets(num_clients, settings),
        how=f"{group} clients, scaled to {num_clients:,}"
        + (f"; words scaled by {longer:.3g}" if longer > 1 else ""),
    )


def _sharing(settings: MaskSettings) -> tuple[float, float]:
    """Keys and shares for all neighbours, of a client; and the server's answer to one client."""
    number = settings.degree + 1
    clients = {str(each): MaskedClient(CONTEXT, str(each)) for each in range(number)}
    among = settings._replace(least=settings.threshold)
    advertised = {name: client.advertise() for name, client in clients.items()}
    answers = masked_server.directories(CONTEXT, advertised, among)
    server = timed(lambda: masked_server.directories(CONTEXT, advertised, among)) / number
    keys = timed(lambda: MaskedClient(CONTEXT, "0"))
    return keys + _least(
        [lambda n=name: clients[n].share(answers[n]) for name in list(clients)[:REPEATS]]
    ), server


def _masking(number: int, words: int, settings: MaskSettings) -> tuple[float, RoundLetters]:
    """To put on masks, of a client; and all letters of the round."""
    clients = {str(each): MaskedClient(CONTEXT, str(each)) for each in range(number)}
    advertised = {name: client.advertise() for name, client in clients.items()}
    answers = masked_server.directories(CONTEXT, advertised, settings)
    shared = {name: client.share(answers[name]) for name, client in clients.items()}
    answers = masked_server.deliveries(CONTEXT, advertised, shared, settings)
    vector, masked = np.zeros(words, np.uint32), {}

    def mask(name: str) -> None:
        masked[name] = clients[name].mask(answers[name], vector)

    least = _least([lambda name=name: mask(name) for name in clients])
    asked = masked_server.survivors(CONTEXT, advertised, shared, masked, settings)
    unmasking = {name: client.unmask(asked[name]) for name, client in clients.items()}
    return least, RoundLetters(advertised, shared, masked, unmasking)


def _least(calls: list[Callable[[], Any]]) -> float:
    """The least seconds of calls of which each can be made once."""
    found = []
    for call in calls:
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return min(found)


def _secrets(num_clients: int, settings: MaskSettings) -> float:
    """To put the clients' secrets together. In a complete graph all have the same holders, and the same weights."""
    holders = lambda call: range(1 + call, settings.threshold + 1 + call)
    one = _least([lambda call=call: combine(dict.fromkeys(holders(call), 1)) for call in range(REPEATS)])
    return one * (1 if num_clients <= COMPLETE else num_clients)
