"""The interface of an algorithm: a small record of pure functions, driven by any runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partwise.client.state import Client, Progress, received_slices, whole_leaves
from partwise.metrics import Measured
from partwise.model.partition import Partition
from partwise.model.spec import Model
from partwise.randomness import child
from partwise.selection.choose import Choice, everything, own
from partwise.server.optimizers import ServerOptimizer
from partwise.server.step import ServerState, init_state
from partwise.server.total import Aggregator, Contribution, Report
from partwise.types import UserError, unknown


class Algorithm(NamedTuple):
    """One published algorithm.

    client:      what a client does in a round, from what it holds to its report
    personalize: what a client does before it uses the model: rebuild its local part from all its examples, from
                 fresh values or from those it had (or nothing, if there is no local part)
    evaluate:    the metrics of a client, as sums or as pairs of scores and labels
    choose:      which keys a client asks for, by key space (see `choices`)
    keeps:       the leaves of which a client keeps something of its own from round to round (`Client.kept`,
                 `Report.keep`): such an algorithm is for clients that come back. A name that is no leaf is a number
    judged_with: those of them (none keyed) that `evaluate` finds in `Client.kept` too
    check:       raises if the algorithm does not fit this client's model and data
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


# Rates by name -> algorithm. Called inside the compiled function, so that rates are values, not constants:
# another rate needs no compilation, and many rates can run side by side.
Build = Callable[[Mapping[str, Any]], Algorithm]


def choices(partition: Partition, given: Mapping[str, Choice] | None = None) -> dict[str, Choice]:
    """A choice of keys for every key space; where none is given, that of `whole_model`."""
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
    """The choice that leaves out nothing that could matter: the rows that examples name, where the loss looks at
    those alone, else all. So clients are judged, and so they train where nothing else is said."""
    return {space: everything() if partition.is_whole(space) else own() for space in partition.spaces}


def kept_shape(algorithm: Algorithm, path: str) -> jax.ShapeDtypeStruct:
    """What a client keeps under one of the names in `keeps`: an array like the leaf, or a number."""
    return algorithm.partition.shapes.get(path, jax.ShapeDtypeStruct((), jnp.float32))


def init_params(algorithm: Algorithm, rng: jax.Array) -> dict[str, jax.Array]:
    """The leaves that the server stores, before training."""
    return algorithm.partition.split(algorithm.model.init(rng))[0]


def init_server(algorithm: Algorithm, rng: jax.Array) -> ServerState:
    """All that the server has before the first round."""
    partition = algorithm.partition
    carried = algorithm.aggregator.init(partition)
    return init_state(partition, algorithm.optimizer, init_params(algorithm, rng), carried)


class Done(NamedTuple):
    """A client's round: what leaves it, and what stays."""

    sent: Contribution
    keep: Mapping[str, jax.Array]  # until its next round
    counts: jax.Array  # whether it took part: who did not keeps what it had


def contribute(algorithm: Algorithm, client: Client) -> Done:
    """A round on a client."""
    report = algorithm.client(client)
    sent = algorithm.aggregator.encode(report, child(client.rng, "encode"))
    return Done(sent, report.keep, sent.valid & (report.weight > 0))


def change(client: Client, progress: Progress) -> dict[str, jax.Array]:
    """Delta_i = g_i - g (FedRecon, Algorithm 1)."""
    shared = {path: leaf - client.received.shared[path] for path, leaf in progress.shared.items()}
    received = received_slices(client, whole_leaves(client))
    whole = {path: progress.keyed[path] - rows for path, rows in received.items()}
    return {**shared, **progress.keyed, **whole}
