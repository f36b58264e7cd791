"""What runs on a real device: one client, its own examples, and bytes in and out. No client axis here.

The plain-loop backend drives it one client at a time, and so will the network runtime. It is the obvious twin
of the compiled cohort, and the code with which an unseen client personalises a model offline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partwise.aggregation.total import Report
from partwise.algorithms.base import Algorithm
from partwise.checkpoint import from_bytes, to_bytes
from partwise.client.batches import Drawn, Examples
from partwise.client.state import Client, Progress, begin, local_values, read
from partwise.data.store import ClientStore
from partwise.metrics import Sums
from partwise.model.partition import Partition
from partwise.selection.keys import client_numbers, own_keys
from partwise.selection.slices import Keys, receive


def choose_keys(partition: Partition, examples: ClientStore) -> dict[str, np.ndarray]:
    """The keys that one client asks for."""
    return {space: own.keys for space, own in own_keys(examples, partition)[0].items()}


def send(
    partition: Partition, params: Mapping[str, Any], keys: Mapping[str, np.ndarray], rng: jax.Array
) -> bytes:
    """The server's message: shared and frozen leaves, the slices of the client's keys, the round's randomness."""
    arrays = {
        path: np.asarray(leaf[keys[partition.roles[path].space]] if path in partition.of("keyed") else leaf)
        for path, leaf in params.items()
    }
    return to_bytes(arrays, {"rng": np.asarray(jax.random.key_data(rng)).tolist()})


class Device:
    """One client's side of an algorithm; compiled once per size of client."""

    def __init__(self, algorithm: Algorithm):
        self.algorithm = algorithm
        self._report = jax.jit(lambda *given: algorithm.client(self._client(*given)))
        self._personalize = jax.jit(self._personalized)
        self._evaluate = jax.jit(lambda *given: algorithm.evaluate(self._client(*given)))
        self._predict = jax.jit(self._predictions)

    def check(self, message: bytes, examples: ClientStore) -> None:
        """Raise if the algorithm does not fit this client's model and data."""
        if self.algorithm.check is not None:
            self.algorithm.check(self._client(*self._given(message, examples)))

    def report(self, message: bytes, examples: ClientStore) -> bytes:
        """A round on this client: the update of what it received, and its weight. Nothing local is in it."""
        report = self._report(*self._given(message, examples))
        update = {}
        for path, change in report.update.items():
            role = self.algorithm.partition.roles.get(path)
            keep = (
                len(choose_keys(self.algorithm.partition, examples)[role.space])
                if role and role.space
                else None
            )
            update[path] = np.asarray(change) if keep is None else np.asarray(change)[:keep]
        return to_bytes(update, {"weight": float(report.weight), "loss": [float(x) for x in report.loss]})

    def personalize(
        self, message: bytes, examples: ClientStore, local: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """The client's local part, rebuilt from all its examples; it stays here. `local` is where to start from:
        the part it had before, to be refreshed (default: initial values)."""
        rebuilt = self._personalize(local, *self._given(message, examples))
        return {path: np.asarray(leaf) for path, leaf in rebuilt.items()}

    def evaluate(self, message: bytes, examples: ClientStore) -> dict[str, Sums]:
        """The client's metrics as sums."""
        return self._evaluate(*self._given(message, examples))

    def predict(self, message: bytes, local: Mapping[str, Any], examples: ClientStore) -> np.ndarray:
        """The model's outputs for every example, with a local part that was rebuilt before."""
        outputs = self._predict(dict(local), *self._given(message, examples))
        return np.asarray(outputs)[: examples.num_examples]

    def _given(self, message: bytes, examples: ClientStore) -> tuple[Any, ...]:
        """The message and the examples as arrays, padded so that clients of similar size share a program."""
        params, header = from_bytes(message)
        keys, positions = own_keys(examples, self.algorithm.partition)
        columns = {
            name: _padded(np.asarray(column))
            for name, column in examples.columns.items()
            if name not in positions
        }
        positions = {name: _padded(column) for name, column in positions.items()}
        tables = {
            path: _padded(leaf) if path in self.algorithm.partition.of("keyed") else leaf
            for path, leaf in params.items()
        }
        rng = jnp.asarray(header["rng"], jnp.uint32)
        counts = {space: len(own.keys) for space, own in keys.items()}
        return (
            tables,
            columns,
            positions,
            counts,
            examples.num_examples,
            client_numbers(examples.client_ids)[0],
            rng,
        )

    def _client(self, tables, columns, positions, key_counts, count, number, rng) -> Client:
        partition = self.algorithm.partition
        received = receive(partition, tables)
        capacities = {space: tables[paths[0]].shape[0] for space, paths in partition.spaces.items()}
        keys = {
            space: Keys(jnp.arange(capacity), jnp.asarray(0), key_counts[space], capacity)
            for space, capacity in capacities.items()
        }
        examples = Examples(columns, positions, keys, jnp.asarray(0), count, count)
        own_rng = jax.random.fold_in(jax.random.wrap_key_data(rng), number)
        return Client(self.algorithm.model, partition, received, examples, own_rng)

    def _personalized(self, local, *given) -> Mapping[str, jax.Array]:
        client = self._client(*given)
        start = begin(client)
        start = start if local is None else start._replace(local=local)
        return self.algorithm.personalize(client, start).local

    def _predictions(self, local, *given) -> jax.Array:
        client = self._client(*given)
        progress = Progress(client.received.shared, {}, local)
        columns = dict(client.examples.columns)
        everything = Drawn(columns, client.examples.positions, jnp.ones(1, bool))
        rows, need = read(client, progress, everything)
        server = {**client.received.frozen, **progress.shared, **rows}
        params = client.partition.merge(server, local_values(client, progress))
        return client.model.predict(params, need.batch, client.rng)


def read_report(data: bytes) -> Report:
    """The server's reading of what a client returned."""
    update, header = from_bytes(data)
    return Report(
        {path: jnp.asarray(change) for path, change in update.items()},
        jnp.asarray(header["weight"]),
        Sums(*map(jnp.asarray, header["loss"])),
    )


def _padded(array: np.ndarray) -> np.ndarray:
    """Rows filled up with zeros to the next power of two."""
    capacity = 1 << max(len(array) - 1, 0).bit_length()
    return np.concatenate([array, np.zeros((capacity - len(array), *array.shape[1:]), array.dtype)])
