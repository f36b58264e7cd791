"""Heat: how many clients hold each key of a key space (n_m of FedSubAvg, section 2), and what follows from
it.

A client holds a key if at least one of its examples names it, in any column of the space. Counting works on
blocks of clients, so that a store may be larger than memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from partwise.data.checks import check_keys, check_known
from partwise.data.ragged import owned_keys, owners
from partwise.data.store import ClientStore
from partwise.data.store_folder import Block
from partwise.types import UserError, unknown

By = Literal["clients", "samples"]
IDS_PER_BLOCK = 1 << 20
PERCENTILES = (5, 25, 50, 75, 95)


@dataclasses.dataclass(frozen=True, eq=False)
class Heat:
    """How many clients hold each key of a space.

    counts: [K], n_m: the number of clients that hold key m. By samples: what these clients weigh together, which is
            the number of all their samples (as in the authors' code), not only of the samples that name the key
    total:  N, the number of all clients that can take part, including clients that hold nothing. By samples: what
            they weigh together

    Numbers are whole, except by samples where samples have weights of their own.
    """

    space: str
    counts: np.ndarray
    total: float
    by: By = "clients"

    def __post_init__(self):
        counts = np.asarray(self.counts)
        what = f"the heat of key space '{self.space}'"
        if self.by not in get_args(By):
            raise unknown(f"unit of {what}", self.by, get_args(By))
        weighed = self.by == "samples" and np.issubdtype(counts.dtype, np.floating)
        if counts.ndim != 1 or not (weighed or np.issubdtype(counts.dtype, np.integer)):
            raise UserError(
                f"{what} has counts of type {counts.dtype} and shape {counts.shape}: give one whole number per key "
                f"(private or estimated ones through private_heat or Seen.coefficients)"
            )
        if not weighed and not isinstance(self.total, int | np.integer):
            raise UserError(f"{what} has a total of {self.total}: give a whole number of {self.by}")
        if counts.min(initial=0) < 0:
            raise UserError(f"{what} has a count of {counts.min()}: nobody can hold a key fewer than 0 times")
        if counts.max(initial=0) > self.total:
            key = int(counts.argmax())
            raise UserError(
                f"{what} says that key {key} is held by {counts[key]} of {self.total} {self.by}: more than there "
                f"are. Count the keys and their total over the same clients."
            )
        object.__setattr__(self, "counts", counts.astype(np.float64 if weighed else np.int64))
        object.__setattr__(self, "total", float(self.total) if weighed else int(self.total))

    @property
    def num_keys(self) -> int:
        """K, the number of keys."""
        return len(self.counts)


def count_heat(
    store: ClientStore,
    space: str,
    columns: Sequence[str] | None = None,
    num_keys: int | None = None,
    by: By = "clients",
    block: int = 1,
    weights: np.ndarray | None = None,
) -> Heat:
    """Count the heat of a key space over the clients of a store that have a weight.

    Args:
        store: The clients.
        space: The name of the key space.
        columns: The columns that hold ids of the space, [N] or [N, ...] (default: the column with the name of
            the space). The id -1 is ignored.
        num_keys: K (default: the number of keys of the first column).
        by: Count clients, or the samples of these clients.
        block: How many ids share a key. Key k has the ids from k * block on.
        weights: [C], what every client weighs in a round (default: its number of examples). A client of weight 0
            can move nothing, so it is counted neither in n_m nor in N.

    A block of clients has about a million ids. A larger client is a block by itself.
    """
    columns = (space,) if columns is None else tuple(columns)
    if not columns:
        raise UserError(f"no column holds the keys of space '{space}', so nobody's examples can be counted")
    check_known(columns, store.columns)
    num_keys = store.num_keys(columns[0]) // block if num_keys is None else num_keys
    weights = store.counts if weights is None else weights
    order = np.argsort(store.starts)  # neighbours are read together
    order = order[weights[order] > 0]
    held, weights = store.select(columns).take(order), _whole(weights[order])
    width = sum(int(np.prod(values.shape[1:], dtype=np.int64)) for values in held.columns.values())
    amounts = np.ones(len(weights), np.int64) if by == "clients" else weights
    counts, first = np.zeros(num_keys, amounts.dtype), 0
    for part in held.blocks(max(IDS_PER_BLOCK // width, 1)):
        client, key = _holders(part, space, num_keys, block)
        np.add.at(counts, key, amounts[first + client])
        first += len(part.counts)
    # The same additions for the total: it must not be rounded below the count of a key that everybody holds.
    return Heat(space, counts, np.cumsum(amounts)[-1].item() if len(amounts) else 0, by)


def _whole(weights: np.ndarray) -> np.ndarray:
    """The weights as whole numbers, if they are."""
    whole = np.rint(weights).astype(np.int64)
    return whole if np.array_equal(whole, weights) else weights.astype(np.float64)


def holders(
    store: ClientStore, space: str, columns: Sequence[str], num_keys: int, block: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of a client (its position) and a key that it holds, each once. Arguments are as in
    `count_heat`."""
    found, first = [], 0
    for part in store.select(tuple(columns)).blocks():
        client, key = _holders(part, space, num_keys, block)
        found.append((client + first, key))
        first += len(part.counts)
    none = np.zeros(0, np.int64)
    clients, keys = zip(*found, strict=True) if found else ((none,), (none,))
    return np.concatenate(clients), np.concatenate(keys)


def _holders(part: Block, space: str, num_keys: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of a client and a key that it holds, each once."""
    client = owners(part.counts)
    for name, ids in part.columns.items():
        check_keys(name, ids, space, num_keys * block, lowest=-1)
    pairs = np.concatenate([owned_keys(client, ids, num_keys, block) for ids in part.columns.values()])
    pairs.sort()  # np.unique uses hashing, which takes ten times as long
    first = np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)]
    return np.divmod(pairs[first], num_keys)


def add(heat: Heat, new: Heat) -> Heat:
    """The heat of two populations together. No client may be in both."""
    for name in ("space", "by", "num_keys"):
        ours, theirs = getattr(heat, name), getattr(new, name)
        if ours != theirs:
            raise UserError(
                f"two heats with {name.replace('num_keys', 'numbers of keys')} {ours!r} and {theirs!r} cannot be "
                f"added: count both in the same way"
            )
    return Heat(heat.space, heat.counts + new.counts, heat.total + new.total, heat.by)


def coefficients(heat: Heat, cap: float | None = None, num_keys: int | None = None) -> np.ndarray:
    """N / n_m, [K] float32: the factor of the mean update of key m in FedSubAvg (Algorithm 1, line 9).

    The factor of a key that no client holds is 1, as in the authors' files. No client can send an update of
    it, unless the heat is out of date; then its row moves as in FedAvg, never faster.

    Args:
        heat: The heat.
        cap: The largest factor, for rows that almost no client holds; None for no limit.
        num_keys: The model's number of keys. Raises `UserError` if the heat has another.
    """
    if num_keys is not None and num_keys != heat.num_keys:
        raise UserError(
            f"the heat of key space '{heat.space}' has {heat.num_keys} keys, and the model has {num_keys}: count "
            f"it again with this task's data"
        )
    if cap is not None and not cap >= 1:
        raise UserError(f"cap is {cap}: give at least 1 (no correction), or None (no bound)")
    factors = np.where(heat.counts > 0, heat.total / np.maximum(heat.counts, 1), 1.0)
    return np.minimum(factors, np.inf if cap is None else cap).astype(np.float32)


class Bin(NamedTuple):
    """The number of keys that have at least `low` and at most `high` holders."""

    low: int
    high: int
    keys: int


def histogram(heat: Heat) -> list[Bin]:
    """The number of keys with holders, by powers of two: 1, 2..3, 4..7, and so on."""
    held = heat.counts[heat.counts > 0]
    keys = np.bincount(np.frexp(held.astype(float))[1] - 1)
    first = int(np.argmax(keys > 0)) if len(keys) else 0
    return [Bin(1 << i, (2 << i) - 1, int(keys[i])) for i in range(first, len(keys))]


def summarize(heat: Heat) -> dict[str, Any]:
    """Numbers of keys and holders. Minimum, dispersion n_max / n_min (section 2) and percentiles are over the
    keys that some client holds. They are None (percentiles: empty) if there is no such key."""
    held = heat.counts[heat.counts > 0]
    least, most = (int(held.min()), int(held.max())) if len(held) else (None, None)
    return {
        "space": heat.space,
        "by": heat.by,
        "total": heat.total,
        "keys": heat.num_keys,
        "keys_held": len(held),
        "keys_not_held": heat.num_keys - len(held),
        "keys_with_one": int(np.sum(held == 1)),
        "n_min": least,
        "n_max": most,
        "dispersion": most / least if least and most else None,
        "percentiles": {f"p{p}": float(np.percentile(held, p)) for p in PERCENTILES if len(held)},
        "histogram": [each._asdict() for each in histogram(heat)],
    }
