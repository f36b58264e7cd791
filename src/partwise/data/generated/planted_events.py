"""Events drawn from a planted law: what a client takes next depends on its own taste and on what it took last.

Items are in groups. A client has one favourite group. Its next item is, with the chance `follow`, the successor
of its last item; otherwise an item of its favourite group (with the chance `taste`) or of all, where popularity
follows a Zipf law. So a model needs both, the client's own part and its history. Client k is the same for any
number of clients.
"""

from __future__ import annotations

import numpy as np

from partwise.data.generated.streams import log_normal_counts, stream
from partwise.data.ragged import offsets, owners, ranks
from partwise.data.store import ClientStore
from partwise.types import UserError

LAW, CLIENTS = 0, 1  # names of streams
BLOCK_CLIENTS = 4096


def planted_events(
    num_clients: int = 1000,
    num_items: int = 500,
    num_groups: int = 10,
    mean_events: float = 20,
    follow: float = 0.4,
    taste: float = 0.8,
    zipf: float = 0.7,
    min_events: int = 5,
    seed: int = 0,
) -> ClientStore:
    """Generate clients with the column `item` (key), in the order of time."""
    if num_items < num_groups or num_groups < 1:
        raise UserError(f"{num_items} items cannot be in {num_groups} groups: give at least one item to each")
    group = np.arange(num_items) % num_groups
    successor = stream(seed, LAW, 0).permutation(num_items)
    popularity = np.arange(1, num_items + 1, dtype=float) ** -zipf
    chances = np.stack([popularity, *((group == g) * popularity for g in range(num_groups))])
    ends = np.cumsum(chances / chances.sum(axis=1, keepdims=True), axis=1)
    items, counts = [], []
    for block in range(-(-num_clients // BLOCK_CLIENTS)):
        rng = stream(seed, CLIENTS, block)
        drawn, number = _block(rng, ends, successor, mean_events, min_events, (follow, taste))
        kept = min(BLOCK_CLIENTS, num_clients - block * BLOCK_CLIENTS)
        items.append(drawn[: int(number[:kept].sum())])
        counts.append(number[:kept])
    counts = np.concatenate(counts)
    return ClientStore(
        {"item": np.concatenate(items).astype(np.int32)},
        offsets(counts),
        counts,
        np.arange(num_clients),
        {"item": np.arange(num_items)},
        {"source": "planted events"},
    )


def _block(
    rng: np.random.Generator,
    ends: np.ndarray,
    successor: np.ndarray,
    mean_events: float,
    min_events: int,
    chances: tuple[float, float],
) -> tuple[np.ndarray, np.ndarray]:
    """The items of a block of clients, packed, and how many each has."""
    counts = log_normal_counts(
        rng, BLOCK_CLIENTS, mean_events * np.exp(-0.18), 0.6, (min_events, int(10 * mean_events))
    )
    favourite = rng.integers(1, len(ends), BLOCK_CLIENTS)
    most = int(counts.max())
    lots = rng.random((3, most, BLOCK_CLIENTS))
    taken = np.zeros((most, BLOCK_CLIENTS), np.int64)
    for step in range(most):
        follows, own, where = lots[:, step]
        law = np.where(own < chances[1], favourite, 0)
        fresh = _first_above(ends, law, where)
        taken[step] = (
            fresh if step == 0 else np.where(follows < chances[0], successor[taken[step - 1]], fresh)
        )
    return taken[ranks(counts), owners(counts)], counts


def _first_above(ends: np.ndarray, law: np.ndarray, lots: np.ndarray) -> np.ndarray:
    """For each client, the first item whose cumulative chance under its law is above its lot."""
    flat = (ends + np.arange(len(ends))[:, None]).ravel()
    found = np.searchsorted(flat, law + lots, side="right") - law * ends.shape[1]
    return np.clip(found, 0, ends.shape[1] - 1)
