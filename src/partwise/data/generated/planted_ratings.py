"""Ratings drawn from a planted truth, in memory or written to disk one block of clients at a time.

Ratings are neither rounded nor clipped, so their noise is known exactly. The popularity of items follows a
Zipf distribution, the number of examples per client a log-normal one. Every block of clients has its own
random stream, so client k is the same for any number of clients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from partwise.data.build import join_blocks, write_store
from partwise.data.generated.rating_law import BLOCK_CLIENTS, EXAMPLES, Planted, Truth, draw_users, plant
from partwise.data.generated.streams import cut_block, log_normal_counts, stream
from partwise.data.ragged import owners, ranks
from partwise.data.store import ClientStore, open_store
from partwise.data.store_folder import Block
from partwise.types import UserError

DRAW_ROUNDS = 6
GUMBEL_ENTRIES = 1 << 22


@dataclasses.dataclass(frozen=True, eq=False)
class PlantedRatings:
    store: ClientStore  # columns item (key), rating; a client's rows are in random order
    truth: Truth


def planted_ratings(
    num_clients: int = 1000,
    num_items: int = 1000,
    rank: int = 8,
    noise: float = 0.5,
    mean_examples: float = 60,
    zipf: float = 0.8,
    sigma: float = 0.8,
    min_examples: int = 10,
    seed: int = 0,
    out: str | Path | None = None,
) -> PlantedRatings:
    """Generate clients in memory or, with `out`, into a folder on disk one block at a time.

    Args:
        num_clients: The number of clients.
        num_items: The number of items.
        rank: The size of the true vectors.
        noise: The standard deviation of a rating around the truth.
        mean_examples: The mean number of examples per client, before the numbers are limited to the range
            from `min_examples` to `num_items`.
        zipf: The popularity of item i falls as (i + 1)^-zipf.
        sigma: The spread of the logarithm of the examples per client.
        min_examples: The smallest number of examples of a client.
        seed: The seed of everything that is drawn.
        out: A new folder for the store; None for memory.

    Returns:
        The store and the truth from which it was drawn.
    """
    arguments = Planted(num_clients, num_items, rank, noise, mean_examples, zipf, sigma, min_examples, seed)
    truth = plant(arguments)
    vocabularies = {"item": np.arange(num_items)}
    info = {"source": "planted ratings", "arguments": dataclasses.asdict(arguments)}
    if out is not None:
        write_store(out, _blocks(truth), vocabularies, info)
        return open_planted(out)
    return PlantedRatings(join_blocks(_blocks(truth), vocabularies, info), truth)


def open_planted(path: str | Path) -> PlantedRatings:
    """Open a store written by `planted_ratings`. The truth is drawn again from its arguments."""
    store = open_store(path)
    if store.info.get("source") != "planted ratings":
        raise UserError(f"{path} was not written by planted_ratings: open it with open_store")
    return PlantedRatings(store, plant(Planted(**store.info["arguments"])))


def _blocks(truth: Truth) -> Iterator[Block]:
    """Draw every block completely and then cut it, so that the clients of the last block are the same too."""
    arguments = truth.arguments
    popularity = np.arange(1, arguments.num_items + 1, dtype=float) ** -arguments.zipf
    for block in range(-(-arguments.num_clients // BLOCK_CLIENTS)):
        rng = stream(arguments.seed, EXAMPLES, block)
        counts = _counts(rng, arguments)
        items = _distinct_items(rng, counts, popularity)
        users = np.repeat(draw_users(truth, block), counts, axis=0)
        ratings = np.einsum("nr,nr->n", users, truth.item_factors[items], dtype=float)
        ratings += arguments.noise * rng.standard_normal(len(items))
        columns = {"item": items.astype(np.int32), "rating": ratings.astype(np.float32)}
        yield cut_block(block, counts, columns, arguments.num_clients)


def _counts(rng: np.random.Generator, arguments: Planted) -> np.ndarray:
    median = arguments.mean_examples * np.exp(-(arguments.sigma**2) / 2)
    limits = (arguments.min_examples, arguments.num_items)
    return log_normal_counts(rng, BLOCK_CLIENTS, median, arguments.sigma, limits)


def _distinct_items(rng: np.random.Generator, counts: np.ndarray, popularity: np.ndarray) -> np.ndarray:
    """Weighted draws without replacement, packed by client and in random order, [sum of counts].

    Draws with replacement, without the repeats, are draws without replacement. Clients that still need items
    after a few rounds get the rest by the largest log-weight + Gumbel noise, which has the same distribution.
    """
    cumulative = np.cumsum(popularity / popularity.sum())
    cumulative[-1] = 1.0
    num_items = len(popularity)
    done, open_pairs, missing = [], np.empty(0, np.int64), counts.copy()
    for _ in range(DRAW_ROUNDS):
        client = np.repeat(np.arange(len(counts)), missing + missing // 2 + 2 * (missing > 0))
        drawn = client * num_items + np.searchsorted(cumulative, rng.random(len(client)), side="right")
        open_pairs = _first_of_each(np.concatenate([open_pairs, drawn]), num_items, counts)
        have = np.bincount(open_pairs // num_items, minlength=len(counts))
        complete = (have == counts)[open_pairs // num_items]
        done.append(open_pairs[complete])
        open_pairs = open_pairs[~complete]
        missing = np.where(have > 0, counts - have, 0)
        if not len(open_pairs):
            break
    pairs = np.concatenate([*done, open_pairs, *_complete(rng, open_pairs, missing, popularity)])
    return pairs[np.lexsort((rng.random(len(pairs)), pairs // num_items))] % num_items


def _first_of_each(pairs: np.ndarray, num_items: int, counts: np.ndarray) -> np.ndarray:
    """Each client's first `counts` distinct pairs in the order in which they were drawn, packed by client."""
    _, first = np.unique(pairs, return_index=True)
    pairs = pairs[np.sort(first)]
    pairs = pairs[np.argsort(pairs // num_items, kind="stable")]
    have = np.bincount(pairs // num_items, minlength=len(counts))
    return pairs[ranks(have) < np.repeat(counts, have)]


def _complete(
    rng: np.random.Generator, pairs: np.ndarray, missing: np.ndarray, popularity: np.ndarray
) -> Iterator[np.ndarray]:
    num_items = len(popularity)
    lacking = np.flatnonzero(missing)
    step = max(1, GUMBEL_ENTRIES // num_items)
    for clients in (lacking[first : first + step] for first in range(0, len(lacking), step)):
        scores = np.log(popularity) + rng.gumbel(size=(len(clients), num_items))
        taken = pairs[np.isin(pairs // num_items, clients)]
        scores[np.searchsorted(clients, taken // num_items), taken % num_items] = -np.inf
        best = np.argsort(-scores, axis=1)
        wanted = missing[clients]
        yield np.repeat(clients, wanted) * num_items + best[owners(wanted), ranks(wanted)]
