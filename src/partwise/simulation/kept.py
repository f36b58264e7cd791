"""What clients keep from round to round (for example SCAFFOLD's control variates), for algorithms with
`keeps`. There is one host array per leaf, so that neither the devices nor the server hold it.

For a shared or local leaf, a client keeps one array of the same shape. For a keyed leaf, it keeps the rows of
its own keys; the rows of all clients are stored one client after the other. For a name that is not a leaf, it
keeps a number. A client that never took part has zeros. They take no memory until they are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from partwise.algorithm import Algorithm, check_keys_stay, kept_shape
from partwise.model.roles import to_rows
from partwise.simulation.stage import Population
from partwise.types import UserError


class Kept:
    """The arrays of all clients of a population, in its order."""

    def __init__(self, algorithm: Algorithm, population: Population):
        self.arrays: dict[str, np.ndarray] = {}
        self._starts: dict[str, np.ndarray] = {}
        self._counts: dict[str, np.ndarray] = {}
        check_keys_stay(algorithm)
        partition, clients = algorithm.partition, len(population.numbers)
        for path in algorithm.keeps:
            leaf = kept_shape(algorithm, path)
            if path not in partition.of("keyed"):
                self.arrays[path] = np.zeros((clients, *leaf.shape), leaf.dtype)
                continue
            space = partition.roles[path].space
            rows = jax.eval_shape(lambda x, p=path: to_rows(partition.roles[p], x), leaf)
            counts = population.chosen[space].counts
            self._counts[path] = counts
            self._starts[path] = np.append(0, np.cumsum(counts))[:-1]
            self.arrays[path] = np.zeros((int(counts.sum()), *rows.shape[1:]), leaf.dtype)

    def take(
        self, clients: np.ndarray, capacities: Mapping[str, int], paths: Iterable[str] | None = None
    ) -> dict[str, np.ndarray]:
        """What these clients keep [..., leaf], for all paths or for `paths`. Client -1 means no client.

        For a keyed leaf, the result has `capacities[path]` rows, with zeros after the client's last key.
        """
        taken = {}
        for path in self.arrays if paths is None else paths:
            array = self.arrays[path]
            if path not in self._starts:
                rows, real = clients, clients >= 0
            else:
                rows, real = self._rows(path, clients, capacities[path])
            values = (
                array[np.where(real, rows, 0)] if len(array) else np.zeros((*rows.shape, *array.shape[1:]))
            )
            taken[path] = np.where(_over(real, values), values, 0).astype(array.dtype)
        return taken

    def put(self, clients: np.ndarray, values: Mapping[str, Any]) -> None:
        """Store these values, shaped as in the result of `take`. Clients that are -1 are ignored."""
        for path, array in self.arrays.items():
            found = np.asarray(values[path])
            if path not in self._starts:
                array[clients[clients >= 0]] = found[clients >= 0]
                continue
            rows, real = self._rows(path, clients, found.shape[clients.ndim])
            array[rows[real]] = found[real]

    def of(self, client: int) -> dict[str, np.ndarray]:
        """What one client keeps; for a keyed leaf, a row for each of its keys."""
        rows = {path: int(counts[client]) for path, counts in self._counts.items()}
        return {path: each[0] for path, each in self.take(np.array([client]), rows).items()}

    def give(self, client: int, values: Mapping[str, np.ndarray]) -> None:
        """Store what one client keeps, shaped as `of` returns it."""
        for path, had in self.of(client).items():
            found = np.asarray(values[path]).shape if path in values else None
            if found != had.shape:
                raise UserError(
                    f"what a client kept of '{path}' has the shape {found}, and {had.shape} fits the keys that it "
                    f"has now: its examples or the model have changed since, so it must forget what it kept"
                )
        self.put(np.array([client]), {path: np.asarray(each)[None] for path, each in values.items()})

    def _rows(self, path: str, clients: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """The position of each client's rows [..., capacity], and which of them exist."""
        at = np.maximum(clients, 0)[..., None]
        number = np.arange(capacity)
        real = (clients[..., None] >= 0) & (number < self._counts[path][at])
        return self._starts[path][at] + number, real


def _over(mask: np.ndarray, values: np.ndarray) -> np.ndarray:
    return mask.reshape(*mask.shape, *[1] * (values.ndim - mask.ndim))
