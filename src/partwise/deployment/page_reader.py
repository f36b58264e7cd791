"""How a device gets the slices of its keys from files (`deployment.pages`): by pages, from the whole file, or by
Range. The result is that of `server.messages.read_slices`, bit for bit, and as carefully checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from partwise.checkpoint import ArrayLayout, from_bytes, layout
from partwise.deployment.file_cache import FileCache
from partwise.deployment.manifest import (
    BLOCK_PAGES,
    LARGEST_MANIFEST,
    RAW,
    PagedSpace,
    page_name,
    read_manifest,
)
from partwise.deployment.pages import ORDER
from partwise.deployment.ranges import Piece, cut, merge, read_layout, row_pieces
from partwise.model.partition import Partition
from partwise.server import messages
from partwise.server.messages import LARGEST_HEADER, About, Slices, check_arrays
from partwise.types import UserError

Keys = Mapping[str, np.ndarray]


class GoneError(UserError):
    """A file that is not there (any more): ask the server which version is the present one."""


class Fetch(Protocol):
    """Where the files come from, as `deployment.http_files.HttpFiles`. Files that are not there raise
    `GoneError`."""

    def get_many(self, bounds: Mapping[str, int]) -> dict[str, bytes]:
        """Files by name, each of at most so many bytes, checked by digest."""
        ...

    def get_ranges(self, name: str, pieces: Iterable[Piece]) -> tuple[list[bytes], int]:
        """Pieces of a file, and its size."""
        ...


class Reader:
    """A device's reader of versions.

    Args:
        fetch: Where the files come from.
        cache_folder: Where they are kept; None: nowhere.
        partition: The roles of the model's leaves.
        cache_bytes: What the kept files may have together.
    """

    def __init__(
        self,
        fetch: Fetch,
        cache_folder: str | Path | None,
        partition: Partition,
        cache_bytes: int = 256 << 20,
    ):
        self._fetch, self._partition = fetch, partition
        self._cache = FileCache(cache_folder, cache_bytes) if cache_folder else None
        self._shapes = lru_cache(maxsize=64)(partial(_space_shapes, partition))
        self._space_of = {name: space for space in partition.spaces for name in self._shapes(space, 1)}
        unsent = (*partition.of("keyed"), *partition.there)
        self._shared = {p: partition.server_shapes[p] for p in partition.server_paths if p not in unsent}
        self._places: dict[str, np.ndarray] = {}  # an order's file -> key -> its place in the order

    def slices(self, name: str, keys: Keys, belongs: About | None = None) -> Slices:
        """The slices of these keys, from a manifest (`.json`) and its pages or from a whole file (`.safetensors`).

        If `belongs` says what the slices must belong to, a version of another run or round is an error, and the
        result belongs to that task.
        """
        self._check_keys(keys)
        sent = self._by_pages(name, keys) if name.endswith(".json") else self._from_whole(name, keys)
        return self._decoded(sent, belongs)

    def rows(self, name: str, keys: Keys, belongs: About | None = None, gap: int = 4096) -> Slices:
        """The slices of these keys from a whole file, by Range. Rows with at most `gap` bytes between them come in
        one request. Pieces cannot be checked by the file's digest: use it over TLS."""
        self._check_keys(keys)
        ask = partial(self._fetch.get_ranges, name)
        where = read_layout(ask, LARGEST_HEADER)
        sent = messages.read_slices_header(self._partition, where.header)
        check_arrays(
            "slices", where.places, messages.slices_shapes(self._partition, self._partition.all_keys)
        )
        own = lambda array: keys[self._space_of[array]] if array in self._space_of else None
        pieces = {array: row_pieces(where, array, own(array)) for array in where.places}
        merged = merge((piece for each in pieces.values() for piece in each), gap)
        raw = cut(pieces, merged, ask(merged)[0])
        shapes = messages.slices_shapes(self._partition, _counts(keys))
        arrays = {a: np.frombuffer(raw[a], shape.dtype).reshape(shape.shape) for a, shape in shapes.items()}
        return self._decoded(sent._replace(params=arrays), belongs)

    def _check_keys(self, keys: Keys) -> None:
        counts = self._partition.all_keys
        if set(keys) != set(counts):
            raise UserError(
                f"keys must be given for {', '.join(counts) or 'no space'}, not {', '.join(keys)}"
            )
        for space, each in keys.items():
            if len(each) and not 0 <= each.min() <= each.max() < counts[space]:
                raise UserError(
                    f"the keys of '{space}' are 0 to {counts[space] - 1}, not {each.min()} to {each.max()}"
                )

    def _decoded(self, sent: Slices, belongs: About | None) -> Slices:
        found = sent.about
        if belongs and (found.run, found.version) != (belongs.run, belongs.version):
            raise UserError(
                f"the files are of version {found.version} of the run '{found.run}', and the task is of version "
                f"{belongs.version} of '{belongs.run}'"
            )
        params = messages.decode_rows(self._partition, sent.params)
        return sent._replace(about=belongs or found, params=params)

    def _from_whole(self, name: str, keys: Keys) -> Slices:
        every = self._partition.all_keys
        bound = LARGEST_HEADER + _num_bytes(messages.slices_shapes(self._partition, every))
        sent = messages.read_encoded(self._partition, self._files({name: bound})[name], every)
        own = lambda array, values: values[keys[self._space_of[array]]] if array in self._space_of else values
        return sent._replace(params={array: own(array, values) for array, values in sent.params.items()})

    def _by_pages(self, name: str, keys: Keys) -> Slices:
        manifest = read_manifest(self._partition, self._files({name: LARGEST_MANIFEST})[name])
        orders = {each.order: LARGEST_HEADER + 4 * each.num_keys for each in manifest.spaces.values()}
        new = {order: bound for order, bound in orders.items() if order not in self._places}
        files = self._files({manifest.shared: LARGEST_HEADER + _num_bytes(self._shared), **new})
        arrays = _arrays(files[manifest.shared], self._shared)
        for each in manifest.spaces.values():
            if each.order in new:
                self._places[each.order] = _places(files[each.order], each.num_keys)
        at = {space: self._places[each.order][keys[space]] for space, each in manifest.spaces.items()}
        names = self._page_names(manifest.spaces, at)
        bounds = {
            page: LARGEST_HEADER + _num_bytes(self._shapes(space, manifest.spaces[space].page_rows))
            for space, each in names.items()
            for page in each.values()
        }
        pages = self._files(bounds)
        for space, paged in manifest.spaces.items():
            arrays |= self._rows(
                space, paged, at[space], {n: pages[page] for n, page in names[space].items()}
            )
        return Slices(manifest.about, arrays, manifest.rng, manifest.public)

    def _page_names(
        self, spaces: Mapping[str, PagedSpace], at: Mapping[str, np.ndarray]
    ) -> dict[str, dict[int, str]]:
        """Space -> number of a page -> its name, for the pages with these places. Only their blocks are read."""
        pages = {space: np.unique(at[space] // each.page_rows) for space, each in spaces.items()}
        blocks = {space: np.unique(each // BLOCK_PAGES).tolist() for space, each in pages.items()}
        bounds = {spaces[s].index[b]: spaces[s].block_bytes(b) for s, each in blocks.items() for b in each}
        files = self._files(bounds)
        names: dict[str, dict[int, str]] = {}
        for space, paged in spaces.items():
            found = {b: _digests(files[paged.index[b]], paged.block_bytes(b)) for b in blocks[space]}
            names[space] = {
                p: page_name(found[p // BLOCK_PAGES][p % BLOCK_PAGES]) for p in pages[space].tolist()
            }
        return names

    def _rows(
        self, space: str, paged: PagedSpace, at: np.ndarray, pages: Mapping[int, bytes]
    ) -> dict[str, np.ndarray]:
        """The rows at these places of the order, from the pages that hold them."""
        shapes = self._shapes(space, len(at))
        arrays = {name: np.empty(shape.shape, shape.dtype) for name, shape in shapes.items()}
        by_page = np.argsort(at // paged.page_rows, kind="stable")
        numbers, begins = np.unique(at[by_page] // paged.page_rows, return_index=True)
        for page, own in zip(numbers.tolist(), np.split(by_page, begins)[1:], strict=True):
            found = _arrays(pages[page], self._shapes(space, paged.rows_of(page)))
            inside = at[own] - page * paged.page_rows
            for name, array in arrays.items():
                array[own] = found[name][inside]
        return arrays

    def _files(self, bounds: Mapping[str, int]) -> dict[str, bytes]:
        """Files from the cache, and the others from where they are served."""
        if self._cache is None:
            return self._fetch.get_many(bounds)
        found = self._cache.get_many(bounds)
        new = self._fetch.get_many({name: bound for name, bound in bounds.items() if name not in found})
        if new:
            self._cache.put_many(new)
        return found | new


def _counts(keys: Keys) -> dict[str, int]:
    return {space: len(each) for space, each in keys.items()}


def _space_shapes(partition: Partition, space: str, count: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Names, shapes and types of the arrays of so many rows of a space."""
    shapes = {}
    for path in partition.spaces[space]:
        shapes |= messages.rows_shapes(partition, path, count)
    return shapes


def _num_bytes(shapes: Mapping[str, Any]) -> int:
    return sum(shape.size * shape.dtype.itemsize for shape in shapes.values())


def _arrays(data: bytes, shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a page. Pages have few different headers, so each is read once."""
    first = 8 + min(int.from_bytes(data[:8], "little"), LARGEST_HEADER)
    where = _layout(data[:first], len(data))
    check_arrays("page", where.places, shapes)
    part = lambda p: np.frombuffer(
        data, p.dtype, (p.end - p.begin) // p.dtype.itemsize, where.first + p.begin
    )
    return {name: part(place).reshape(place.shape) for name, place in where.places.items()}


@lru_cache(maxsize=64)
def _layout(begin: bytes, size: int) -> ArrayLayout:
    return layout(begin, size, LARGEST_HEADER)


def _places(data: bytes, num_keys: int) -> np.ndarray:
    """The inverse of an order: the place of every key. The order must have every key once."""
    arrays, _ = from_bytes(data)
    check_arrays("order", arrays, {ORDER: jax.ShapeDtypeStruct((num_keys,), np.int32)})
    order, places = arrays[ORDER], np.full(num_keys, -1, np.int64)
    if len(order) and 0 <= order.min() <= order.max() < num_keys:
        places[order] = np.arange(num_keys)
    if (places < 0).any():
        raise UserError(f"the order does not have every key from 0 to {num_keys - 1} once")
    return places


def _digests(data: bytes, size: int) -> np.ndarray:
    if len(data) != size:
        raise UserError(f"a block of the index has {len(data)} bytes, and must have {size}")
    return np.frombuffer(data, np.uint8).reshape(-1, RAW)
