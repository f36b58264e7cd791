"""Check on the first examples of one client that a model does what its partition says.

Rows that examples do not name must not change the model's outputs for them, unless the space is `whole`. If only
sums of rows are used (`summed`), nothing may depend on how many ids an example has.
Padding rows must never change a loss. Both are compared with a slow and simple computation: the model on the
client's whole slice, and on a slice without padding. The same holds for the rows with which a batch is filled up:
what a model says of an example must be the same whatever they hold, and without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partwise.client.batches import Batches, Drawn, draw
from partwise.client.evaluate import check_each
from partwise.client.split import everything
from partwise.client.state import Client, Progress, batch_loss, begin, losses_of, outputs_of, read, rebuilding
from partwise.model.partition import Partition
from partwise.model.spec import Batch, Metric, Model, naming, one_for_each
from partwise.randomness import child
from partwise.selection.padding import not_whole
from partwise.types import Params, UserError

EXAMPLES = 16
TOLERANCE = 1e-3
PADDING = 3  # number of padding rows that are added
# What a model says of each example, by name: (rows of the examples, which of them are real, randomness) -> [B] each
Tell = Callable[[jax.Array, jax.Array, jax.Array], dict[str, jax.Array]]
NOWHERE = "Where an id may be -1 (nothing), read rows with `lookup` or `bag` of partwise.model.spec."


def check_model(client: Client) -> None:
    """Raise `UserError` unless this client's losses are the same with the batch's rows as with its whole
    slice, and the same with and without padding of the slice and of the batch."""
    if not int(client.examples.count):
        return
    client = client._replace(model=naming(client.model))
    _check_weights(client)
    for space in client.partition.spaces:
        if not client.partition.is_whole(space):
            _check_rows(client, space)
        elif client.examples.keys[space].rows is not None and int(client.examples.keys[space].count):
            _check_padding(client, space)
    # Last: rows that depend on which ids are in a batch depend on its neighbours too, and are better named above.
    check_neighbours(_telling(_shaken(client)), min(int(client.examples.count), EXAMPLES), client.rng)


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


def check_neighbours(tell: Tell, count: int, rng: jax.Array) -> None:
    """Raise `UserError` if what a model says of an example depends on rows that are no examples.

    A batch that is not full is filled up with such rows. A model that does not read the batch's mask cannot tell
    them from other examples, so whatever depends on an example's neighbours shows here.

    Args:
        tell: What the model says of each of some examples.
        count: How many examples there are, at least 1. The first half of them is told about.
        rng: Randomness.
    """
    real = (count + 1) // 2
    first, mask = jnp.arange(real), jnp.arange(real + PADDING) < real
    fills = jnp.stack([jnp.zeros(PADDING, int), (real + jnp.arange(PADDING)) % count])
    rngs = jax.random.split(rng, 2)

    @jax.jit
    def told() -> Any:
        alone = jax.lax.map(lambda rng: tell(first, mask[:real], rng), rngs)
        filled = jax.lax.map(lambda fill: tell(jnp.concatenate([first, fill]), mask, rngs[0]), fills)
        return alone, jax.tree_util.tree_map(lambda each: each[:, :real], filled)

    alone, filled = jax.tree_util.tree_map(np.asarray, told())
    for name, (without, again) in alone.items():
        repeated, other = filled[name]
        _same_for_each(name, repeated, other, "other rows after them")
        if np.array_equal(without, again, equal_nan=True):  # what is random may draw otherwise for more rows
            _same_for_each(name, without, repeated, f"{PADDING} rows more")


def _same_for_each(name: str, before: np.ndarray, after: np.ndarray, change: str) -> None:
    differs = ~np.isclose(before, after, rtol=TOLERANCE, atol=TOLERANCE * 1e-2, equal_nan=True)
    if differs.any():
        i = int(differs.argmax())
        raise UserError(
            f"the model's {name} of an example depends on more than this example: of the first of {len(before)} it "
            f"is {before[i]:.6g}, and {after[i]:.6g} with {change} that only fill up the batch. If examples of a "
            f"batch are to see each other (a mean over the batch, its other examples as negatives), leave out the "
            f"rows that are none: batch['mask'] [B] says which are real, as in jnp.where(batch['mask'], scores, "
            f"-1e9). Otherwise compute each example's value from its own row alone."
        )


def _telling(client: Client) -> Tell:
    """What the model says of rows of this client, in evaluation and in steps. What is said of padding is 0."""
    progress, examples = begin(client), client.examples
    progress = progress._replace(local=moved(progress.local, client.rng))

    def tell(rows: jax.Array, mask: jax.Array, rng: jax.Array) -> dict[str, jax.Array]:
        taken = lambda columns: {name: column[examples.start + rows] for name, column in columns.items()}
        drawn = Drawn(taken(examples.columns), taken(examples.positions), mask)
        return _each(client, progress, drawn, rng)

    return tell


def _shaken(client: Client) -> Client:
    """The client with random noise added to its tables and shared leaves, but not to constants. The rows of a new
    model may be all alike, which would hide errors."""
    received = client.received
    trained = {path: x for path, x in received.tables.items() if client.partition.roles[path].trained}
    tables, shared = moved((trained, dict(received.shared)), client.rng)
    return client._replace(received=received._replace(tables={**received.tables, **tables}, shared=shared))


def moved(params: Params, rng: jax.Array) -> Params:
    """The leaves with random noise added."""
    leaves, structure = jax.tree_util.tree_flatten(params)
    noise = lambda i, leaf: 0.1 * jax.random.normal(jax.random.fold_in(rng, i), jnp.shape(leaf))
    leaves = [leaf + noise(i, leaf).astype(leaf.dtype) for i, leaf in enumerate(leaves)]
    return jax.tree_util.tree_unflatten(structure, leaves)


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
    drawn = _first(client)
    mean = lambda each: jnp.sum(each, dtype=jnp.float32) / jnp.maximum(drawn.mask.sum(), 1)
    each = _each(client, begin(client), drawn, child(client.rng, "predict"))
    return {name: mean(values) for name, values in each.items()}


def _each(client: Client, progress: Progress, drawn: Drawn, rng: jax.Array) -> dict[str, jax.Array]:
    """All that a model says of each example [B] of a batch, 0 for padding."""
    rows, need = read(client, progress, drawn)
    outputs = outputs_of(client, progress, rows, need.batch, rng)
    told = of_each(client.model, outputs, need.batch)
    if client.model.train_loss:
        told["training loss"] = losses_of(client, progress, rows, need.batch, rng)
    if client.model.rebuild_loss:
        told["loss of a reconstruction"] = losses_of(rebuilding(client), progress, rows, need.batch, rng)
    return {name: jnp.where(need.mask, values, 0) for name, values in told.items()}


def of_each(model: Model, outputs: Any, batch: Batch) -> dict[str, jax.Array]:
    """What a model says of each example [B] by its outputs: loss, weight and metrics."""
    size = next(iter(batch.values())).shape[0]
    told = {"loss": one_for_each(model.loss(outputs, batch), batch), "weight": model.weight(batch)}
    for name, metric in model.metrics.items():
        if isinstance(metric, Metric):
            told[f"metric '{name}'"] = check_each(name, "values", metric.values(outputs, batch), (size,))
            weights = (metric.weight or model.weight)(batch)
            told[f"weight in metric '{name}'"] = check_each(name, "weights", weights, (size,))
        else:
            shape = (size, *metric.each.shape)
            told[f"score in metric '{name}'"] = check_each(
                name, "scores", metric.scores(outputs, batch), shape
            )
            told[f"label in metric '{name}'"] = check_each(name, "labels", metric.labels(batch), (size,))
    return {name: values.reshape(size, -1).sum(1) for name, values in told.items()}


def _trained(client: Client) -> jax.Array:
    """The mean loss of the first examples, as in training steps."""
    progress = begin(client)
    rows, need = read(client, progress, _first(client))
    return batch_loss(client, progress, rows, need.batch, need.mask, child(client.rng, "step"))[0]


def _first(client: Client) -> Drawn:
    return draw(client.examples, everything, Batches(EXAMPLES), jnp.int32(0))


def _values(clients: Sequence[Client], loss: Callable[[Client], Any]) -> list[Any]:
    """The loss of each client, computed in one program because that compiles faster."""
    return jax.tree_util.tree_map(float, jax.jit(lambda: [loss(client) for client in clients])())


def _same(a: float, b: float) -> bool:
    return bool(np.isclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * 1e-2, equal_nan=True))
