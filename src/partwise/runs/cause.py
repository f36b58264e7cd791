"""Why updates of clients are not finite: their data, the model's loss or gradient before any step, or the steps.

This is looked for once, when a run stops, at some of the clients that broke, as the remedy depends on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from partwise import tree
from partwise.algorithm import Algorithm, init_params
from partwise.client.batches import Batches, draw
from partwise.client.fit import Group
from partwise.client.split import everything
from partwise.client.state import (
    Client,
    batch_loss,
    begin,
    get_parts,
    losses_of,
    put_parts,
    read,
    with_deltas,
)
from partwise.data.store import ClientStore
from partwise.device import Device
from partwise.randomness import INIT_ROUND, child, round_rng
from partwise.server.messages import send

CLIENTS = 5  # that are looked at
EXAMPLES = 256  # of each
GROUPS: tuple[Group, ...] = ("shared", "keyed", "local")


class Cause(NamedTuple):
    """A sentence that says what is not finite, and whose; and how to mend it (None: lower rates)."""

    why: str
    remedy: str | None = None


def find_cause(algorithm: Algorithm, store: ClientStore, clients: Sequence[Any], seed: int) -> Cause | None:
    """The cause at the first of these clients that has one with the model that training begins with; None if there
    is no client. The model of a training that goes wrong says nothing: with it, every loss may be infinite.

    Args:
        algorithm: The algorithm.
        store: The training clients.
        clients: The ids of some, such as those whose updates were not finite.
        seed: The seed of the run.
    """
    params = init_params(algorithm, round_rng(seed, INIT_ROUND))
    for name in clients[:CLIENTS]:
        examples = store.gather([store.find(name)])
        found = _in_data(name, examples) or _in_first_step(name, examples, algorithm, params, seed)
        if found:
            return found
    if not clients:
        return None
    return Cause(
        f"Loss and gradient of client {clients[0]!r} are finite with the model before training, so steps made it"
    )


def _in_data(name: Any, examples: ClientStore) -> Cause | None:
    for column, values in examples.columns.items():
        with contextlib.suppress(TypeError):  # of ids that are words
            wrong = ~np.isfinite(values.reshape(len(values), -1)).all(1)
            if wrong.any():
                return Cause(
                    f"The data has it: example {int(wrong.argmax()) + 1} of client {name!r} has a '{column}' that "
                    f"is not finite",
                    "correct the data",
                )
    return None


def _in_first_step(
    name: Any, examples: ClientStore, algorithm: Algorithm, params: Mapping[str, Any], seed: int
) -> Cause | None:
    device, rng = Device(algorithm), round_rng(seed, 0)
    asked = device.ask(examples, seed)
    client = device.client(send(algorithm.partition, params, asked.keys, rng), examples, asked)
    losses, moves = jax.tree_util.tree_map(np.asarray, jax.jit(lambda: first_step(client))())
    if not losses.all():
        i = int((~losses).argmax())
        return Cause(
            f"The model's loss has it before any step: that of example {i + 1} of client {name!r}"
            f"{_values(examples, i)} is not finite",
            "correct the data if these values are wrong, and the model's loss if they are right",
        )
    wrong = [path for path, finite in moves.items() if not finite]
    if wrong:
        return Cause(
            f"The loss of client {name!r} is finite before any step, and its gradient is not, along "
            f"{', '.join(map(repr, wrong[:4]))}",
            "correct the model's loss (a square root, a norm or a logarithm has no finite derivative at 0: keep "
            "its argument away from there)",
        )
    return None


def first_step(client: Client) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Which of the client's first losses are finite, and along which leaves their gradient is."""
    progress = with_deltas(client, begin(client))
    drawn = draw(client.examples, everything, Batches(min(EXAMPLES, client.examples.capacity)), jnp.int32(0))
    rows, need = read(client, progress, drawn)
    rng = child(client.rng, "step")

    def mean(parts: dict) -> jax.Array:
        here = put_parts(progress, parts)
        return batch_loss(client, here, parts["keyed"], need.batch, need.mask, rng)[0]

    losses = losses_of(client, progress, rows, need.batch, rng)
    gradients = jax.grad(mean)(get_parts(progress._replace(keyed=rows), GROUPS))
    finite = {path: tree.all_finite(leaf) for group in gradients.values() for path, leaf in group.items()}
    return jnp.isfinite(losses) | ~need.mask, finite


def _values(examples: ClientStore, i: int) -> str:
    """The numbers of an example, for a message."""
    single = {name: column[i] for name, column in examples.columns.items() if column.ndim == 1}
    told = ", ".join(f"{name} = {value:g}" for name, value in single.items())
    return f" ({told})" if told else ""
