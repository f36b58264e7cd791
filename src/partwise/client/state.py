"""What a client has during a round, and the objective that all its procedures minimise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from partwise.client.batches import Batches, Drawn, Examples, over_batches
from partwise.client.split import Subset
from partwise.metrics import Sums
from partwise.model.partition import DEFAULT, Partition
from partwise.model.spec import Batch, Model, one_per_example, training_losses
from partwise.randomness import child
from partwise.selection import padding, slices
from partwise.selection.slices import Received


class Client(NamedTuple):
    """A client and everything it may use: the model, what it received, its own examples, its own randomness,
    and what it kept from its last round (zeros before the first), if the algorithm lets clients keep
    something."""

    model: Model
    partition: Partition
    received: Received
    examples: Examples
    rng: jax.Array
    kept: Mapping[str, jax.Array] = {}  # by path: like the leaf; for keyed leaves, rows of its own keys
    public: Mapping[str, Any] = {}  # what the aggregator tells every client (see `server.total`)
    round: Any = None  # the number of the round, for schedules of rates; None if the client is only evaluated


class Progress(NamedTuple):
    """The client's parameters at some point of its round."""

    shared: Mapping[str, jax.Array]  # values
    keyed: Mapping[
        str, jax.Array
    ]  # values of the slice if steps work on all of it, or on sums of its rows; else
    # the change of its rows. What steps do not work on whole is missing until a row changes
    local: Mapping[str, jax.Array]  # values


Group = Literal["shared", "keyed", "local"]


def get_parts(progress: Progress, groups: tuple[Group, ...]) -> dict[str, Any]:
    """Only the named groups, to be trained."""
    parts = {"shared": progress.shared, "keyed": progress.keyed, "local": progress.local}
    return {group: dict(parts[group]) for group in groups}


def put_parts(progress: Progress, parts: Mapping[str, Any]) -> Progress:
    """The progress with the given groups replaced."""
    return Progress(
        parts.get("shared", progress.shared),
        parts.get("keyed", progress.keyed),
        parts.get("local", progress.local),
    )


def begin(client: Client) -> Progress:
    """The progress at the start: what was received, and the initial values of the local part (the l^(t,0) of
    appendix B)."""
    params = client.model.init(child(client.rng, "init"))
    local = slices.initial_local(client.partition, client.received, params)
    whole = [path for path in whole_leaves(client) if client.partition.roles[path].trained]
    return Progress(client.received.shared, received_slices(client, whole), local)


def whole_leaves(client: Client) -> tuple[str, ...]:
    """The keyed leaves for which steps work on the client's whole slice."""
    parts = client.partition
    return tuple(path for path in client.received.tables if parts.is_whole(parts.roles[path].space))


def value_leaves(client: Client) -> tuple[str, ...]:
    """The keyed leaves of which training has the values of the client's slice, not their change."""
    roles, whole = client.partition.roles, whole_leaves(client)
    return tuple(path for path in _trained_tables(client) if path in whole or roles[path].summed)


def _trained_tables(client: Client) -> tuple[str, ...]:
    return tuple(path for path in client.received.tables if client.partition.roles[path].trained)


def received_slices(client: Client, paths: Iterable[str]) -> dict[str, jax.Array]:
    """The client's slices of these leaves, as received."""
    keys = lambda path: client.examples.keys[client.partition.roles[path].space]
    tables = client.received.tables
    return {path: slices.own_slice(client.partition, path, tables[path], keys(path)) for path in paths}


def with_deltas(client: Client, progress: Progress) -> Progress:
    """The progress with a delta (a change, zero at first) for every keyed leaf that is trained, or with the slice's
    values."""
    trained = _trained_tables(client)
    if len(progress.keyed) == len(trained):
        return progress
    capacities = {space: keys.capacity for space, keys in client.examples.keys.items()}
    values = value_leaves(client)
    changing = {path: client.received.tables[path] for path in trained if path not in values}
    deltas = slices.empty_deltas(client.partition, changing, capacities)
    missing = [path for path in values if path not in progress.keyed]
    return progress._replace(keyed={**deltas, **received_slices(client, missing), **progress.keyed})


def anchor(client: Client, progress: Progress) -> Progress:
    """The point to which a pull draws: what was received; for local leaves the learned default, the twin's
    start, or zero."""
    zero = {path: jnp.zeros_like(leaf) for path, leaf in progress.local.items()}
    local = {}
    for path, leaf in zero.items():
        role = client.partition.roles[path]
        if role.twin == "average":
            leaf = client.received.shared[path]
        local[path] = client.received.shared.get(DEFAULT + path, leaf)
    zero = {path: jnp.zeros_like(delta) for path, delta in progress.keyed.items()}
    values = [path for path in value_leaves(client) if path in progress.keyed]
    keyed = {**zero, **received_slices(client, values)}
    return Progress(client.received.shared, keyed, local)


def batch_loss(
    client: Client,
    progress: Progress,
    rows: Mapping[str, jax.Array],
    batch: dict,
    mask: jax.Array,
    rng: jax.Array,
) -> tuple[jax.Array, Sums]:
    """Mean loss of the real examples of one batch (0 if there are none), and its sums.

    `rows` are the keyed leaves that the batch's ids point into.
    """
    total = jnp.sum(jnp.where(mask, losses_of(client, progress, rows, batch, rng), 0))
    weight = jnp.sum(jnp.where(mask, client.model.weight(batch), 0))
    return total / jnp.where(weight > 0, weight, 1), Sums(total, weight)


def losses_of(
    client: Client, progress: Progress, rows: Mapping[str, jax.Array], batch: Batch, rng: jax.Array
) -> jax.Array:
    """The losses [B] of a batch whose ids point into `rows`, as in training steps; those of padding too."""
    params = _merged(client, progress, rows)
    predict, keys = _predicting(client, progress, batch, rng), client.examples.keys
    scored = lambda outputs: padding.without_padding(client.partition, keys, rows, predict, outputs)
    return training_losses(client.model, params, batch, rng, scored).astype(jnp.float32)


def outputs_of(
    client: Client, progress: Progress, rows: Mapping[str, jax.Array], batch: Batch, rng: jax.Array
) -> Any:
    """The model's outputs for a batch whose ids point into `rows`."""
    predict = _predicting(client, progress, batch, rng)
    outputs = predict(rows)
    padding.check_rows_alone(client.partition, rows, predict, outputs)
    return padding.without_padding(client.partition, client.examples.keys, rows, predict, outputs)


def _predicting(
    client: Client, progress: Progress, batch: Batch, rng: jax.Array
) -> Callable[[Mapping[str, Any]], Any]:
    """The model's outputs as a function of the keyed rows."""
    return lambda rows: client.model.predict(_merged(client, progress, rows), batch, rng)


def _merged(client: Client, progress: Progress, rows: Mapping[str, jax.Array]) -> Any:
    """The model's parameters, as the client has them now."""
    server = {**client.received.frozen, **progress.shared, **rows}
    return client.partition.merge(server, local_values(client, progress))


def rebuilding(client: Client) -> Client:
    """The client with the loss that a reconstruction minimises."""
    own = client.model.rebuild_loss
    return client if own is None else client._replace(model=client.model._replace(train_loss=own))


def local_values(client: Client, progress: Progress) -> dict[str, jax.Array]:
    """The client's own leaves, as the loss sees them: their values, whatever their learned defaults did since.

    Where a leaf has a learned default, the default gets the gradient of the leaf: the first-order meta-gradient
    (FedRecon, appendix B). Adding x - stop_gradient(x) does that, and leaves the value as it is.
    """
    values = dict(progress.local)
    for path in values:
        if DEFAULT + path in progress.shared:
            default = progress.shared[DEFAULT + path]
            values[path] = values[path] + (default - jax.lax.stop_gradient(default))
    return values


def read(client: Client, progress: Progress, drawn: Drawn) -> tuple[dict[str, jax.Array], slices.BatchRows]:
    """The keyed rows that a batch works on, as the client has them now: the batch's rows, or the whole slice."""
    need = _renumbered(client, drawn)
    whole = {path: progress.keyed[path] for path in whole_leaves(client) if path in progress.keyed}
    whole |= received_slices(client, [path for path in whole_leaves(client) if path not in whole])
    tables = {path: table for path, table in client.received.tables.items() if path not in whole}
    keys = client.examples.keys
    return {**whole, **slices.gather(client.partition, tables, progress.keyed, need, keys)}, need


def _renumbered(client: Client, drawn: Drawn) -> slices.BatchRows:
    keys = client.examples.keys
    return slices.batch_rows(client.partition, drawn.batch, drawn.positions, drawn.mask, keys)


def total_weight(client: Client, subset: Subset) -> jax.Array:
    """The total weight of a subset of the client's examples: n_i."""
    complete = all(keys.complete for keys in client.examples.keys.values())
    if client.model.weight is one_per_example and complete:
        return subset.count(client.examples.count) * 1.0

    def add(i: jax.Array, drawn: Drawn, total: jax.Array) -> jax.Array:
        need = _renumbered(client, drawn)
        return total + jnp.sum(jnp.where(need.mask, client.model.weight(need.batch), 0))

    return over_batches(add, jnp.zeros(()), client.examples, subset, Batches(64))
