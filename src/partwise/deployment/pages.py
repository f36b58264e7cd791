"""A version of the model as immutable files, which anybody can serve: nginx, a CDN, a bucket (Federated Select,
sections 3.2 and 6: broadcast and pre-generated slices).

    whole   one message with all keys. A client takes it whole, or its rows by HTTP Range.
    pages   the rows of every key space, hottest keys first, cut into pages of a few rows. A client takes the pages
            of its keys. A page whose rows did not change is the same file as before, for the server and for the
            caches on the way.

A client finds the pages through a manifest (`deployment.manifest`). `deployment.page_reader` reads both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from partwise.checkpoint import layout, to_bytes
from partwise.data.ragged import pad_to_power
from partwise.deployment.files import FilePlace
from partwise.deployment.manifest import (
    BLOCK_PAGES,
    RAW,
    Manifest,
    PagedSpace,
    index_blocks,
    read_manifest,
    write_manifest,
)
from partwise.model.partition import Partition
from partwise.server.messages import About, encode_rows, key_data, send
from partwise.types import UserError

ORDER = "order"  # the name of the array in an order's file
ARRAYS = "safetensors"  # the suffix of files of arrays


class KeyOrder(NamedTuple):
    """The keys of a space in the order of its pages, and how many of them are in a page."""

    keys: np.ndarray  # int32, every key once, hottest first
    page_rows: int
    file: str  # the name of the file with the keys


class PagedVersion(NamedTuple):
    """A version of the model that was written as pages."""

    name: str  # of its manifest
    manifest: Manifest
    digests: Mapping[str, np.ndarray]  # space -> digests of its pages, uint8 [pages, 16]


def write_whole(
    place: FilePlace,
    partition: Partition,
    params: Mapping[str, Any],
    rng: Any,
    belongs: About,
    public: Mapping[str, Any] | None = None,
) -> str:
    """Write a version as one file: the message `slices` with all keys and no task. Returns its name."""
    keys = {space: np.arange(count) for space, count in partition.all_keys.items()}
    return place.put(send(partition, params, keys, rng, belongs._replace(task=""), public), ARRAYS)


def write_order(place: FilePlace, keys: np.ndarray, page_rows: int) -> KeyOrder:
    """Write the order of a space's keys, once for a run. It must stay the same, or all pages change.

    Args:
        place: Where the file goes.
        keys: Every key of the space once, hottest first.
        page_rows: Keys in a page. Pages of 4 to 8 kB serve scattered keys well.
    """
    keys = np.asarray(keys)
    if keys.ndim != 1 or not np.array_equal(np.sort(keys), np.arange(len(keys))):
        raise UserError(f"an order has every key from 0 to {len(keys) - 1} once")
    if not 1 <= page_rows <= max(len(keys), 1):
        raise UserError(f"a page has 1 to {len(keys):,} rows, not {page_rows}")
    keys = keys.astype(np.int32)
    return KeyOrder(keys, page_rows, place.put(to_bytes({ORDER: keys}), ARRAYS))


def write_pages(
    place: FilePlace,
    partition: Partition,
    params: Mapping[str, Any],
    rng: Any,
    belongs: About,
    orders: Mapping[str, KeyOrder],
    previous: PagedVersion | None = None,
    changed: Mapping[str, np.ndarray] | None = None,
    public: Mapping[str, Any] | None = None,
) -> PagedVersion:
    """Write a version as pages. The manifest is written last, so whoever has it finds all files.

    Args:
        place: Where the files go.
        partition: The roles of the model's leaves.
        params: The server's leaves.
        rng: The round's randomness, a key of JAX or its key data.
        belongs: Run, version and model.
        orders: {key space: order of its keys}.
        previous: The version before this one. Its files must still be in the place.
        changed: {key space: the keys whose rows differ from `previous`}, if that is known. Then only their pages
            are made. The result is the same. All rows of a space that is not named are taken as changed.
        public: Numbers that every client is told.
    """
    if set(orders) != set(partition.spaces):
        raise UserError(
            f"the key spaces are {', '.join(partition.spaces) or '(none)'}, and there are orders for "
            f"{', '.join(orders) or '(none)'}"
        )
    digests = {}
    for space, order in orders.items():
        before = _digests_before(previous, space, order)
        new = None if before is None or changed is None else changed.get(space)
        digests[space] = _put_pages(place, partition, params, space, order, before, new)
    unsent = (*partition.of("keyed"), *partition.there)
    shared = {path: np.asarray(leaf) for path, leaf in params.items() if path not in unsent}
    spaces = {
        space: PagedSpace(
            len(order.keys),
            order.page_rows,
            order.file,
            tuple(place.put_many(index_blocks(digests[space]), "index")),
        )
        for space, order in orders.items()
    }
    manifest = Manifest(
        belongs._replace(task=""), key_data(rng), place.put(to_bytes(shared), ARRAYS), spaces, public or {}
    )
    return PagedVersion(place.put(write_manifest(manifest), "json"), manifest, digests)


def read_version(place: FilePlace, partition: Partition, name: str) -> PagedVersion:
    """What `write_pages` returned for the version with this manifest, for a server that was started again."""
    manifest = read_manifest(partition, place.read(name))
    digests = {
        space: np.frombuffer(b"".join(map(place.read, paged.index)), np.uint8).reshape(-1, RAW)
        for space, paged in manifest.spaces.items()
    }
    return PagedVersion(name, manifest, digests)


def _digests_before(previous: PagedVersion | None, space: str, order: KeyOrder) -> np.ndarray | None:
    """The pages of the version before, if they were cut in the same way."""
    paged = previous.manifest.spaces.get(space) if previous else None
    same = paged is not None and (paged.order, paged.page_rows) == (order.file, order.page_rows)
    return previous.digests[space] if previous and same else None


def _put_pages(
    place: FilePlace,
    partition: Partition,
    params: Mapping[str, Any],
    space: str,
    order: KeyOrder,
    before: np.ndarray | None,
    changed: np.ndarray | None,
) -> np.ndarray:
    """Write the pages that may have changed. Returns the digests of all pages."""
    count = -(-len(order.keys) // order.page_rows)
    pages = np.arange(count)
    if changed is not None:
        pages = np.unique(np.flatnonzero(np.isin(order.keys, changed)) // order.page_rows)
    names = place.put_many(_pages(partition, params, space, order, pages), ARRAYS)
    digests = np.empty((count, RAW), np.uint8) if before is None else before.copy()
    found = bytes.fromhex("".join(name.split(".")[0] for name in names))
    digests[pages] = np.frombuffer(found, np.uint8).reshape(-1, RAW)
    return digests


def _pages(
    partition: Partition, params: Mapping[str, Any], space: str, order: KeyOrder, pages: np.ndarray
) -> Iterator[bytes]:
    """The bytes of these pages, in order. A block of pages is encoded at a time."""
    rest = len(order.keys) % order.page_rows
    partial = bool(rest and len(pages) and pages[-1] == len(order.keys) // order.page_rows)
    full = pages[:-1] if partial else pages
    for at in range(0, len(full), BLOCK_PAGES):
        rows = full[at : at + BLOCK_PAGES, None] * order.page_rows + np.arange(order.page_rows)
        yield from _cut(_encoded(partition, params, space, order.keys[rows.ravel()]), order.page_rows)
    if partial:
        yield from _cut(_encoded(partition, params, space, order.keys[-rest:]), rest)


def _encoded(
    partition: Partition, params: Mapping[str, Any], space: str, keys: np.ndarray
) -> dict[str, np.ndarray]:
    """The rows of these keys as a client is sent them. Padded to few sizes, for some encodings are compiled."""
    arrays = {}
    for path in partition.spaces[space]:
        parts = encode_rows(partition, path, params[path], pad_to_power(keys))
        arrays |= {name: part[: len(keys)] for name, part in parts.items()}
    return arrays


def _cut(arrays: Mapping[str, np.ndarray], rows: int) -> Iterator[bytes]:
    """Pages of so many rows. All have the same header, so they are put together as one table of bytes."""
    first = to_bytes({name: array[:rows] for name, array in arrays.items()})
    where = layout(first, len(first))
    count = len(next(iter(arrays.values()))) // rows
    header = np.broadcast_to(np.frombuffer(first[: where.first], np.uint8), (count, where.first))
    raw = [np.ascontiguousarray(arrays[name]).view(np.uint8).reshape(count, -1) for name in where.places]
    for page in np.concatenate([header, *raw], axis=1):
        yield page.tobytes()
