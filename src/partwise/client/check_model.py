"""Check on the first examples of one client that a model does what its partition says.

Rows that examples do not name must not change the model's outputs for them, unless the space is `whole`. If only
sums of rows are used (`summed`), nothing may depend on how many ids an example has.
Padding rows must never change a loss. Both are compared with a slow and simple computation: the model on the
client's whole slice, and on a slice without padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partwise.client.batches import Drawn, Schedule, draw
from partwise.client.split import everything
from partwise.client.state import Client, batch_loss, begin, outputs_of, read
from partwise.model.partition import Partition
from partwise.model.spec import Metric
from partwise.randomness import child
from partwise.selection.padding import not_whole
from partwise.types import UserError

EXAMPLES = 16
TOLERANCE = 1e-3
PADDING = 3  # number of padding rows that are added
NOWHERE = "Where an id may be -1 (nothing), read rows with `lookup` or `bag` of partwise.model.spec."


def check_model(client: Client) -> None:
    """Raise `UserError` unless this client's losses are the same with the batch's rows as with its whole
    slice, and the same with and without padding of the slice."""
    if not int(client.examples.count):
        return
    _check_weights(client)
    for space in client.partition.spaces:
        if not client.partition.is_whole(space):
            _check_rows(client, space)
        elif client.examples.keys[space].rows is not None and int(client.examples.keys[space].count):
            _check_padding(client, space)


def _check_weights(client: Client) -> None:
    @jax.jit
    def weighed() -> tuple[jax.Array, jax.Array]:
        _, need = read(client, begin(client), _first(client))
        return client.model.weight(need.batch), need.mask

    weights, real = map(np.asarray, weighed())
    weights = weights[real]
    wrong = weights[~(np.isfinite(weights) & (weights >= 0))]
    if len(wrong):
        raise UserError(
            f"the model's `weight` gives an example the weight {wrong[0]:g}; expected what it counts in a "
            f"mean, a finite number of at least 0: mend the model's weight"
        )


def _check_rows(client: Client, space: str) -> None:
    client = _shaken(client)
    whole = client._replace(partition=_as_whole(client.partition, space))
    if client.partition.is_summed(space):
        _check_sums(client, whole, space)
        return
    few, all_of_them = _values([client, whole], _judged)
    if not _same(few, all_of_them):
        raise not_whole(
            space, f"loss is {few:.6g} with the rows that they name and {all_of_them:.6g} with all. {NOWHERE}"
        )


def _check_sums(client: Client, whole: Client, space: str) -> None:
    """An example's ids are one id in its batch, so nothing that is computed from the batch may count them."""
    few, all_of_them = _values([client, whole], _told)
    for name, value in few.items():
        if not _same(value, all_of_them[name]):
            raise UserError(
                f"the model uses more than the sum of the rows of key space '{space}' that an example names: its "
                f"{name} is {value:.6g} with the sums and {all_of_them[name]:.6g} with the rows. Leave out "
                f"summed=True"
            )


def _check_padding(client: Client, space: str) -> None:
    client = _shaken(client)
    exact, filled = _resized(client, space, 0), _resized(client, space, PADDING)
    other = exact._replace(rng=child(client.rng, "other"))
    before, after, again = _values([exact, filled, other], _trained)
    if not _same(before, again):  # a random training loss may draw differently if the number of rows differs
        before, after = _values([exact, filled], _judged)
    if not _same(before, after):
        raise UserError(
            f"clients have different numbers of keys of space '{space}', so some slices are filled up with rows "
            f"that are no keys, and these change the model's loss: {before:.6g} without, {after:.6g} with "
            f"{PADDING} of them. Have `predict` return one score for each row and take the softmax in `loss`, "
            f"where they do not count; or give a leaf a value with which they do not matter, as in "
            f"keyed('{space}', whole=True, fill=-1e9) of a bias; or let all clients have all keys "
            f"(select.{space} = all). {NOWHERE}"
        )


def _shaken(client: Client) -> Client:
    """The client with random noise added to its tables, but not to constants. The rows of a new model may be all
    alike, which would hide errors."""
    tables = dict(client.received.tables)
    for path in (path for path in tables if client.partition.roles[path].trained):
        table = tables[path]
        noise = 0.1 * jax.random.normal(child(client.rng, path), table.shape)
        tables[path] = table + noise.astype(table.dtype)
    return client._replace(received=client.received._replace(tables=tables))


def _as_whole(partition: Partition, space: str) -> Partition:
    """The partition with steps on the client's whole slice of the space."""
    within = lambda role: dataclasses.replace(role, whole=True) if role.space == space else role
    return dataclasses.replace(
        partition, roles={path: within(role) for path, role in partition.roles.items()}
    )


def _resized(client: Client, space: str, padding: int) -> Client:
    """The client with a slice of exactly its keys and `padding` more rows that are not keys."""
    keys = client.examples.keys[space]
    count = int(keys.count)
    row = lambda table: np.zeros((padding, *table.shape[1:]), table.dtype)
    tables = {
        path: jnp.concatenate([table[:count], row(table)])
        if path in client.partition.spaces[space]
        else table
        for path, table in client.received.tables.items()
    }
    resized = keys._replace(rows=jnp.arange(count + padding), capacity=count + padding)
    examples = client.examples._replace(keys={**client.examples.keys, space: resized})
    return client._replace(received=client.received._replace(tables=tables), examples=examples)


def _judged(client: Client) -> jax.Array:
    """The mean loss of the first examples, as in evaluation."""
    progress = begin(client)
    rows, need = read(client, progress, _first(client))
    outputs = outputs_of(client, progress, rows, need.batch, child(client.rng, "predict"))
    losses = jnp.where(need.mask, client.model.loss(outputs, need.batch), 0)
    return jnp.sum(losses, dtype=jnp.float32) / jnp.maximum(need.mask.sum(), 1)


def _told(client: Client) -> dict[str, jax.Array]:
    """All that a model says of the first examples, each as a mean."""
    model, progress = client.model, begin(client)
    rows, need = read(client, progress, _first(client))
    outputs = outputs_of(client, progress, rows, need.batch, child(client.rng, "predict"))
    told = {"loss": model.loss(outputs, need.batch), "weight": model.weight(need.batch)}
    for name, metric in model.metrics.items():
        if isinstance(metric, Metric):
            told[f"metric '{name}'"] = metric.values(outputs, need.batch)
            told[f"weight in metric '{name}'"] = (metric.weight or model.weight)(need.batch)
        else:
            told[f"score in metric '{name}'"] = metric.scores(outputs, need.batch)
            told[f"label in metric '{name}'"] = metric.labels(need.batch)
    total = lambda each: jnp.sum(
        jnp.where(need.mask, each.reshape(len(each), -1).sum(1), 0), dtype=jnp.float32
    )
    means = {name: total(each) / jnp.maximum(need.mask.sum(), 1) for name, each in told.items()}
    return means | ({"training loss": _trained(client)} if model.train_loss else {})


def _trained(client: Client) -> jax.Array:
    """The mean loss of the first examples, as in training steps."""
    progress = begin(client)
    rows, need = read(client, progress, _first(client))
    return batch_loss(client, progress, rows, need.batch, need.mask, child(client.rng, "step"))[0]


def _first(client: Client) -> Drawn:
    return draw(client.examples, everything, Schedule(EXAMPLES), jnp.int32(0))


def _values(clients: Sequence[Client], loss: Callable[[Client], Any]) -> list[Any]:
    """The loss of each client, computed in one program because that compiles faster."""
    return jax.tree_util.tree_map(float, jax.jit(lambda: [loss(client) for client in clients])())


def _same(a: float, b: float) -> bool:
    return bool(np.isclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * 1e-2, equal_nan=True))
