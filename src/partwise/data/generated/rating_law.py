"""The distribution of planted ratings: rating = user . item + noise, and the error of a model that knows it.

Factor 0 carries the mean (items near 3.5, users near 1). So a plain dot product of `rank` dimensions or more
can represent the truth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from partwise.data.generated.streams import check_numbers, stream
from partwise.data.store import ClientStore
from partwise.types import UserError

BLOCK_CLIENTS = 1024  # clients that share one random stream
MEAN, ITEM_BIAS, USER_BIAS, TASTE = 3.5, 0.4, 0.1, 0.7  # spreads of item 0, user 0 and the other user factors
ITEMS, USERS, EXAMPLES = 0, 1, 2  # what a random stream is for


@dataclasses.dataclass(frozen=True)
class Planted:
    """The arguments of `planted_ratings`. Together with a client's id, they determine everything about that
    client."""

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
        check_numbers(dataclasses.asdict(self), {"num_clients", "num_items", "rank", "min_examples"})
        if not self.min_examples <= self.mean_examples <= self.num_items:
            raise UserError(
                f"mean_examples is {self.mean_examples}: give at least min_examples ({self.min_examples}) "
                f"and at most num_items ({self.num_items}), because no client rates an item twice"
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
        vectors = {block: draw_users(self, block) for block in np.unique(blocks).tolist()}
        return np.stack(
            [vectors[block][member] for block, member in zip(blocks.tolist(), members, strict=True)]
        )


def oracle(
    truth: Truth,
    store: ClientStore,
    support: Callable[[int], np.ndarray],
    query: Callable[[int], np.ndarray],
) -> dict[str, float]:
    """The best reachable error: the item factors are known, and user vectors are the posterior mean given the
    support rows.

    `support` and `query` say which of a client's n rows are meant (indices or a mask). The error is pooled
    over all query rows.
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
    """Ridge regression towards the planted mean with the planted spreads. The noise is kept above 0 for the
    division."""
    variance = max(truth.noise, 1e-4) ** 2
    precision = np.diag(truth.user_scale**-2.0) + factors.T @ factors / variance
    return truth.user_mean + np.linalg.solve(
        precision, factors.T @ (ratings - factors @ truth.user_mean) / variance
    )


def plant(arguments: Planted) -> Truth:
    items = stream(arguments.seed, ITEMS).standard_normal((arguments.num_items, arguments.rank))
    items[:, 0] = MEAN + ITEM_BIAS * items[:, 0]
    items[:, 1:] /= np.sqrt(max(arguments.rank - 1, 1))
    mean, scale = np.zeros(arguments.rank), np.full(arguments.rank, TASTE)
    mean[0], scale[0] = 1.0, USER_BIAS
    return Truth(arguments, items.astype(np.float32), mean, scale)


def draw_users(truth: Truth, block: int) -> np.ndarray:
    drawn = stream(truth.arguments.seed, USERS, block).standard_normal((BLOCK_CLIENTS, truth.arguments.rank))
    return (truth.user_mean + truth.user_scale * drawn).astype(np.float32)
