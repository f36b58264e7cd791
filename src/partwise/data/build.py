"""Stores too large for memory, built on disk from batches of rows.

Rows in any order (`build_store`) are written to a spool once, while clients and ids are counted. Then a
stable counting sort puts them in place. Rows that are already grouped by client (`write_store`) are written
directly.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from partwise.data.checks import Column, check_known, check_sortable, clean_columns
from partwise.data.id_columns import Ids, KeyTable, to_ids
from partwise.data.ids import join_ids, typed, vocabulary_names
from partwise.data.ragged import offsets, owners, row_blocks
from partwise.data.remote_folder import EXAMPLES
from partwise.data.row_batches import Batch, Wanted, to_columns
from partwise.data.spool import Layout, Pile, Spool, layouts_of, rows_at_once
from partwise.data.store import CLIENT_COLUMN, ClientStore, open_store
from partwise.data.store_folder import Block, allocate_examples, finish, new_folder, write_folder
from partwise.types import UserError

ROWS_AT_ONCE = 1 << 20
CLIENT = "\0client"  # the client column's name in the spool; no user's column has this name
UNKEPT = "unkept.raw"  # a column by which rows are sorted, but which is not kept


def build_store(
    path: str | Path,
    batches: Iterable[Batch],
    client: str,
    ids: Sequence[str] | Mapping[str, str] = (),
    order_by: str | None = None,
    info: Mapping[str, Any] | None = None,
    columns: Sequence[str] | None = None,
) -> ClientStore:
    """Write the store that `ClientStore.from_arrays` would make of all rows to the new folder `path`. If
    `columns` is given, only these columns are kept.

    Memory: one batch, and the distinct clients and ids. Other memory is only file pages that the system can
    take back. Disk: twice the size of the rows during the build.
    """
    names = vocabulary_names(ids)
    with new_folder(path) as folder, contextlib.closing(Spool(folder)) as spool:
        keys = {name: KeyTable() for name in (CLIENT, *names.values())}
        key_of = {CLIENT: keys[CLIENT], **{name: keys[names[name]] for name in names}}
        for batch in _cleaned(batches, client, Wanted(ids=(client, *names)), order_by):
            spool.append(
                {name: key_of[name].encode(v) if isinstance(v, Ids) else v for name, v in batch.items()}
            )
        targets = _targets(folder, spool, columns)
        vocabularies = {name: each.sort() for name, each in keys.items()}
        counts = _place(spool, key_of, targets)
        if order_by is not None:
            _sort(targets, counts, order_by)
        for target in targets.values():
            target.flush()
        spool.discard()
        (folder / UNKEPT).unlink(missing_ok=True)
        kept = {name: vocabularies[names[name]] for name in names if columns is None or name in columns}
        layouts = _kept(spool, columns)
        finish(folder, vocabularies[CLIENT], counts, layouts, kept, {**(info or {}), CLIENT_COLUMN: client})
    return open_store(path)


def _kept(spool: Spool, columns: Sequence[str] | None) -> dict[str, Layout]:
    """The layouts of a store's columns, in the requested order."""
    there = {name: layout for name, layout in spool.layouts.items() if name != CLIENT}
    if columns is None or not there:
        return there
    check_known(columns, there)
    return {name: there[name] for name in columns}


def _targets(folder: Path, spool: Spool, columns: Sequence[str] | None) -> dict[str, np.memmap]:
    """Where each column's sorted rows are written: into `examples.arrow`, or into a separate file if the
    column is used only for sorting."""
    kept, file = _kept(spool, columns), folder / EXAMPLES
    places = allocate_examples(folder, kept, spool.num_rows)
    targets = {
        name: np.memmap(file, layout.dtype, "r+", places[name], (spool.num_rows, *layout.shape))
        for name, layout in kept.items()
    }
    for name in spool.layouts.keys() - {CLIENT} - kept.keys():
        layout = spool.layouts[name]
        targets[name] = np.memmap(folder / UNKEPT, layout.dtype, "w+", shape=(spool.num_rows, *layout.shape))
    return targets


def write_store(
    path: str | Path,
    blocks: Iterable[Block],
    vocabularies: Mapping[str, np.ndarray] | None = None,
    info: Mapping[str, Any] | None = None,
) -> ClientStore:
    """Write blocks `(client_ids, counts, columns)` of rows that are already grouped by client, in their
    order.

    All rows of a client must be in one block. Columns named in `vocabularies` hold keys into them.
    """
    write_folder(path, _checked(blocks), vocabularies or {}, info or {})
    return open_store(path)


def join_blocks(
    blocks: Iterable[Block],
    vocabularies: Mapping[str, np.ndarray] | None = None,
    info: Mapping[str, Any] | None = None,
) -> ClientStore:
    """The store that `write_store` would write, in memory. There are never two copies of the rows."""
    client_ids, counts, pile = [], [], Pile()
    for block in _checked(blocks):
        client_ids.append(block.client_ids)
        counts.append(block.counts)
        pile.append(block.columns)
    if not pile.num_rows:
        raise UserError("there are no rows to store: give at least one client with one example")
    joined = np.concatenate(counts)
    return ClientStore(
        pile.columns(), offsets(joined), joined, join_ids(client_ids), vocabularies or {}, info or {}
    )


def _cleaned(
    batches: Iterable[Batch], client: str, plan: Wanted, order_by: str | None
) -> Iterator[dict[str, Column]]:
    first_row = 0
    for batch in batches:
        columns = to_columns(batch, plan, first_row)
        check_known([client, *plan.ids, *([order_by] if order_by else [])], columns)
        owner, cleaned = clean_columns(columns.pop(client), columns, plan.ids, first_row)
        if order_by is not None:
            check_sortable(order_by, cleaned)
        if len(owner):
            yield {CLIENT: owner, **cleaned}
        first_row += len(owner)


def _checked(blocks: Iterable[Block]) -> Iterator[Block]:
    first_row, seen = 0, []
    for client_ids, counts, columns in blocks:
        owner, counts = to_ids("client", client_ids), np.asarray(counts, np.int64)
        if len(owner) != len(counts) or counts.min(initial=0) < 0:
            raise UserError(
                f"a block has {len(owner)} client ids and {len(counts)} counts: give a count per client"
            )
        rows = Ids(owner.texts, np.repeat(owner.places, counts))
        _, cleaned = clean_columns(rows, columns, first_row=first_row)
        seen.append(typed(owner.texts)[owner.places])
        yield Block(seen[-1], counts, {name: np.asarray(values) for name, values in cleaned.items()})
        first_row += int(counts.sum())
    distinct, times = np.unique(join_ids(seen or [np.empty(0)]), return_counts=True)
    if np.any(times > 1):
        again = distinct[times > 1][0]
        raise UserError(
            f"client {again} turns up twice: give each client's rows once, in one block, or use build_store"
        )


def _place(spool: Spool, keys: Mapping[str, KeyTable], targets: Mapping[str, np.ndarray]) -> np.ndarray:
    """Write every row to the next place of its client. Returns the number of rows of each client."""
    step = rows_at_once(spool.layouts, ROWS_AT_ONCE)
    ends = [min(first + step, spool.num_rows) for first in range(0, spool.num_rows, step)]
    chunks = list(itertools.pairwise([0, *ends]))
    counts = np.zeros(len(keys[CLIENT].numbers), np.int64)
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
