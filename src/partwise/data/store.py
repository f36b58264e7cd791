"""Many clients' examples as flat columns: client k owns rows `starts[k] : starts[k] + counts[k]` of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from partwise.data.checks import check_known, check_sortable, clean_columns
from partwise.data.id_columns import Ids, factorize, to_ids
from partwise.data.ids import look_up, typed, vocabulary_names
from partwise.data.object_store import is_address, shown_place
from partwise.data.ragged import offsets, owners, row_blocks, row_indices, shuffle_order
from partwise.data.reading import is_there, naming
from partwise.data.remote import RemoteColumn, read_columns
from partwise.data.remote_folder import RECORD, has_record
from partwise.data.spool import layouts_of, rows_at_once
from partwise.data.store_folder import Block, read_folder, write_folder
from partwise.types import UserError, nearest

ROWS_PER_BLOCK = 1 << 20

CLIENT_COLUMN = "client_column"  # key of a store's `info`: the name of the client column in its table


@dataclasses.dataclass(frozen=True, eq=False)
class ClientStore:
    """Many clients' examples as flat columns.

    A store is a view of clients over shared columns. Only `gather`, `reorder` and `pool` copy rows. The order
    of a client's rows has a meaning (time, or shuffled), and every operation keeps it. Make a store from
    arrays with `ClientStore.from_arrays`, from files with `read_table`, from a program with `read_rows`.

    Attributes:
        columns: {name: array [N] or [N, ...]}; memory-mapped and read-only if opened from disk. Those of a store
            that was opened by an address have the form of arrays; their rows are read when clients are gathered.
        starts: [C], where each client's rows begin.
        counts: [C], how many rows each client has.
        client_ids: [C], the clients' ids in the source.
        vocabularies: {column of ids: the source id of every key}.
        info: Where the data comes from.
    """

    columns: Mapping[str, np.ndarray]  # each [N] or [N, ...]; memory-mapped and read-only if opened from disk
    starts: np.ndarray  # [C] int64
    counts: np.ndarray  # [C] int64
    client_ids: np.ndarray  # [C] the ids of the source, int64 or text
    vocabularies: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # source ids of keys
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # where it comes from; values for JSON

    def __post_init__(self):
        lengths = {name: len(values) for name, values in self.columns.items()}
        if not lengths or len(set(lengths.values())) > 1:
            raise UserError(f"columns must be of one length and at least one, these have {lengths}")
        if not len(self.starts) == len(self.counts) == len(self.client_ids):
            raise UserError("starts, counts and client_ids must have one entry per client")
        num_rows = next(iter(lengths.values()))
        if len(self.counts) and (
            min(self.starts.min(), self.counts.min()) < 0 or (self.starts + self.counts).max() > num_rows
        ):
            raise UserError(f"starts and counts must lie within the {num_rows} rows")

    def __repr__(self) -> str:
        columns = ", ".join(f"{name} {v.dtype}{list(v.shape[1:]) or ''}" for name, v in self.columns.items())
        return f"ClientStore({self.num_clients} clients, {self.num_examples} examples: {columns})"

    @classmethod
    def from_arrays(
        cls,
        client: Any,
        *,
        ids: Sequence[str] | Mapping[str, str] = (),
        info: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> ClientStore:
        """Group rows, given in any order, by their client. Each client's rows keep their order.

        Clients are sorted by id. Columns named in `ids` become keys 0..K-1 in the order of the sorted ids. If
        `ids` is a mapping, columns with the same name on the right share their keys: `ids={"past": "item",
        "next": "item"}`.
        """
        return group_rows(client, columns, ids, info or {})

    @property
    def remote(self) -> bool:
        """Whether the rows are in an object store, and read over a network when they are gathered."""
        return any(isinstance(values, RemoteColumn) for values in self.columns.values())

    @property
    def num_clients(self) -> int:
        return len(self.counts)

    @property
    def num_examples(self) -> int:
        return int(self.counts.sum())

    def num_keys(self, column: str) -> int:
        """How many keys an id column has. These clients need not use all of them."""
        if column in self.vocabularies:
            return len(self.vocabularies[column])
        check_known([column], self.columns)
        known = ", ".join(self.vocabularies) or "none"
        raise UserError(
            f"column '{column}' holds values, not keys (columns with keys: {known}): name it in ids=(...)"
        )

    def packed(self) -> bool:
        """Whether the clients are stored one after the other and own every row, on this machine."""
        if self.remote:
            return False
        whole = self.num_examples == len(next(iter(self.columns.values())))
        return whole and np.array_equal(self.starts, offsets(self.counts))

    def find(self, client_id: int | str) -> int:
        """The position of the client with this source id. 7 and "7" are the same id, "007" is another."""
        place = int(self.places(typed([str(client_id)]))[0])
        if place < 0:
            ordered = np.sort(self.client_ids.astype(str))
            near = int(np.searchsorted(ordered, str(client_id)))
            known = nearest(str(client_id), ordered[max(near - 100, 0) : near + 100].tolist())
            raise UserError(f"there is no client {client_id!r} among the {self.num_clients} ({known})")
        return place

    def places(self, client_ids: np.ndarray) -> np.ndarray:
        """The positions of the clients with these source ids; -1 for ids that are not here."""
        return look_up(self.client_ids, client_ids)

    def examples(self, position: int) -> dict[str, np.ndarray]:
        """One client's rows of every column, not copied."""
        if self.remote:
            return dict(self.gather([position]).columns)
        rows = slice(self.starts[position], self.starts[position] + self.counts[position])
        return {name: values[rows] for name, values in self.columns.items()}

    def select(self, names: Sequence[str]) -> ClientStore:
        """Only these columns, in this order."""
        check_known(names, self.columns)
        vocabularies = {name: self.vocabularies[name] for name in names if name in self.vocabularies}
        return dataclasses.replace(
            self, columns={name: self.columns[name] for name in names}, vocabularies=vocabularies
        )

    def rename(self, names: Mapping[str, str]) -> ClientStore:
        """Columns under new names, given as {old: new}."""
        check_known(names, self.columns)
        columns = {names.get(name, name): values for name, values in self.columns.items()}
        if len(columns) < len(self.columns):
            raise UserError(f"renaming {dict(names)} gives two columns one name: choose a name that is free")
        vocabularies = {names.get(name, name): values for name, values in self.vocabularies.items()}
        return dataclasses.replace(self, columns=columns, vocabularies=vocabularies)

    def with_columns(self, **columns: Any) -> ClientStore:
        """The store with more columns, one value per row of a packed store. A column with an existing name is
        replaced."""
        if not self.packed():
            raise UserError("only a packed store can take new columns: call gather() first")
        owner = Ids(self.client_ids.astype(str).tolist(), owners(self.counts))
        _, cleaned = clean_columns(owner, columns)
        kept = {name: ids for name, ids in self.vocabularies.items() if name not in columns}
        return dataclasses.replace(self, columns={**self.columns, **cleaned}, vocabularies=kept)

    def take(self, positions: Any) -> ClientStore:
        """Only these clients, in this order. `positions` are numbers, or a mask over all clients."""
        chosen = self._positions(positions)
        return dataclasses.replace(
            self, starts=self.starts[chosen], counts=self.counts[chosen], client_ids=self.client_ids[chosen]
        )

    def filter(self, min_examples: int) -> ClientStore:
        """Only clients with at least so many examples."""
        return self.take(self.counts >= min_examples)

    def cap(self, max_examples: int) -> ClientStore:
        """The first `max_examples` examples of each client."""
        if max_examples < 1:
            raise UserError(f"max_examples is {max_examples}: give at least 1")
        return self.narrow(np.zeros_like(self.counts), np.minimum(self.counts, max_examples))

    def narrow(self, skip: np.ndarray, counts: np.ndarray) -> ClientStore:
        """For each client, the `counts[k]` examples after its first `skip[k]`. Counts may be 0."""
        if skip.min(initial=0) < 0 or counts.min(initial=0) < 0 or np.any(skip + counts > self.counts):
            raise UserError("skip + counts must stay within each client's examples")
        return dataclasses.replace(self, starts=self.starts + skip, counts=counts)

    def gather(self, positions: Any = None) -> ClientStore:
        """These clients (or all), packed into memory. Rows of other clients are not read. From an object store,
        all requests are made together, by many threads."""
        chosen = self if positions is None else self.take(positions)
        if not self.remote:
            return chosen._pack(row_indices(chosen.starts, chosen.counts))
        columns: Any = self.columns  # all of them are remote: a store that is not packed takes no others
        read = read_columns(columns, chosen.starts, chosen.counts)
        return dataclasses.replace(chosen, columns=read, starts=offsets(chosen.counts))

    def reorder(self, by: str | None = None, seed: int | None = None) -> ClientStore:
        """Each client's rows in a new order, packed into memory: sorted by a column (stable), or shuffled.

        A client's shuffle depends on its id and the seed, not on the other clients.
        """
        if (by is None) == (seed is None):
            raise UserError(
                f"reorder needs a column to sort by or a seed to shuffle with, not by={by!r}, seed={seed!r}"
            )
        if self.remote:
            return self.gather().reorder(by, seed)
        rows = row_indices(self.starts, self.counts)
        if by is None:
            return self._pack(rows[shuffle_order(self.client_ids, self.counts, int(seed or 0))])
        check_sortable(by, self.columns)
        return self._pack(rows[np.lexsort((self.columns[by][rows], owners(self.counts)))])

    def pool(self, size: int | None = None) -> ClientStore:
        """One client, `all`, that owns every row, for centralised training. With `size`, one client for every
        `size` rows in turn; rows that are left at the end are one more client."""
        whole = self if self.packed() else self.gather()
        total = self.num_examples
        parts = max(-(-total // size), 1) if size else 1
        starts = np.arange(parts) * (size or 0)
        counts = np.diff(np.append(starts, total))
        names = np.array(["all"] if size is None else [f"all {i}" for i in range(parts)])
        return dataclasses.replace(whole, starts=starts, counts=counts, client_ids=names)

    def blocks(self, max_rows: int = ROWS_PER_BLOCK) -> Iterator[Block]:
        """All clients in order, in packed blocks of about `max_rows` rows; fewer if rows are wide."""
        for part in row_blocks(self.counts, rows_at_once(layouts_of(self.columns), max_rows)):
            store = self.gather(np.arange(part.start, part.stop))
            yield Block(store.client_ids, store.counts, store.columns)

    def save(self, path: str | Path) -> None:
        """Write a folder that `open_store` can open. `path` must not exist yet. An address (`s3://...`) is one of
        an object store."""
        write_folder(path, self.blocks(), self.vocabularies, self.info)

    def _pack(self, rows: np.ndarray) -> ClientStore:
        columns = {name: values[rows] for name, values in self.columns.items()}
        return dataclasses.replace(self, columns=columns, starts=offsets(self.counts))

    def _positions(self, positions: Any) -> np.ndarray:
        chosen = np.asarray(positions)
        if chosen.dtype == bool and chosen.shape == self.counts.shape:
            return np.flatnonzero(chosen)
        chosen = chosen.astype(np.int64) if chosen.size == 0 else chosen
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
            raise UserError("positions must be a list of whole numbers, or a mask with one entry per client")
        outside = chosen[(chosen < 0) | (chosen >= self.num_clients)]
        if len(outside):
            raise UserError(
                f"there is no client position {outside[0]}: positions go from 0 to {self.num_clients - 1}"
            )
        return chosen


def open_store(path: str | Path) -> ClientStore:
    """Open a store from its folder. This is fast: columns are memory maps, which are read when they are used. Of a
    store in an object store, only ids and numbers of examples are read; rows are read by range when they are used.

    Args:
        path: A folder written by `ClientStore.save`, or by `out=` of `read_table` and `read_rows`, or its address:
            `s3://BUCKET/PREFIX?region=REGION`.
    """
    with naming(f"the store {shown_place(path)}"):
        return ClientStore(**read_folder(path))


def is_store(path: str | Path) -> bool:
    """Whether there is a store in this folder or at this address."""
    return has_record(str(path)) if is_address(path) else is_there(Path(path) / RECORD)


def group_rows(
    client: Any, columns: Mapping[str, Any], ids: Sequence[str] | Mapping[str, str], info: Mapping[str, Any]
) -> ClientStore:
    """`ClientStore.from_arrays` for columns of any name."""
    names = vocabulary_names(ids)
    check_known(names, columns)
    owner, cleaned = clean_columns(client, columns, names)
    if len(owner) == 0 or not cleaned:
        raise UserError("there are no rows: give at least one client with one example and one column")
    client_ids, position = factorize([owner])
    order = np.argsort(position[0], kind="stable")
    rows, vocabularies = dict(cleaned), {}
    for vocabulary in set(names.values()):
        sharing = [name for name in names if names[name] == vocabulary]
        found, keys = factorize([to_ids(name, cleaned[name]) for name in sharing])
        rows |= dict(zip(sharing, keys, strict=True))
        vocabularies |= dict.fromkeys(sharing, found)
    counts = np.bincount(position[0], minlength=len(client_ids))
    rows = {name: np.asarray(values)[order] for name, values in rows.items()}
    vocabularies = {name: vocabularies[name] for name in names}
    return ClientStore(rows, offsets(counts), counts, client_ids, vocabularies, dict(info))
