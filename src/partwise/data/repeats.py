"""Ids that a client has more than once: how many, and one row of each in the place of several."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import numpy as np

from partwise.data.ragged import offsets, owners
from partwise.data.store import ClientStore
from partwise.types import counted

Kept = Literal["last", "mean"]


def num_repeats(store: ClientStore, column: str) -> int:
    """How many examples have an id that the same client has in an earlier one."""
    packed = store if store.packed() else store.gather()
    return packed.num_examples - len(np.unique(_pairs(packed, column)))


class OneEach(NamedTuple):
    """A store in which every client has every id once, and what was repeated.

    store:   the clients, with one row for each of their ids
    repeats: how many rows are gone
    example: (client, id, values of its rows) of the first that was repeated; None if none was
    """

    store: ClientStore
    repeats: int
    example: tuple[Any, Any, list[float]] | None


def one_each(store: ClientStore, column: str, value: str, kept: Kept, by: str | None = None) -> OneEach:
    """Every client's rows with one row for each id of a column.

    Args:
        store: The clients.
        column: The column of ids.
        value: The column of values, such as ratings.
        kept: "last": the client's last row of the id. "mean": the same row with the mean of the values.
        by: The column by which rows are the last (a time); without it, the order of the rows.

    Returns:
        The clients, packed if something was repeated. A row has the place of the first row of its id, so rows that
        are copied change nothing, wherever the copies are.
    """
    packed = store if store.packed() else store.gather()
    pairs = _pairs(packed, column)
    order = np.lexsort((packed.columns[by], pairs)) if by else np.argsort(pairs, kind="stable")
    starts = np.flatnonzero(np.diff(pairs[order], prepend=-1))
    repeats = len(pairs) - len(starts)
    if not repeats:
        return OneEach(packed if store.remote else store, 0, None)
    sizes = np.diff(np.append(starts, len(pairs)))
    places = np.minimum.reduceat(order, starts)
    rows = order[starts + sizes - 1][np.argsort(places)]
    columns = {name: values[rows] for name, values in packed.columns.items()}
    values = packed.columns[value]
    if kept == "mean":
        # Copies of a value keep it exactly: the mean is its own plus what the others differ from it.
        base = values[order[starts]].astype(np.float64)
        sums = np.add.reduceat(values[order] - np.repeat(base, sizes), starts)
        means = (base + sums / sizes)[np.argsort(places)]
        whole = values.dtype.kind in "iu" and np.all(means == np.round(means))
        columns[value] = means.astype(values.dtype if whole or values.dtype.kind == "f" else np.float32)
    owner = owners(packed.counts)
    counts = np.bincount(owner[rows], minlength=packed.num_clients)
    first = int(np.argmax(sizes > 1))
    mine = order[starts[first] : starts[first] + sizes[first]]
    found = packed.columns[column][mine[0]]
    name = packed.vocabularies[column][found] if column in packed.vocabularies else found
    example = (packed.client_ids[owner[mine[0]]].item(), name.item(), values[mine].tolist())
    kept_store = dataclasses.replace(packed, columns=columns, starts=offsets(counts), counts=counts)
    return OneEach(kept_store, repeats, example)


def tell_repeats(found: OneEach, kept: Kept) -> str:
    """What was repeated, in words; empty if nothing was."""
    if found.example is None:
        return ""
    client, id, values = found.example
    shown = ", ".join(f"{value:g}" for value in values[:3]) + (", ..." if len(values) > 3 else "")
    return (
        f"{counted(found.repeats, 'row')} of an item that the client rated before, as client {client}: item {id} "
        f"with {shown}. Of each item the {'last rating is used' if kept == 'last' else 'mean rating is used'} "
        f"(data.duplicates = {kept}), so that none is both given and predicted"
    )


def _pairs(packed: ClientStore, column: str) -> np.ndarray:
    """A number for every row, which is the same for rows of one client with one id."""
    values = packed.columns[column].astype(np.int64)
    return owners(packed.counts) * (int(values.max(initial=0)) + 1) + values
