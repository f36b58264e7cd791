"""Stores too large for memory, built on disk from batches of rows.

Rows in any order (`build_store`) are spooled once while clients and ids are counted, then placed by a stable
counting sort. Rows already grouped by client (`write_store`) go straight through.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from partwise.data.batches import Batch, to_columns
from partwise.data.checks import check_known, check_sortable, clean_columns
from partwise.data.folder import Block, allocate_examples, finish, new_folder, write_folder
from partwise.data.ragged import offsets, owners, row_blocks
from partwise.data.spool import Pile, Spool, layouts_of, rows_at_once
from partwise.data.store import ClientStore, open_store
from partwise.types import UserError

ROWS_AT_ONCE = 1 << 20
CLIENT = "\0client"  # the client column's name in the spool, which no user's column has


def build_store(
    path: str | Path,
    batches: Iterable[Batch],
    client: str,
    ids: Sequence[str] = (),
    order_by: str | None = None,
    info: Mapping[str, Any] | None = None,
) -> ClientStore:
    """The store that `ClientStore.from_arrays` would make of all rows, written to the new folder `path`.

    Memory: a batch, and the distinct clients and ids; beyond that only pages of the file that the system can
    take back. Disk: twice the rows while it works.
    """
    with new_folder(path) as folder, contextlib.closing(Spool(folder)) as spool:
        keys = {name: Keys() for name in (CLIENT, *ids)}
        for columns in _cleaned(batches, client, tuple(ids), order_by):
            spool.append({name: keys[name].encode(v) if name in keys else v for name, v in columns.items()})
        layouts = {name: layout for name, layout in spool.layouts.items() if name != CLIENT}
        places = allocate_examples(folder, layouts, spool.num_rows)
        targets = {
            name: np.memmap(folder / "examples.arrow", dtype, "r+", places[name], (spool.num_rows, *shape))
            for name, (dtype, shape) in layouts.items()
        }
        vocabularies = {name: keys[name].sort() for name in keys}
        client_ids = vocabularies.pop(CLIENT)
        counts = _place(spool, keys, targets)
        if order_by is not None:
            _sort(targets, counts, order_by)
        for target in targets.values():
            target.flush()
        spool.discard()
        finish(folder, client_ids, counts, layouts, vocabularies, info or {})
    return open_store(path)


def write_store(
    path: str | Path,
    blocks: Iterable[Block],
    vocabularies: Mapping[str, np.ndarray] | None = None,
    info: Mapping[str, Any] | None = None,
) -> ClientStore:
    """Write blocks `(client_ids, counts, columns)` of rows already grouped by client, in their order.

    A client must lie within one block. Columns named in `vocabularies` hold keys into them.
    """
    write_folder(path, _checked(blocks), vocabularies or {}, info or {})
    return open_store(path)


def join_blocks(
    blocks: Iterable[Block],
    vocabularies: Mapping[str, np.ndarray] | None = None,
    info: Mapping[str, Any] | None = None,
) -> ClientStore:
    """The store that `write_store` would write, in memory; at no time are there two copies of the rows."""
    client_ids, counts, pile = [], [], Pile()
    for block in _checked(blocks):
        client_ids.append(block.client_ids)
        counts.append(block.counts)
        pile.append(block.columns)
    if not pile.num_rows:
        raise UserError("there are no rows to store: give at least one client with one example")
    joined = np.concatenate(counts)
    return ClientStore(
        pile.columns(), offsets(joined), joined, np.concatenate(client_ids), vocabularies or {}, info or {}
    )


class Keys:
    """Numbers ids in the order in which they turn up, and knows their sorted order in the end."""

    def __init__(self):
        self.numbers: dict[Any, int] = {}
        self.ranks = np.empty(0, np.int32)

    def encode(self, values: np.ndarray) -> np.ndarray:
        distinct, inverse = np.unique(values, return_inverse=True)
        numbers = self.numbers
        return np.array([numbers.setdefault(k, len(numbers)) for k in distinct.tolist()], np.int32)[inverse]

    def sort(self) -> np.ndarray:
        """The sorted ids; from now on `ranks[number]` is an id's place among them."""
        if len({type(k) for k in self.numbers}) > 1:
            raise UserError("an id column holds numbers in one batch and text in another: give one type")
        ids = np.array(list(self.numbers))
        order = np.argsort(ids, kind="stable")
        self.ranks = np.empty(len(ids), np.int32)
        self.ranks[order] = np.arange(len(ids))
        return ids[order]


def _cleaned(
    batches: Iterable[Batch], client: str, ids: tuple[str, ...], order_by: str | None
) -> Iterator[dict[str, np.ndarray]]:
    first_row = 0
    for batch in batches:
        columns = to_columns(batch, first_row)
        check_known([client, *ids, *([order_by] if order_by else [])], columns)
        owner, cleaned = clean_columns(columns.pop(client), columns, ids, first_row)
        if order_by is not None:
            check_sortable(order_by, cleaned)
        if len(owner):
            yield {CLIENT: owner, **cleaned}
        first_row += len(owner)


def _checked(blocks: Iterable[Block]) -> Iterator[Block]:
    first_row, seen = 0, []
    for client_ids, counts, columns in blocks:
        client_ids, counts = np.asarray(client_ids), np.asarray(counts, np.int64)
        if len(client_ids) != len(counts) or counts.min(initial=0) < 0:
            raise UserError(
                f"a block has {len(client_ids)} client ids and {len(counts)} counts: give a count per client"
            )
        _, cleaned = clean_columns(np.repeat(client_ids, counts), columns, first_row=first_row)
        yield Block(client_ids, counts, cleaned)
        seen.append(client_ids)
        first_row += int(counts.sum())
    distinct, times = np.unique(np.concatenate(seen or [np.empty(0)]), return_counts=True)
    if np.any(times > 1):
        again = distinct[times > 1][0]
        raise UserError(
            f"client {again} turns up twice: give each client's rows once, in one block, or use build_store"
        )


def _place(spool: Spool, keys: Mapping[str, Keys], targets: Mapping[str, np.ndarray]) -> np.ndarray:
    """Put every row where its client's next row belongs; return the rows of each client."""
    step = rows_at_once(spool.layouts, ROWS_AT_ONCE)
    ends = [min(first + step, spool.num_rows) for first in range(0, spool.num_rows, step)]
    chunks = list(itertools.pairwise([0, *ends]))
    counts = np.zeros(len(keys[CLIENT].ranks), np.int64)
    for chunk in chunks:
        counts += np.bincount(keys[CLIENT].ranks[spool.read(CLIENT, *chunk)], minlength=len(counts))
    following = offsets(counts)
    for chunk in chunks:
        owner = keys[CLIENT].ranks[spool.read(CLIENT, *chunk)]
        order = np.argsort(owner, kind="stable")
        present, first, times = np.unique(owner[order], return_index=True, return_counts=True)
        rows = np.repeat(following[present] - first, times) + np.arange(len(order))
        following[present] += times
        for name, target in targets.items():
            values = spool.read(name, *chunk)[order]
            target[rows] = keys[name].ranks[values] if name in keys else values
    return counts


def _sort(targets: Mapping[str, np.ndarray], counts: np.ndarray, by: str) -> None:
    starts = offsets(counts)
    for block in row_blocks(counts, rows_at_once(layouts_of(targets), ROWS_AT_ONCE)):
        rows = slice(starts[block.start], starts[block.start] + counts[block].sum())
        order = np.lexsort((targets[by][rows], owners(counts[block])))
        for target in targets.values():
            target[rows] = target[rows][order]
