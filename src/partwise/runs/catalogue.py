"""Scores of a whole catalogue for one client.

If the model has one output for an example, the ranked column is the candidate: every id of the catalogue is put
into it. If it has an output for every id of the column, these are the scores of all ids after one example, as in a
model of histories.

Candidates are scored in chunks. A chunk's rows of the item table are the slice of a client that has these items,
so the table is neither copied nor gathered from, and one compiled program serves all chunks, on all cores.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from partwise.algorithm import Algorithm, whole_model
from partwise.data.checks import narrow
from partwise.data.ragged import pad_to_power
from partwise.data.store import ClientStore
from partwise.device import Device, Given, ask
from partwise.model.partition import Partition
from partwise.programs import jit
from partwise.randomness import client_numbers, words
from partwise.runs.client_file import NOBODY
from partwise.selection.slices import take_keys
from partwise.server.messages import key_data
from partwise.types import UserError, counted

CHUNK_BYTES = 4 << 20  # rows of a chunk: they stay in a core's cache, and calls are few
CHUNK_IDS = 1 << 14  # ids of a chunk, at most
NOBODIES = np.array([NOBODY])


class Around(NamedTuple):
    """An example without its candidate: what else the model reads for it."""

    columns: Mapping[str, Any]  # [1, ...]
    positions: Mapping[str, Any]  # [1, ...] of columns with keys: places among the rows
    rows: Mapping[str, Any]  # the server's leaves; of keyed ones the rows of the example's keys, or all
    number: Any  # the client's


class Catalogue:
    """The ids of a column, which a model scores for one client at a time. Its programs are compiled once.

    Args:
        algorithm: The client's side of the model.
        params: The server's leaves.
        column: The column whose ids are scored.
        num_ids: How many ids the column has.
        rng: The randomness of predictions.
    """

    def __init__(self, algorithm: Algorithm, params: Mapping[str, Any], column: str, num_ids: int, rng: Any):
        parts = algorithm.partition
        self._algorithm, self._params, self._rng = algorithm, params, key_data(rng)
        self._column, self._num_ids = column, num_ids
        self._space = next((space for space, names in parts.columns.items() if column in names), "")
        # Leaves of which a candidate needs its own row alone can be cut into chunks.
        alone = self._space and not parts.is_whole(self._space) and parts.block(self._space) == 1
        self._cut = parts.spaces[self._space] if alone else ()
        self._resident = cache(lambda path: jax.device_put(params[path]))
        self._score_chunk = jit(self._chunk, static_argnames=("names", "size"))
        self._score_all = jit(self._everything, static_argnames="names")
        self._shapes: dict[Any, tuple[int, ...]] = {}

    def scores(self, local: Mapping[str, Any], given: ClientStore | None = None) -> np.ndarray:
        """A score for every id [num_ids].

        Args:
            local: The client's local part.
            given: A store with one client. Its last example has the other columns that the model reads.
        """
        last = None if given is None else _last(given)
        names = () if last is None else tuple(sorted(last.columns))
        local = jax.device_put(dict(local))
        around = self._around(last, [name for name in names if name != self._column])
        if self._has_all(local, around, names, last is None):
            return np.asarray(self._score_all(local, self._around(last, names), names=names))[0]
        return self._candidates(partial(self._score_chunk, local, around, names=names))

    def _around(self, last: ClientStore | None, names: Collection[str]) -> Around:
        """What an example has in these columns."""
        if last is None:
            last = ClientStore(
                {self._column: np.zeros(1, np.int32)}, np.zeros(1, int), np.ones(1, int), NOBODIES
            )
        parts = self._reading(names)
        asked = ask(parts, whole_model(parts), last)
        rows = {path: self._rows(path, parts, asked.keys) for path in self._params}
        columns = {name: narrow(name, last.columns[name]) for name in names if name not in asked.positions}
        return Around(columns, asked.positions, rows, words(client_numbers(last.client_ids)[0]))

    def _reading(self, names: Collection[str], cut: bool = False) -> Partition:
        """The roles, where examples have these columns. With `cut`, the rows of the column's space are those of
        the examples, in their order."""
        parts = self._algorithm.partition
        columns = {space: tuple(n for n in own if n in names) for space, own in parts.columns.items()}
        whole = {path: dataclasses.replace(parts.roles[path], whole=True) for path in self._cut if cut}
        return dataclasses.replace(parts, columns=columns, roles={**parts.roles, **whole})

    def _rows(self, path: str, parts: Partition, keys: Mapping[str, np.ndarray]) -> Any:
        """A leaf of the server's, or the rows of it that an example needs."""
        role, leaf = parts.roles.get(path), self._params[path]
        if path in self._cut and not parts.columns[self._space]:
            return leaf[:0]
        if role is None or not role.space or len(keys[role.space]) == len(leaf):
            return self._resident(path)
        return pad_to_power(take_keys(leaf, keys[role.space]))

    def _has_all(self, local: Any, around: Around, names: tuple[str, ...], nothing_given: bool) -> bool:
        """Whether the model's outputs for an example are the scores of all ids."""
        if names not in self._shapes:
            score = partial(self._chunk, names=names, size=1)
            try:
                self._shapes[names] = jax.eval_shape(score, local, around, self._rows_of(0, 1), 0).shape
            except UserError as error:
                raise self._needs_more(error) if nothing_given else error from None
        shape = self._shapes[names]
        if set(shape) == {1}:  # one number for an example
            return False
        if shape != (1, self._num_ids):
            raise UserError(
                f"the model's outputs for one example have shape {shape[1:]}, and the column '{self._column}' has "
                f"{self._num_ids:,} ids: to recommend them, a model gives one number for an example, or one for "
                f"every id"
            )
        if nothing_given:
            raise self._needs_more("Its outputs are the scores of all ids after an example")
        return True

    def _needs_more(self, why: Any) -> UserError:
        return UserError(
            f"this model needs more than the ids of '{self._column}' to recommend them: give the client's last "
            f"example, with --client FILE (given=me.read(...)). {why}"
        )

    def _rows_of(self, first: int, size: int) -> dict[str, Any]:
        """Rows of the leaves that are cut. On a CPU, JAX copies them only where they are not aligned."""
        return jax.device_put({path: self._params[path][first : first + size] for path in self._cut})

    def _chunk(
        self,
        local: Any,
        around: Around,
        own: Mapping[str, Any],
        first: Any,
        names: tuple[str, ...],
        size: int,
    ) -> jax.Array:
        """The scores of `size` ids from `first` on, whose rows are `own` if the leaves are cut."""
        wide = lambda each: jnp.broadcast_to(each, (size, *each.shape[1:]))
        columns, positions = jax.tree_util.tree_map(wide, (dict(around.columns), dict(around.positions)))
        if self._cut:
            shared = self._algorithm.partition.columns[self._space]
            later = lambda at: jnp.where(
                at >= 0, size + at, at
            )  # rows of the example come after the candidates'
            positions = {name: later(at) if name in shared else at for name, at in positions.items()}
        ids = jnp.arange(size) + (0 if self._cut else first)
        (positions if self._space else columns)[self._column] = ids
        rows = {path: jnp.concatenate([own[path], around.rows[path]]) for path in self._cut}
        parts = self._reading((*names, self._column), cut=True)
        return self._predict(parts, local, Around(columns, positions, {**around.rows, **rows}, around.number))

    def _everything(self, local: Any, around: Around, names: tuple[str, ...]) -> jax.Array:
        """The scores of all ids after one example [1, num_ids]."""
        return self._predict(self._reading(names), local, around)

    def _predict(self, parts: Partition, local: Any, around: Around) -> jax.Array:
        every = dict.fromkeys(parts.spaces)  # all rows that are here are keys, and all ids are among them
        count = next(iter((*around.positions.values(), *around.columns.values()))).shape[0]
        given = Given(
            around.rows, around.columns, around.positions, every, every, count, around.number, self._rng
        )
        return Device(self._algorithm._replace(partition=parts)).predictions(local, given)

    def _candidates(self, score: Callable[..., jax.Array]) -> np.ndarray:
        """The scores of all ids, chunk by chunk, on all cores. Chunks have one size; the last two may overlap."""
        row_bytes = sum(self._params[path][:1].nbytes for path in self._cut)
        size = min(self._num_ids, CHUNK_IDS, max(CHUNK_BYTES // max(row_bytes, 1), 1))
        found = np.empty(self._num_ids, np.float32)

        def fill(first: int) -> None:
            first = min(first, self._num_ids - size)
            found[first : first + size] = np.ravel(score(self._rows_of(first, size), first, size=size))

        fill(0)  # compiles
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(fill, range(size, self._num_ids, size)))
        return found


def _last(given: ClientStore) -> ClientStore:
    """The last example of the only client."""
    if given.num_clients != 1 or not given.num_examples:
        raise UserError(
            f"what is given has {counted(given.num_examples, 'example')} of "
            f"{counted(given.num_clients, 'client')}: give the examples of one client, of which the last is used"
        )
    packed = given.gather()
    last = {name: column[-1:] for name, column in packed.columns.items()}
    return ClientStore(last, np.zeros(1, int), np.ones(1, int), packed.client_ids)
