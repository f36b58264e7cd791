"""The interface of an algorithm: a small record of pure functions that any runtime can call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partwise import tree
from partwise.client.state import Client, Progress, received_slices, value_leaves
from partwise.metrics import Measured
from partwise.model.partition import Partition
from partwise.model.spec import Model
from partwise.optimizers import ServerOptimizer
from partwise.randomness import child
from partwise.selection.choose import Choice, everything, own
from partwise.server.step import ServerState, init_state
from partwise.server.total import Aggregator, Contribution, Known, Report
from partwise.types import UserError, unknown


class Algorithm(NamedTuple):
    """One published algorithm.

    client:      what a client does in a round; returns its report
    personalize: what a client does before it uses the model: rebuild its local part from all its examples, starting
                 from initial values or from earlier ones (does nothing if there is no local part)
    evaluate:    the metrics of a client, as sums or as pairs of scores and labels
    choose:      which keys a client asks for, by key space (see `choices`)
    keeps:       names of what a client keeps from round to round (`Client.kept`, `Report.keep`). A name is the path
                 of a leaf (the client keeps an array like it), or another word (it keeps a number). Such an
                 algorithm needs clients that come back
    judged_with: the names in `keeps` that `evaluate` also finds in `Client.kept`; they must not be keyed leaves
    check:       raises `UserError` if the algorithm does not fit this client's model and data
    """

    model: Model
    partition: Partition
    client: Callable[[Client], Report]
    personalize: Callable[[Client, Progress], Progress]
    evaluate: Callable[[Client], Measured]
    aggregator: Aggregator
    optimizer: ServerOptimizer
    choose: Mapping[str, Choice]
    check: Callable[[Client], None] | None = None
    keeps: tuple[str, ...] = ()
    judged_with: tuple[str, ...] = ()


# {name of a rate: rate} -> algorithm. It is called inside the compiled function, so that rates are values, not
# constants. Then another rate needs no new compilation, and many rates can run side by side.
Build = Callable[[Mapping[str, Any]], Algorithm]


def choices(partition: Partition, given: Mapping[str, Choice] | None = None) -> dict[str, Choice]:
    """A choice of keys for every key space. Spaces that are not in `given` get the choice of `whole_model`."""
    given = given or {}
    for space in given:
        if space not in partition.spaces:
            raise unknown("key space", space, partition.spaces)
    for space in partition.spaces:
        if not partition.columns[space] and space in given and given[space].name == "own":
            raise UserError(
                f"no column names keys of space '{space}', so a client has none of its own: choose them with "
                f"random, same or all"
            )
    return whole_model(partition) | dict(given)


def whole_model(partition: Partition) -> dict[str, Choice]:
    """For every key space, the choice that leaves out no key that could matter.

    If the loss depends only on the rows that examples name, these are the client's own keys; otherwise all
    keys. Clients are always evaluated with this choice. It is also the default for training.
    """
    return {space: everything() if partition.is_whole(space) else own() for space in partition.spaces}


def kept_shape(algorithm: Algorithm, path: str) -> jax.ShapeDtypeStruct:
    """Shape and type of what a client keeps under one of the names in `keeps`: an array like the leaf, or a
    number."""
    return algorithm.partition.shapes.get(path, jax.ShapeDtypeStruct((), jnp.float32))


def check_keys_stay(algorithm: Algorithm) -> None:
    """Raise `UserError` if clients keep something for each of their keys, and choose other keys in every round.
    Whatever lets clients keep something calls it: a compiled run, a device, and a server that founds a run."""
    for path in algorithm.keeps:
        keyed = path in algorithm.partition.of("keyed")
        space = algorithm.partition.roles[path].space if keyed else ""
        if keyed and algorithm.choose[space].every_round:
            raise UserError(
                f"clients keep something for every key of space '{space}' from round to round, so they must "
                f"have the same keys in every round: select.{space} = own, all or top:m"
            )


def init_params(algorithm: Algorithm, rng: jax.Array) -> dict[str, jax.Array]:
    """The leaves that the server stores, before training."""
    return algorithm.partition.split(algorithm.model.init(rng))[0]


def init_server(algorithm: Algorithm, rng: jax.Array) -> ServerState:
    """The server's state before the first round."""
    partition = algorithm.partition
    carried = algorithm.aggregator.init(partition)
    return init_state(partition, algorithm.optimizer, init_params(algorithm, rng), carried)


class Done(NamedTuple):
    """The result of a client's round: what is sent, and what stays on the client."""

    sent: Contribution
    keep: Mapping[str, jax.Array]  # until its next round
    counts: jax.Array  # whether the client took part; if not, it keeps what it had before
    norm: jax.Array  # of what is sent for a weight of 1: of the client's update, if that is sent


def contribute(algorithm: Algorithm, client: Client) -> Done:
    """Run a round on a client."""
    report = algorithm.client(client)
    rng, keys = child(client.rng, "encode"), client.examples.keys
    known = Known(client.public, {space: each.count for space, each in keys.items()})
    more = (known,) if algorithm.aggregator.informed else ()
    sent = algorithm.aggregator.encode(report, rng, *more)
    norm = tree.norm(sent.update) / jnp.where(sent.weight > 0, sent.weight, 1)
    return Done(sent, report.keep, sent.valid & (report.weight > 0), norm)


def change(client: Client, progress: Progress) -> dict[str, jax.Array]:
    """Delta_i = g_i - g (FedRecon, Algorithm 1)."""
    shared = {path: leaf - client.received.shared[path] for path, leaf in progress.shared.items()}
    received = received_slices(client, [path for path in value_leaves(client) if path in progress.keyed])
    moved = {path: progress.keyed[path] - rows for path, rows in received.items()}
    return {**shared, **progress.keyed, **moved}
