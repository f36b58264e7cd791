"""Which slices a client asks for (Federated Select, section 4.1 and Figure 4).

*Structured* choices use the client's own examples, before it sees the model: `own`, `top`, `sample`,
`sample_top`. *Random* choices are `random` (each client draws for itself) and `same` (one set per round for
all clients, which a broadcast could do as well). `with_random` adds random keys to the own ones, for
negatives. A *mixed* choice is one choice for one key space and another choice for the next. `everything`
means no selection.

The choices run on the host, vectorised over clients. Random choices depend on (seed, key space, round,
client), or for `same` on (seed, key space, round). They never depend on which other clients take part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from partwise.data.ragged import mix, offsets, owners, ranks
from partwise.randomness import hash64
from partwise.selection.classes import Classes, parse_classes
from partwise.selection.keys import OwnKeys
from partwise.types import UserError, unknown

Sizes = int | Classes  # m for all clients, or m by device class


class Asking(NamedTuple):
    """Clients that are about to choose. `round_stream` is the same for all clients of a round; `stream` is
    the client's own."""

    own: OwnKeys
    num_keys: int
    numbers: np.ndarray  # uint64 [clients], see randomness.client_numbers
    stream: np.ndarray  # uint64 [clients]
    round_stream: np.ndarray  # uint64 [clients]


class Chosen(NamedTuple):
    """The keys that clients ask for: client c asks for `keys[starts[c] : starts[c] + counts[c]]`.

    `place` has one entry for every own key, in the order of `OwnKeys`: the key's number among the client's
    asked keys, or -1. Ids of examples with place -1 are outside the slice and are dropped.
    """

    keys: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    place: np.ndarray


class Choice(NamedTuple):
    """A way to choose keys.

    choose:      asking -> chosen
    most:        (largest number of own keys of any client, K) -> largest number of keys asked for
    every_round: whether the choice changes from round to round
    complete:    whether the chosen keys include all own keys
    """

    name: str
    choose: Callable[[Asking], Chosen]
    most: Callable[[int, int], int]
    every_round: bool = False
    complete: bool = False


def streams(space: str, seed: int, rounds: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Random numbers for `Asking`, as uint64: (one per client and round, one per round). Each key space has
    its own."""
    of_space = mix(mix(np.array([seed % 2**64], np.uint64)) ^ np.uint64(hash64(space)))
    of_round = mix(of_space ^ np.asarray(rounds).astype(np.uint64))
    return mix(of_round + numbers), np.broadcast_to(of_round, numbers.shape)


def choose_all(
    own_keys: Mapping[str, OwnKeys],
    num_keys: Mapping[str, int],
    choices: Mapping[str, Choice],
    numbers: np.ndarray,
    seed: int = 0,
    round_number: int = 0,
) -> dict[str, Chosen]:
    """What clients ask for in one round, by key space."""
    rounds = np.full(len(numbers), round_number)
    return {
        space: choices[space].choose(
            Asking(own, num_keys[space], numbers, *streams(space, seed, rounds, numbers))
        )
        for space, own in own_keys.items()
    }


def placed(positions: np.ndarray, counts: np.ndarray, own: OwnKeys, chosen: Chosen, block: int) -> np.ndarray:
    """Turn positions of ids among own keys into positions among the chosen keys; -1 if the key was not
    chosen.

    Rows of `positions` are examples. `counts` is the number of examples of each client.
    """
    first = np.repeat(own.starts, counts).reshape(-1, *[1] * (positions.ndim - 1))
    at = np.append(chosen.place, -1)[np.where(positions < 0, -1, first + positions // block)]
    return np.where(at < 0, -1, at * block + positions % block).astype(np.int32)


def mean_keys(chosen: Mapping[str, Chosen]) -> dict[str, float]:
    """The mean number of keys per client, by key space."""
    return {space: float(each.counts.mean()) if len(each.counts) else 0.0 for space, each in chosen.items()}


def own() -> Choice:
    """All keys that the client's examples name: nothing is dropped."""
    chosen = lambda a: Chosen(a.own.keys, a.own.starts, a.own.counts, ranks(a.own.counts).astype(np.int32))
    return Choice("own", chosen, lambda most, num_keys: most, complete=True)


def top(m: Sizes) -> Choice:
    """The m keys that the client's examples name most often ("Top")."""
    return Choice(f"top:{m}", lambda a: _best(a.own, a.own.uses, _sizes(m, a)), _at_most(m))


def sample(m: Sizes) -> Choice:
    """m of the client's own keys at random, drawn again in every round ("Random")."""
    choose = lambda a: _best(a.own, _lots(a), _sizes(m, a))
    return Choice(f"sample:{m}", choose, _at_most(m), every_round=True)


def sample_top(m: Sizes) -> Choice:
    """m keys drawn at random from the 2m keys that the client's examples name most often ("Random Top")."""

    def choose(asking: Asking) -> Chosen:
        sizes = _sizes(m, asking)
        among = _best(asking.own, asking.own.uses, 2 * sizes).place >= 0
        return _best(asking.own, np.where(among, 1 + (_lots(asking) >> np.uint64(1)), 0), sizes, among)

    return Choice(f"sample_top:{m}", choose, _at_most(m), every_round=True)


def with_random(m: Sizes) -> Choice:
    """All own keys, and m of all K keys at random, drawn again in every round: rows for the negatives of a ranking
    loss. A drawn key that is the client's own already is not sent twice."""

    def choose(asking: Asking) -> Chosen:
        return _joined(asking, _of_all(asking, asking.stream, m))

    most = lambda own, num_keys: min(own + _exactly(m)(own, num_keys), num_keys)
    return Choice(f"with_random:{m}", choose, most, every_round=True, complete=True)


def random(m: Sizes) -> Choice:
    """m of all K keys at random, without replacement. Each client draws for itself (section 4.1.2)."""
    return Choice(f"random:{m}", lambda a: _of_all(a, a.stream, m), _exactly(m), every_round=True)


def same(m: Sizes) -> Choice:
    """m of all K keys at random, the same for all clients of a round (Figure 6). With device classes, a
    smaller class has a subset of the keys of a larger class."""
    return Choice(f"same:{m}", lambda a: _of_all(a, a.round_stream, m), _exactly(m), every_round=True)


def everything() -> Choice:
    """All K keys: the whole model."""

    def choose(asking: Asking) -> Chosen:
        clients = len(asking.own.counts)
        keys = np.arange(asking.num_keys, dtype=np.int32)
        return Chosen(keys, np.zeros(clients, int), np.full(clients, len(keys)), asking.own.keys)

    return Choice("all", choose, lambda most, num_keys: num_keys, complete=True)


CHOICES: Mapping[str, Callable[..., Choice]] = {
    "own": own,
    "all": everything,
    "top": top,
    "sample": sample,
    "sample_top": sample_top,
    "with_random": with_random,
    "random": random,
    "same": same,
}


def parse_choice(text: str) -> Choice:
    """Read a choice: `own`, `all`, or a name and a number of keys, `top:1000`. With device classes:
    `top:1000@0.8,100@0.2`."""
    name, colon, number = str(text).partition(":")
    if name not in CHOICES:
        raise unknown("choice of keys", name, CHOICES)
    if name in ("own", "all"):
        if colon:
            raise UserError(f"the choice '{name}' takes no number of keys, but got '{text}'")
        return CHOICES[name]()
    if "@" in number or "," in number:
        return CHOICES[name](parse_classes(number))
    if not number.isdecimal() or int(number) < 1:
        raise UserError(
            f"the choice '{name}' needs a number of keys of at least 1, as in {name}:1000, not '{text}'"
        )
    return CHOICES[name](int(number))


def _sizes(m: Sizes, asking: Asking) -> np.ndarray:
    return m.of(asking.numbers) if isinstance(m, Classes) else np.full(len(asking.own.counts), m)


def _most(m: Sizes) -> int:
    return max(m.sizes) if isinstance(m, Classes) else m


def _at_most(m: Sizes) -> Callable[[int, int], int]:
    return lambda most, num_keys: min(most, _most(m))


def _exactly(m: Sizes) -> Callable[[int, int], int]:
    def most(own: int, num_keys: int) -> int:
        if _most(m) > num_keys:
            raise UserError(
                f"a client cannot choose {_most(m)} of {num_keys} keys without replacement; ask for fewer"
            )
        return _most(m)

    return most


def _lots(asking: Asking) -> np.ndarray:
    """A random number for every own key of every client."""
    return mix(np.repeat(asking.stream, asking.own.counts) + asking.own.keys.astype(np.uint64))


def _best(own: OwnKeys, score: np.ndarray, sizes: np.ndarray, among: np.ndarray | None = None) -> Chosen:
    """The `sizes[c]` keys with the highest scores of every client c. Ties go to the smaller key."""
    client = owners(own.counts)
    order = np.lexsort((-score.astype(np.float64), client))
    best = np.zeros(len(order), bool)
    best[order] = ranks(own.counts) < sizes[client]
    if among is not None:
        best &= among
    counts = np.bincount(client[best], minlength=len(own.counts))
    place = np.full(len(order), -1, np.int32)
    place[best] = ranks(counts)
    return Chosen(own.keys[best], offsets(counts), counts, place)


def _of_all(asking: Asking, stream: np.ndarray, m: Sizes) -> Chosen:
    """m of K keys for every client, and the place of its own keys among them."""
    most, sizes = _exactly(m)(0, asking.num_keys), _sizes(m, asking)
    mine = np.arange(most) < sizes[:, None]
    drawn = np.where(mine, _draws(stream, asking.num_keys, most), asking.num_keys)
    keys = np.sort(drawn, axis=1)[mine].astype(np.int32)
    starts, client = offsets(sizes), owners(asking.own.counts)
    flat = owners(sizes) * asking.num_keys + keys
    wanted = client * asking.num_keys + asking.own.keys
    at = np.minimum(np.searchsorted(flat, wanted), max(len(flat) - 1, 0))
    found = flat[at] == wanted if len(flat) else np.zeros(0, bool)
    place = np.where(found, at - starts[client], -1).astype(np.int32)
    return Chosen(keys, starts, sizes, place)


def _joined(asking: Asking, drawn: Chosen) -> Chosen:
    """Own keys and drawn keys together, each once, in their order."""
    own, clients = asking.own, len(asking.own.counts)
    of_own = owners(own.counts) * asking.num_keys + own.keys
    both = np.unique(np.concatenate([of_own, owners(drawn.counts) * asking.num_keys + drawn.keys]))
    counts = np.bincount(both // asking.num_keys, minlength=clients)
    starts = offsets(counts)
    place = (np.searchsorted(both, of_own) - np.repeat(starts, own.counts)).astype(np.int32)
    return Chosen((both % asking.num_keys).astype(np.int32), starts, counts, place)


def _draws(stream: np.ndarray, num_keys: int, m: int) -> np.ndarray:
    """m of 0..K-1 without replacement for every stream [clients, m], in the order in which they were drawn."""
    if num_keys <= max(8 * m, 1024):
        lots = mix(stream[:, None] + np.arange(num_keys, dtype=np.uint64))
        best = np.argpartition(lots, m - 1, axis=1)[:, :m]
        order = np.argsort(np.take_along_axis(lots, best, 1), axis=1)
        return np.take_along_axis(best, order, 1)
    draws = mix(stream[:, None] + np.arange(2 * m + 16, dtype=np.uint64)) % np.uint64(num_keys)
    order = np.argsort(draws, axis=1, kind="stable")
    sorted_draws = np.take_along_axis(draws, order, 1)
    fresh = np.ones(draws.shape, bool)
    fresh[:, 1:] = sorted_draws[:, 1:] != sorted_draws[:, :-1]
    first = np.empty_like(fresh)
    np.put_along_axis(first, order, fresh, 1)  # the first draw of every key
    kept = first & (np.cumsum(first, axis=1) <= m)
    return draws[kept].reshape(len(stream), m).astype(np.int64)
