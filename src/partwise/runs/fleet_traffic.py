"""The bytes of a task's real messages, for every client, and what a CDN's caches answer of them.

How a task's slices are served is `serving.way`, and bytes are counted as `selection.serving` does, without
headers. With `pregenerated`, a client takes whole pages of rows, hottest keys first, as `deployment.pages` writes
them. A page whose rows did not change from one version to the next is the same file, and stays in the caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from partwise.algorithm import Algorithm
from partwise.algorithms.entry import Prepared
from partwise.config.settings import Config
from partwise.data.ragged import owners, row_indices
from partwise.randomness import client_numbers
from partwise.selection.choose import Chosen, choose_all
from partwise.selection.keys import own_keys
from partwise.selection.serving import Demand, Sizes, serve
from partwise.server.round import sees_all_rows
from partwise.simulation.backend import costs_of

PREGENERATED = "pregenerated"
BANDS = (("hottest 1 %", 0.01), ("next 9 %", 0.1), ("other 90 %", 1.0))  # of the pages, hottest first


class Pages(NamedTuple):
    """The pages of a key space, hottest first."""

    heat: np.ndarray  # share of the clients that take it
    num_bytes: int
    change: bool  # whether every version changes all of them


class Messages(NamedTuple):
    """What tasks send. Arrays have a value for each client."""

    down: np.ndarray
    up: np.ndarray
    by_server: float | None  # bytes that the server itself sends for a task; None: all that go down
    each_version: float  # bytes that leave the server for every version, whoever asks
    pages: Mapping[str, Pages]


def messages_of(prepared: Prepared, config: Config) -> Messages:
    """The messages of a task's training clients, with the keys of the first round."""
    algorithm = prepared.build(prepared.rates)
    partition, way = algorithm.partition, config.serving.way
    sizes, chosen = costs_of(algorithm), _chosen(prepared, algorithm, config.seed)
    counts = {space: each.counts for space, each in chosen.items()}
    down, up = (
        _linear(sizes, way, counts, name, prepared.store.num_clients) for name in ("bytes_down", "bytes_up")
    )
    if way != PREGENERATED or not chosen:
        first, second = (serve(sizes, number, _nothing(sizes))[way].from_server for number in (0, 1))
        own = None if way in ("broadcast", "on_demand") or not chosen else float(second - first)
        return Messages(down, up, own, float(first), {})
    pages, taken = {}, np.zeros(prepared.store.num_clients)
    for space, each in chosen.items():
        rows = min(config.deploy.page_rows, partition.num_keys(space))
        heat, number = _pages(each, partition.num_keys(space), rows, algorithm.choose[space].name == "all")
        pages[space] = Pages(heat, rows * sizes.slices[space], sees_all_rows(algorithm))
        taken += number * pages[space].num_bytes
    return Messages(sizes.fixed + taken, up, float(sizes.fixed), 0.0, pages)


def _chosen(prepared: Prepared, algorithm: Algorithm, seed: int) -> dict[str, Chosen]:
    partition, store = algorithm.partition, prepared.store
    packed = store if store.packed() else store.gather(np.arange(store.num_clients))
    own, numbers = own_keys(packed, partition)[0], client_numbers(packed.client_ids)
    return choose_all(own, partition.all_keys, algorithm.choose, numbers, seed, 0)


def _nothing(sizes: Sizes) -> dict[str, Demand]:
    return {space: Demand(0, np.zeros(1, int)) for space in sizes.num_keys}


def _linear(
    sizes: Sizes, way: str, counts: Mapping[str, np.ndarray], name: str, num_clients: int
) -> np.ndarray:
    """Bytes of every client: what one without keys costs, and for each of its keys what one more costs."""
    cost = lambda demands: getattr(serve(sizes, 1, demands)[way], name)
    base, nothing = cost(_nothing(sizes)), _nothing(sizes)
    total = np.full(num_clients, float(base))
    for space, each in counts.items():
        total += each * float(cost(nothing | {space: Demand(1, np.ones(1, int))}) - base)
    return total


def _pages(chosen: Chosen, num_keys: int, page_rows: int, everything: bool) -> tuple[np.ndarray, np.ndarray]:
    """The heat of every page, and how many pages each client takes."""
    number, clients = -(-num_keys // page_rows), len(chosen.counts)
    if everything:
        return np.ones(number), np.full(clients, number)
    keys = chosen.keys[row_indices(chosen.starts, chosen.counts)]
    order = np.argsort(-np.bincount(keys, minlength=num_keys), kind="stable")
    page = np.empty(num_keys, np.int64)
    page[order] = np.arange(num_keys) // page_rows
    taken = np.unique(owners(chosen.counts) * number + page[keys])
    heat = np.bincount(taken % number, minlength=number) / max(clients, 1)
    return heat, np.bincount(taken // number, minlength=clients)


def cached(pages: Mapping[str, Pages], started: float, used: float, edges: int) -> dict[str, Any]:
    """What caches answer, for versions in which so many tasks start, of so many reports each: their hit share, and
    bytes of a version that they fetch from the server.

    Tasks come to one of `edges` places at random, each with a cache that never runs out of room. A page is in it
    from its first request there until a version changes the page.
    """
    bands = {name: np.zeros(2) for name, _ in BANDS}  # bytes asked, bytes missed
    for each in pages.values():
        asked = started * each.heat
        missed = edges * _misses(asked / edges, np.ones(1) if each.change else 1 - (1 - each.heat) ** used)
        place = (np.arange(len(each.heat)) + 0.5) / len(each.heat)
        band = np.searchsorted([most for _, most in BANDS], place)
        for number, (name, _) in enumerate(BANDS):
            bands[name] += each.num_bytes * np.array(
                [asked[band == number].sum(), missed[band == number].sum()]
            )
    asked, missed = sum(bands.values(), np.zeros(2))
    share = lambda pair: float(1 - pair[1] / pair[0]) if pair[0] else None
    return {
        "hit_share": share((asked, missed)),
        "hit_share_by_heat": {name: share(pair) for name, pair in bands.items()},
        "fetched_per_version": float(missed),
    }


def _misses(asked: np.ndarray, changes: np.ndarray) -> np.ndarray:
    """Misses of a cache in a version, for pages that are asked for so often on average (Poisson) and change with
    these chances.

    A page is not there when a version begins if it changed, or was not there and nobody asked: q = c + (1 - c) q
    exp(-m). Then the first request misses.
    """
    silent = np.exp(-asked)
    absent = np.divide(changes, 1 - (1 - changes) * silent, out=np.zeros_like(asked), where=asked > 0)
    return absent * (1 - silent)
