"""What runs on a real device: one client, its own examples, and bytes in and out. There is no client axis
here.

The plain-loop backend and the agents of a network (`deployment.agent`) call it for one client at a time. It is the
simple counterpart of the compiled cohort. A client that was not in the training uses the same code to
personalize a model offline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from partwise.algorithm import Algorithm, check_keys_stay, contribute, kept_shape, whole_model
from partwise.client.batches import Drawn, Examples
from partwise.client.check_model import check_model
from partwise.client.state import Client, begin, outputs_of, read
from partwise.data.checks import narrow
from partwise.data.ragged import pad, pad_to_power
from partwise.data.store import ClientStore
from partwise.metrics import Measured
from partwise.model.partition import Partition
from partwise.programs import jit
from partwise.randomness import Words, child, client_numbers, client_rng, words
from partwise.selection.choose import Choice, choose_all, placed
from partwise.selection.keys import own_keys
from partwise.selection.slices import Keys, receive
from partwise.server.messages import About, Slices, read_slices
from partwise.server.report_form import ReportForm
from partwise.server.total import Contribution
from partwise.types import UserError


class Asked(NamedTuple):
    """The keys that one client asks for. It chooses them before it sees the model, and keeps this until the
    slices come."""

    keys: Mapping[str, np.ndarray]  # sorted
    positions: Mapping[str, np.ndarray]  # of its examples' ids among those keys
    complete: Mapping[str, bool]  # whether the keys include all ids of the examples
    missed: int  # ids of the examples that are not among the keys


class Given(NamedTuple):
    """A message and a client's examples as arrays, padded so that clients of similar size share a compiled
    program."""

    tables: Mapping[str, Any]  # the server's leaves; keyed leaves have the rows of the client's keys
    columns: Mapping[str, Any]
    positions: Mapping[str, Any]
    key_counts: Mapping[str, int | None]  # space -> number of keys; None: all keys of the space
    missing: Mapping[str, int | None]  # space -> None if all ids of the examples are among the keys
    count: Any  # number of examples
    number: Words  # the client's number
    rng: Any  # the key data of the round's randomness


class Sealing(Protocol):
    """Writes a contribution so that no server alone can read it."""

    def write(self, belongs: About, sent: Contribution, keys: Mapping[str, np.ndarray]) -> bytes: ...


def ask(
    partition: Partition,
    choose: Mapping[str, Choice],
    examples: ClientStore,
    seed: int = 0,
    round_number: int = 0,
) -> Asked:
    """Let one client choose its keys from its own examples.

    Args:
        partition: The roles of the model's leaves.
        choose: {key space: choice of keys}.
        examples: A store with one client.
        seed: The seed of the run, for random choices.
        round_number: The round, for choices that change with the round.
    """
    examples = _packed(examples)
    if examples.num_clients != 1:
        raise UserError(
            f"a device works for one client at a time, and this store has {examples.num_clients}: take one with "
            f"store.gather([position])"
        )
    own, positions = own_keys(examples, partition)
    numbers = client_numbers(examples.client_ids)
    chosen = choose_all(own, partition.all_keys, choose, numbers, seed, round_number)
    missed = 0
    for space, each in chosen.items():
        missed += int(own[space].uses[each.place < 0].sum())
        for name in partition.columns[space]:
            positions[name] = placed(
                positions[name], examples.counts, own[space], each, partition.block(space)
            )
    keys = {space: each.keys for space, each in chosen.items()}
    return Asked(keys, positions, {space: choose[space].complete for space in own}, missed)


class Device:
    """The client's side of an algorithm. It is compiled once for each padded size of client.

    In a round, a client has the keys that the algorithm lets it choose (`ask`). To use or evaluate the model,
    it has all keys that could matter (`ask_whole`), as in every evaluation. The argument `asked` is what the
    client asked for before the message came. By default it is the choice in round 0 for a report, and
    `ask_whole` for everything else. `precision` says how updates are written (see `server.report_form`);
    `sealing` writes them instead, if the server is not to read them.
    """

    def __init__(self, algorithm: Algorithm, precision: str = "float32", sealing: Sealing | None = None):
        check_keys_stay(algorithm)
        self.algorithm, self._sealing = algorithm, sealing
        self._form = ReportForm(algorithm.aggregator, algorithm.partition, precision)
        self._contribute = jit(
            lambda kept, given, public, number: contribute(
                algorithm, self._client(given)._replace(kept=kept, public=public, round=number)
            )
        )
        self._personalize = jit(self._personalized)
        self._evaluate = jit(lambda kept, given: algorithm.evaluate(self._client(given)._replace(kept=kept)))
        self._predict = jit(self.predictions)

    def ask(self, examples: ClientStore, seed: int = 0, round_number: int = 0) -> Asked:
        """The keys that this client wants in a round."""
        return ask(self.algorithm.partition, self.algorithm.choose, examples, seed, round_number)

    def ask_whole(self, examples: ClientStore) -> Asked:
        """All keys that could matter for this client's examples."""
        return ask(self.algorithm.partition, whole_model(self.algorithm.partition), examples)

    def check(self, message: bytes | Slices, examples: ClientStore, asked: Asked | None = None) -> None:
        """Raise `UserError` if the model or the algorithm does not fit this client's data. `asked` is as in
        `report`."""
        client = self.client(message, examples, asked or self.ask(examples))
        check_model(client)
        if self.algorithm.check is not None:
            self.algorithm.check(client)

    def client(self, message: bytes | Slices, examples: ClientStore, asked: Asked) -> Client:
        """What this client has at the beginning of a round, outside a compiled program."""
        given = self._given(message, examples, asked)
        return self._client(jax.tree_util.tree_map(jnp.asarray, given))

    def report(self, message: bytes | Slices, examples: ClientStore, asked: Asked | None = None) -> bytes:
        """Run a round on this client. Returns the report: the update of what it received, and its weight. The
        report contains nothing from the local part."""
        return self.report_and_keep(message, examples, asked)[0]

    def report_and_keep(
        self,
        message: bytes | Slices,
        examples: ClientStore,
        asked: Asked | None = None,
        kept: Mapping[str, np.ndarray] | None = None,
        task: About | None = None,
    ) -> tuple[bytes, dict[str, np.ndarray]]:
        """Run a round on a client that keeps something between its rounds.

        Args:
            message: The slices that the server sent.
            examples: A store with this client's examples.
            asked: What the client asked for.
            kept: What it kept from its last round; None before the first.
            task: The task, if the slices do not name it because they are for everybody. The report then names the
                client's keys, which the server has not been told.

        Returns:
            The report, and what the client keeps now.
        """
        asked = asked or self.ask(examples)
        sent = self._read(message, asked)
        given = self._with(sent, examples, asked)
        done = self._contribute(
            self._before(kept, given.tables), given, dict(sent.public), np.int32(sent.about.version)
        )
        mine = lambda leaves: {path: self._own_rows(path, leaf, asked) for path, leaf in leaves.items()}
        rows = done.sent._replace(update=mine(done.sent.update))
        belongs = task or sent.about
        if self._sealing:
            report = self._sealing.write(belongs, rows, asked.keys)
        else:
            report = self._form.write(belongs, rows, asked.keys if task else None)
        return report, mine(done.keep) if done.counts else dict(kept or {})

    def _own_rows(self, path: str, leaf: Any, asked: Asked) -> np.ndarray:
        """The rows of the client's keys, without padding."""
        role = self.algorithm.partition.roles.get(path)
        return np.asarray(leaf)[: len(asked.keys[role.space])] if role and role.space else np.asarray(leaf)

    def _before(
        self, kept: Mapping[str, np.ndarray] | None, tables: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """What the client kept, padded like its slices; zeros if it has kept nothing yet."""
        keyed = self.algorithm.partition.of("keyed")
        if not kept:
            shapes = {path: kept_shape(self.algorithm, path) for path in self.algorithm.keeps}
            like = lambda path: tables[path] if path in keyed else shapes[path]
            return {path: np.zeros(like(path).shape, leaf.dtype) for path, leaf in shapes.items()}
        filled = lambda path, rows: pad(rows, len(tables[path])) if path in keyed else rows
        return {path: filled(path, rows) for path, rows in kept.items()}

    def personalize(
        self,
        message: bytes | Slices,
        examples: ClientStore,
        asked: Asked | None = None,
        local: Mapping[str, Any] | None = None,
    ) -> dict[str, np.ndarray]:
        """Rebuild the client's local part from all its examples. Returns it as {path: array}; it stays on the
        client.

        `local` is the local part to start from, for example an earlier one (default: the initial values).
        """
        asked = asked or self.ask_whole(examples)
        rebuilt = self._personalize(local, self._given(message, examples, asked))
        return {path: np.asarray(leaf) for path, leaf in rebuilt.items()}

    def evaluate(
        self,
        message: bytes | Slices,
        examples: ClientStore,
        asked: Asked | None = None,
        kept: Mapping[str, np.ndarray] | None = None,
    ) -> Measured:
        """The client's metrics, as sums or as pairs of scores and labels. `kept` is as in `report_and_keep`."""
        given = self._given(message, examples, asked or self.ask_whole(examples))
        before = self._before(kept, given.tables)
        return self._evaluate({path: before[path] for path in self.algorithm.judged_with}, given)

    def predict(
        self,
        message: bytes | Slices,
        local: Mapping[str, Any],
        examples: ClientStore,
        asked: Asked | None = None,
    ) -> np.ndarray:
        """The model's outputs for every example, with a local part that was rebuilt before. Shared leaves of the
        client's own, if it has some, are used in place of the server's."""
        asked = asked or self.ask_whole(examples)
        outputs = self._predict(dict(local), self._given(message, examples, asked))
        return np.asarray(outputs)[: examples.num_examples]

    def _given(self, message: bytes | Slices, examples: ClientStore, asked: Asked) -> Given:
        """Read a message, and join it with the client's examples."""
        return self._with(self._read(message, asked), examples, asked)

    def _read(self, message: bytes | Slices, asked: Asked) -> Slices:
        if isinstance(message, Slices):
            return message
        return read_slices(self.algorithm.partition, message, asked.keys)

    def _with(self, sent: Slices, examples: ClientStore, asked: Asked) -> Given:
        """Join slices and examples, with padding. A whole table is not padded, because it has the same size
        for all clients."""
        examples = _packed(examples)
        partition = self.algorithm.partition
        every = {space: len(keys) == partition.num_keys(space) for space, keys in asked.keys.items()}
        some = [path for path in partition.of("keyed") if not every[partition.roles[path].space]]
        columns = {
            name: pad_to_power(narrow(name, column))
            for name, column in examples.columns.items()
            if name not in asked.positions
        }
        positions = {name: pad_to_power(column) for name, column in asked.positions.items()}
        tables = {path: pad_to_power(leaf) if path in some else leaf for path, leaf in sent.params.items()}
        return Given(
            tables=tables,
            columns=columns,
            positions=positions,
            key_counts={space: None if every[space] else len(keys) for space, keys in asked.keys.items()},
            missing={space: None if complete else 0 for space, complete in asked.complete.items()},
            count=examples.num_examples,
            number=words(client_numbers(examples.client_ids)[0]),
            rng=sent.rng,
        )

    def _client(self, given: Given) -> Client:
        partition = self.algorithm.partition
        capacities = {space: given.tables[paths[0]].shape[0] for space, paths in partition.spaces.items()}
        keys = {
            space: Keys(
                rows=None if given.key_counts[space] is None else jnp.arange(capacity),
                start=jnp.asarray(0),
                count=jnp.asarray(capacity if given.key_counts[space] is None else given.key_counts[space]),
                capacity=capacity,
                complete=given.missing[space] is None,
            )
            for space, capacity in capacities.items()
        }
        examples = Examples(
            columns=given.columns,
            positions=given.positions,
            keys=keys,
            start=jnp.asarray(0),
            count=given.count,
            longest=given.count,
        )
        return Client(
            model=self.algorithm.model,
            partition=partition,
            received=receive(partition, given.tables),
            examples=examples,
            rng=client_rng(jax.random.wrap_key_data(given.rng), given.number),
        )

    def _personalized(self, local: Any, given: Given) -> Mapping[str, jax.Array]:
        client = self._client(given)
        start = begin(client)
        start = start if local is None else start._replace(local=local)
        return self.algorithm.personalize(client, start).local

    def predictions(self, local: Any, given: Given) -> jax.Array:
        """What `predict` computes, for a caller that compiles or exports it: padding included."""
        client = self._client(given)
        own = {path: local[path] for path in client.partition.local_paths}
        progress = begin(client)._replace(local=own)
        more = {path: local[path] for path in progress.shared if path in local and path not in own}
        progress = progress._replace(shared={**progress.shared, **more})
        columns = dict(client.examples.columns)
        size = next(iter({**columns, **client.examples.positions}.values())).shape[0]
        everything = Drawn(columns, client.examples.positions, jnp.arange(size) < given.count)
        rows, need = read(client, progress, everything)
        return outputs_of(client, progress, rows, need.batch, child(client.rng, "predict"))


def _packed(examples: ClientStore) -> ClientStore:
    """The client's rows alone, because a store may be a view that also holds rows of other clients."""
    return examples if examples.packed() else examples.gather()
