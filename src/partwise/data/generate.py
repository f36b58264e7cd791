"""Ratings with a planted truth: rating = user . item + noise, real-valued, so the best reachable error is known.

Factor 0 carries the mean (items near 3.5, users near 1), so a plain dot product of `rank` dimensions or more can
represent the truth. Items are drawn by a Zipf law, examples per client by a log-normal one.
Clients come in blocks with their own random streams: client k is the same however many clients there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from partwise.data.build import write_store
from partwise.data.folder import Block
from partwise.data.ragged import offsets, owners, ranks
from partwise.data.store import ClientStore, open_store
from partwise.types import UserError

BLOCK_CLIENTS = 1024
MEAN, ITEM_BIAS, USER_BIAS, TASTE = 3.5, 0.4, 0.1, 0.7  # spreads of item 0, user 0 and the other user factors
DRAW_ROUNDS = 6
GUMBEL_ENTRIES = 1 << 22
ITEMS, USERS, EXAMPLES = 0, 1, 2  # names of random streams


@dataclasses.dataclass(frozen=True)
class Planted:
    """The arguments of `planted_ratings`; they and a client's id say everything about that client."""

    num_clients: int
    num_items: int
    rank: int
    noise: float
    mean_examples: float
    zipf: float
    sigma: float
    min_examples: int
    seed: int

    def __post_init__(self):
        lowest = {
            "num_clients": 1,
            "num_items": 1,
            "rank": 1,
            "noise": 0,
            "zipf": 0,
            "sigma": 0,
            "min_examples": 1,
        }
        for name, least in lowest.items():
            if not getattr(self, name) >= least:
                raise UserError(f"{name} is {getattr(self, name)}: give at least {least}")
        if not self.min_examples <= self.mean_examples <= self.num_items:
            raise UserError(
                f"mean_examples is {self.mean_examples}: give a number from min_examples ({self.min_examples}) "
                f"to num_items ({self.num_items}), because no client rates an item twice"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Truth:
    """What the ratings were drawn from: user ~ Normal(user_mean, user_scale), independent per factor."""

    arguments: Planted
    item_factors: np.ndarray  # [I, rank] float32
    user_mean: np.ndarray  # [rank]
    user_scale: np.ndarray  # [rank]

    @property
    def noise(self) -> float:
        return self.arguments.noise

    def user_factors(self, client_ids: np.ndarray) -> np.ndarray:
        """The planted vectors of these clients, [C, rank] float32."""
        blocks, members = np.divmod(np.asarray(client_ids, np.int64), BLOCK_CLIENTS)
        vectors = {block: _users(self, block) for block in np.unique(blocks).tolist()}
        return np.stack(
            [vectors[block][member] for block, member in zip(blocks.tolist(), members, strict=True)]
        )


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
    """Generate clients in memory or, with `out`, into a folder on disk a block at a time.

    `zipf`: the popularity of item i falls as (i + 1)^-zipf. `sigma`: the spread of the logarithm of examples per
    client, whose mean is `mean_examples` before they are held between `min_examples` and `num_items`.
    """
    arguments = Planted(num_clients, num_items, rank, noise, mean_examples, zipf, sigma, min_examples, seed)
    truth = _truth(arguments)
    vocabularies = {"item": np.arange(num_items)}
    info = {"source": "planted ratings", "arguments": dataclasses.asdict(arguments)}
    if out is not None:
        write_store(out, _blocks(truth), vocabularies, info)
        return open_planted(out)
    blocks = list(_blocks(truth))
    columns = {name: np.concatenate([block.columns[name] for block in blocks]) for name in ("item", "rating")}
    counts = np.concatenate([block.counts for block in blocks])
    store = ClientStore(columns, offsets(counts), counts, np.arange(num_clients), vocabularies, info)
    return PlantedRatings(store, truth)


def open_planted(path: str | Path) -> PlantedRatings:
    """A store written by `planted_ratings`, with the truth drawn again from its arguments."""
    store = open_store(path)
    if store.info.get("source") != "planted ratings":
        raise UserError(f"{path} was not written by planted_ratings: open it with open_store")
    return PlantedRatings(store, _truth(Planted(**store.info["arguments"])))


def oracle(
    truth: Truth,
    store: ClientStore,
    support: Callable[[int], np.ndarray],
    query: Callable[[int], np.ndarray],
) -> dict[str, float]:
    """The best reachable error: true item factors, and each user vector its posterior mean given the support rows.

    `support` and `query` say which of a client's n rows are meant (indices or a mask). The root mean squared error
    is pooled over all query rows.
    """
    squares, examples = 0.0, 0
    for position in range(store.num_clients):
        rows = store.examples(position)
        factors, ratings = truth.item_factors[rows["item"]].astype(float), rows["rating"].astype(float)
        known, asked = support(len(ratings)), query(len(ratings))
        vector = _posterior_mean(truth, factors[known], ratings[known])
        errors = factors[asked] @ vector - ratings[asked]
        squares, examples = squares + float(errors @ errors), examples + len(errors)
    if examples == 0:
        raise UserError("no client has a query row: the oracle has nothing to be scored on")
    return {"rmse": float(np.sqrt(squares / examples)), "noise": truth.noise}


def _posterior_mean(truth: Truth, factors: np.ndarray, ratings: np.ndarray) -> np.ndarray:
    """Ridge towards the planted mean with the planted spreads; the noise is held above 0 for the division."""
    variance = max(truth.noise, 1e-4) ** 2
    precision = np.diag(truth.user_scale**-2.0) + factors.T @ factors / variance
    return truth.user_mean + np.linalg.solve(
        precision, factors.T @ (ratings - factors @ truth.user_mean) / variance
    )


def _stream(arguments: Planted, purpose: int, block: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([arguments.seed, purpose, block])))


def _truth(arguments: Planted) -> Truth:
    items = _stream(arguments, ITEMS).standard_normal((arguments.num_items, arguments.rank))
    items[:, 0] = MEAN + ITEM_BIAS * items[:, 0]
    items[:, 1:] /= np.sqrt(max(arguments.rank - 1, 1))
    mean, scale = np.zeros(arguments.rank), np.full(arguments.rank, TASTE)
    mean[0], scale[0] = 1.0, USER_BIAS
    return Truth(arguments, items.astype(np.float32), mean, scale)


def _users(truth: Truth, block: int) -> np.ndarray:
    drawn = _stream(truth.arguments, USERS, block).standard_normal((BLOCK_CLIENTS, truth.arguments.rank))
    return (truth.user_mean + truth.user_scale * drawn).astype(np.float32)


def _blocks(truth: Truth) -> Iterator[Block]:
    """Every block is drawn whole and then cut, so that the last one's clients are the same too."""
    arguments = truth.arguments
    popularity = np.arange(1, arguments.num_items + 1, dtype=float) ** -arguments.zipf
    for block in range(-(-arguments.num_clients // BLOCK_CLIENTS)):
        rng = _stream(arguments, EXAMPLES, block)
        counts = _counts(rng, arguments)
        items = _distinct_items(rng, counts, popularity)
        users = np.repeat(_users(truth, block), counts, axis=0)
        ratings = np.einsum("nr,nr->n", users, truth.item_factors[items], dtype=float)
        ratings += arguments.noise * rng.standard_normal(len(items))
        client_ids = np.arange(block * BLOCK_CLIENTS, min((block + 1) * BLOCK_CLIENTS, arguments.num_clients))
        counts = counts[: len(client_ids)]
        columns = {"item": items.astype(np.int32), "rating": ratings.astype(np.float32)}
        yield Block(client_ids, counts, {name: values[: counts.sum()] for name, values in columns.items()})


def _counts(rng: np.random.Generator, arguments: Planted) -> np.ndarray:
    centre = np.log(arguments.mean_examples) - arguments.sigma**2 / 2
    drawn = np.exp(centre + arguments.sigma * rng.standard_normal(BLOCK_CLIENTS))
    return np.clip(np.rint(drawn), arguments.min_examples, arguments.num_items).astype(np.int64)


def _distinct_items(rng: np.random.Generator, counts: np.ndarray, popularity: np.ndarray) -> np.ndarray:
    """Weighted draws without replacement, packed by client and in random order, [sum of counts].

    Draws with replacement whose repeats are dropped are draws without replacement. Clients that still lack items
    after a few rounds get the rest by the largest of log-weight + Gumbel noise, which is the same law.
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
    """Each client's first `counts` distinct pairs in the order drawn, packed by client."""
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
