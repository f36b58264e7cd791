"""Three ways to serve slices, and what each costs (Federated Select, sections 3.2 and 6).

broadcast:    everybody is sent the whole server value and selects at home. Keys stay on the client.
on_demand:    clients upload their keys, and the server computes psi for every request, all at about the same time.
              A cache within the round would answer the `cache_hits` among them. The server sees all keys.
pregenerated: before the round the server computes the slices of all K keys and puts them on a content delivery
              network (CDN), where clients get theirs. The CDN sees the keys, unless it is asked by private
              information retrieval, which only this way allows.

Training is the same in all three, so what they cost is counted and not run. What is assumed: shared and frozen
leaves go from the server to every client; a broadcast is of the values themselves, whatever psi would make of them;
a key is 4 bytes and goes up wherever a client names it, to the server or to the CDN; the update is of the client's
slices, at least 32 bits a number, in all three. (Who adds up updates must know their rows. Keys that nobody may
see need that sum to be secure.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from partwise import tree
from partwise.model.partition import DEFAULT, Partition
from partwise.types import unknown

KEY_BYTES = 4
KEYS_SEEN_BY: Mapping[str, str] = {"broadcast": "nobody", "on_demand": "server", "pregenerated": "CDN"}
WAYS = tuple(KEYS_SEEN_BY)


class Sizes(NamedTuple):
    """Bytes of the parts of a partition; a slice is all that one key of a space owns."""

    fixed: int  # shared and frozen leaves and learned defaults, sent to everybody
    trained: int  # those of them whose update goes up
    num_keys: Mapping[str, int]
    slices: Mapping[str, int]  # space -> a slice, as psi sends it
    values: Mapping[str, int]  # space -> a slice's values themselves
    updates: Mapping[str, int]  # space -> the update of a slice


class Demand(NamedTuple):
    """What the clients of a round ask for in one key space: how many different keys, and how many each."""

    distinct: int
    counts: np.ndarray  # [clients]; zeros where there is no client do not matter


class Served(NamedTuple):
    """What one way of serving costs in a round; `total` adds rounds up. Bytes and slices of the whole cohort, but
    for `most_...` (any one client) and `peak`."""

    clients: int
    bytes_down: int
    most_down: int
    bytes_up: int
    most_up: int
    requests: int  # slices that clients select
    distinct: int  # different ones among them, within a round
    from_server: int  # bytes that leave the server: to clients, and to the CDN
    from_cdn: int = 0
    computed: int = 0  # slices that the server computes, without a cache
    cache_hits: int = 0  # of those, how many a cache within the round would save
    peak: int = 0  # slices that the server must compute while a whole cohort waits, without a cache


def check_way(name: str) -> str:
    """The name itself, if it is a way of serving."""
    if name not in WAYS:
        raise unknown("way of serving (serving.way)", name, WAYS)
    return name


def sizes_of(partition: Partition) -> Sizes:
    """The bytes that serving a partition counts with."""
    whole = lambda path: tree.num_bytes(partition.shapes[path].shape, partition.shapes[path].dtype)
    keyed, frozen = partition.of("keyed"), partition.of("frozen")
    fixed = sum(whole(path.removeprefix(DEFAULT)) for path in partition.server_paths if path not in keyed)
    slices = {space: sum(map(partition.row_bytes, paths)) for space, paths in partition.spaces.items()}
    summed = lambda path: tree.num_bytes(partition.shapes[path].shape, tree.wide(partition.shapes[path]))
    moved = [path.removeprefix(DEFAULT) for path in partition.server_paths if path not in (*keyed, *frozen)]
    per_key = lambda size: {
        space: sum(map(size, paths)) // partition.num_keys(space) for space, paths in partition.spaces.items()
    }
    return Sizes(
        fixed=fixed,
        trained=sum(map(summed, moved)),
        num_keys=partition.all_keys,
        slices=slices,
        values=per_key(whole),
        updates=per_key(summed),
    )


def serve(sizes: Sizes, num_clients: int, demands: Mapping[str, Demand]) -> dict[str, Served]:
    """What a round costs, by way of serving."""
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
    return {"broadcast": broadcast, "on_demand": on_demand, "pregenerated": pregenerated}


def _dot(counts: Mapping[str, int], each: Mapping[str, int]) -> int:
    return sum(count * each[space] for space, count in counts.items())


def _most(sizes: Sizes, demands: Mapping[str, Demand]) -> list[int]:
    """The most of any client in bytes of slices, of their update, and of their update with the keys."""
    if not demands:
        return [0, 0, 0]
    each = [(sizes.slices[s], sizes.updates[s], sizes.updates[s] + KEY_BYTES) for s in demands]
    counts = np.stack([demand.counts for demand in demands.values()], axis=1).astype(np.int64)
    return (counts @ np.array(each)).max(axis=0, initial=0).tolist()


def num_distinct(keys: np.ndarray, num_keys: int) -> int:
    """How many different keys there are; quicker by counting than by sorting, where K is not much larger."""
    if num_keys > 64 * len(keys):
        return len(np.unique(keys))
    return int(np.count_nonzero(np.bincount(keys, minlength=num_keys)))


def total(rounds: Sequence[Served]) -> Served:
    """Several rounds together: sums, and the most of any round where a field is the most of something."""
    fold = lambda name: max if name in ("most_down", "most_up", "peak") else sum
    columns = zip(Served._fields, zip(*rounds, strict=True), strict=True)
    return Served(*(fold(name)(values) for name, values in columns))
