"""The plain loop: one client at a time, bytes in and bytes out, nothing vectorised.

The oracle for the compiled rounds, and the debugger that names the client that fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from partwise import server
from partwise.aggregation.total import add_report, zero_total
from partwise.algorithms.base import Algorithm
from partwise.algorithms.device import Device, choose_keys, read_report, send
from partwise.data.store import ClientStore
from partwise.server import ServerState
from partwise.types import UserError


def plain_round(
    algorithm: Algorithm,
    device: Device,
    state: ServerState,
    store: ClientStore,
    clients: Sequence[int],
    rng: jax.Array,
) -> ServerState:
    """One round with the clients at these positions of the store."""
    partition = algorithm.partition
    total = zero_total(state.params, server.trainable(partition, state.params))
    for position in clients:
        examples = store.gather([position])
        try:
            keys = choose_keys(partition, examples)
            answer = device.report(send(partition, state.params, keys, rng), examples)
        except Exception as error:
            raise UserError(f"client {store.client_ids[position]!r} failed: {error}") from error
        report = read_report(answer)
        if not all(np.isfinite(change).all() for change in report.update.values()):
            continue
        total = add_report(partition, total, report, algorithm.aggregator.weigh(report), keys)
    mean = algorithm.aggregator.decode(total)
    return server.step(state, algorithm.optimizer, mean, total.weight > 0)
