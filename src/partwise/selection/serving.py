"""Four ways to serve slices, and what each costs (Federated Select, sections 3.2 and 6).

broadcast:    Every client is sent the whole server value and selects on the device. Keys stay on the client.
on_demand:    Clients upload their keys. The server computes psi for every request, all at about the same time.
              A cache within the round would answer `cache_hits` of them. The server sees all keys.
pregenerated: Before the round, the server computes the slices of all K keys and puts them on a content delivery
              network (CDN). Clients get their slices there. The CDN sees the keys.
private:      The server and a helper both hold the slices of all K keys. A client asks both, and neither learns its
              keys (`privacy.retrieval`). Messages have the size of the most keys that a client may have, whatever
              it has. The helper's answers pass the server, which joins them with its own.

Training is the same in all four, so the costs are counted, not measured. The assumptions are: Shared and
frozen leaves go from the server to every client. A broadcast sends the values themselves, without psi. A key
has 4 bytes and is uploaded whenever a client names it, to the server or to the CDN. In all four ways, the
update covers the client's slices, in the form in which the aggregator adds it up (at least 32 bits per
number). (The party that adds up updates must know their rows. If nobody may see the keys, that sum must be
secure, which costs more: `partwise privacy` tells.) The four sums beside an update (16 bytes) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from partwise import tree
from partwise.model.partition import DEFAULT, Partition
from partwise.privacy.aes import BLOCK
from partwise.privacy.buckets import layout_shape
from partwise.privacy.retrieval import query_sizes
from partwise.privacy.sealing import OVERHEAD
from partwise.selection.choose import Choice
from partwise.types import unknown

KEY_BYTES = 4
KEYS_SEEN_BY: Mapping[str, str] = {
    "broadcast": "nobody",
    "on_demand": "server",
    "pregenerated": "CDN",
    "private": "nobody, unless both servers tell each other",
}
WAYS = tuple(KEYS_SEEN_BY)


class Sizes(NamedTuple):
    """Bytes of the parts of a partition. A slice is everything that belongs to one key of a space."""

    fixed: int  # shared and frozen leaves and learned defaults, as far as they are sent to every client
    trained: int  # the part of these whose update is sent back
    num_keys: Mapping[str, int]
    slices: Mapping[str, int]  # space -> bytes of a slice, as psi sends it
    values: Mapping[str, int]  # space -> bytes of a slice's values
    updates: Mapping[str, int]  # space -> bytes of the update of a slice
    seeds: int = 0  # of a client's question in private, to the server
    to_both: int = 0  # the same, to the server and the helper
    sealed: int = 0  # the same, to the helper, through the server
    answer: int = 0  # of all spaces, joined


class Demand(NamedTuple):
    """What the clients of a round ask for in one key space: the number of different keys, and the number of
    keys per client."""

    distinct: int
    counts: np.ndarray  # [clients]; may have zeros for places without a client


class Served(NamedTuple):
    """What one way of serving costs in a round; `total` combines rounds.

    Bytes and slices are for the whole cohort, except `most_...` (the largest of any one client) and `peak`.
    """

    clients: int
    bytes_down: int
    most_down: int
    bytes_up: int
    most_up: int
    requests: int  # slices that clients select
    distinct: int  # different slices among them, within a round
    from_server: int  # bytes that leave the server: to clients, and to the CDN or the helper
    from_cdn: int = 0
    computed: int = 0  # slices that the server computes, without a cache
    cache_hits: int = 0  # computations that a cache within the round would save
    peak: int = 0  # slices that the server must compute while a whole cohort waits, without a cache


def check_way(name: str) -> str:
    """Return the name. Raises `UserError` if it is not a way of serving."""
    if name not in WAYS:
        raise unknown("way of serving (serving.way)", name, WAYS)
    return name


def sizes_of(
    partition: Partition,
    choices: Mapping[str, Choice] | None = None,
    zero: Callable[[Any], Any] | None = None,
) -> Sizes:
    """The sizes of a partition, from which `serve` computes the costs.

    Args:
        partition: The roles of the model's leaves.
        choices: They bound the number of a client's keys. Without them, or if they have no bound, private messages
            have room for all keys.
        zero: A leaf -> what a client sends of its update (`Aggregator.zero`); by default an array like the leaf, of
            at least 32 bits.
    """
    whole = lambda path: tree.num_bytes(partition.shapes[path].shape, partition.shapes[path].dtype)
    keyed, trained = partition.of("keyed"), partition.trained_paths
    unsent = (*keyed, *partition.there)
    fixed = sum(whole(path.removeprefix(DEFAULT)) for path in partition.server_paths if path not in unsent)
    slices = {space: sum(map(partition.row_bytes, paths)) for space, paths in partition.spaces.items()}
    wide = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, tree.wide(leaf))
    sent = {path: jax.eval_shape(zero or wide, partition.server_shapes[path]) for path in trained}
    summed = lambda path: tree.num_bytes(sent[path].shape, sent[path].dtype)
    per_key = lambda size, among: {
        space: sum(size(path) for path in paths if path in among) // partition.num_keys(space)
        for space, paths in partition.spaces.items()
    }
    most = most_keys(partition, choices or {})
    return Sizes(
        fixed=fixed,
        trained=sum(summed(path) for path in trained if path not in keyed),
        num_keys=partition.all_keys,
        slices=slices,
        values=per_key(whole, keyed),
        updates=per_key(summed, trained),
        **_private_sizes(partition.all_keys, most, slices),
    )


def most_keys(partition: Partition, choices: Mapping[str, Choice]) -> dict[str, int]:
    """The most keys that a client can ask for, by space: a public number."""
    every = partition.all_keys
    return {
        space: choices[space].most(count, count) if space in choices else count
        for space, count in every.items()
    }


def _private_sizes(
    num_keys: Mapping[str, int], most: Mapping[str, int], slices: Mapping[str, int]
) -> dict[str, int]:
    """Bytes of the messages of `server.private_slices`, without their headers."""
    if not num_keys:
        return {}
    each = [query_sizes(layout_shape(num_keys[space], most[space]), slices[space]) for space in num_keys]
    return {
        "seeds": sum(sizes.to_first for sizes in each),
        "to_both": sum(sizes.to_both for sizes in each),
        "sealed": OVERHEAD + sum(BLOCK + sizes.to_second for sizes in each),
        "answer": sum(sizes.answer for sizes in each),
    }


def serve(sizes: Sizes, num_clients: int, demands: Mapping[str, Demand]) -> dict[str, Served]:
    """The costs of a round, for each way of serving."""
    requests = {space: int(each.counts.sum()) for space, each in demands.items()}
    distinct = sum(each.distinct for each in demands.values())
    down, update = _dot(requests, sizes.slices), _dot(requests, sizes.updates)
    fixed, trained = num_clients * sizes.fixed, num_clients * sizes.trained
    whole = sizes.fixed + _dot(sizes.num_keys, sizes.values)
    asked = sum(requests.values())
    most_rows, most_update, most_asking = _most(sizes, demands)
    broadcast = Served(
        clients=num_clients,
        bytes_down=num_clients * whole,
        most_down=whole if num_clients else 0,
        bytes_up=trained + update,
        most_up=sizes.trained + most_update if num_clients else 0,
        requests=asked,
        distinct=distinct,
        from_server=num_clients * whole,
    )
    on_demand = broadcast._replace(
        bytes_down=fixed + down,
        most_down=sizes.fixed + most_rows if num_clients else 0,
        bytes_up=trained + update + KEY_BYTES * asked,
        most_up=sizes.trained + most_asking if num_clients else 0,
        from_server=fixed + down,
        computed=asked,
        cache_hits=asked - distinct,
        peak=asked,
    )
    pregenerated = on_demand._replace(
        from_server=fixed + _dot(sizes.num_keys, sizes.slices),
        from_cdn=down,
        computed=sum(sizes.num_keys.values()),
        cache_hits=0,
        peak=0,
    )
    ways = {"broadcast": broadcast, "on_demand": on_demand, "pregenerated": pregenerated}
    return ways | {"private": _privately(sizes, pregenerated, broadcast)}


def _privately(sizes: Sizes, ahead: Served, broadcast: Served) -> Served:
    """As `pregenerated`, with messages of one size. The helper is given all slices, and its part of questions."""
    clients, down, carried = ahead.clients, sizes.fixed + sizes.answer, sizes.to_both + sizes.sealed
    asked = sizes.seeds + carried
    return ahead._replace(
        bytes_down=clients * down,
        most_down=down if clients else 0,
        bytes_up=broadcast.bytes_up + clients * asked,
        most_up=broadcast.most_up + asked if clients else 0,
        from_server=clients * (down + carried) + _dot(sizes.num_keys, sizes.slices),
        from_cdn=0,
    )


def _dot(counts: Mapping[str, int], each: Mapping[str, int]) -> int:
    return sum(count * each[space] for space, count in counts.items())


def _most(sizes: Sizes, demands: Mapping[str, Demand]) -> list[int]:
    """The largest number of bytes of any client: of its slices, of their update, and of the update with the
    keys."""
    if not demands:
        return [0, 0, 0]
    each = [(sizes.slices[s], sizes.updates[s], sizes.updates[s] + KEY_BYTES) for s in demands]
    counts = np.stack([demand.counts for demand in demands.values()], axis=1).astype(np.int64)
    return (counts @ np.array(each)).max(axis=0, initial=0).tolist()


def num_distinct(keys: np.ndarray, num_keys: int) -> int:
    """How many different keys there are. Counting is faster than sorting if K is not much larger than the
    number of keys."""
    if num_keys > 64 * len(keys):
        return len(np.unique(keys))
    return int(np.count_nonzero(np.bincount(keys, minlength=num_keys)))


def total(rounds: Sequence[Served]) -> Served:
    """Several rounds together: sums, and for fields that are a maximum, the largest of any round."""
    fold = lambda name: max if name in ("most_down", "most_up", "peak") else sum
    columns = zip(Served._fields, zip(*rounds, strict=True), strict=True)
    return Served(*(fold(name)(values) for name, values in columns))
