"""A compiled round as it is recorded."""

from __future__ import annotations

from typing import Any

import numpy as np

from partwise.data.store import ClientStore
from partwise.server.cohort import Cohort
from partwise.server.record import Record
from partwise.server.update_sizes import outlying, spread_of
from partwise.simulation.compiled import Outcome


def seen(
    number: int,
    seconds: float,
    cohort: Cohort,
    clients: np.ndarray,
    outcome: Outcome,
    store: ClientStore,
    **costs: Any,
) -> Record:
    """The record of round `number`, from its clients [devices, chunks, lanes] (positions in the store, -1 for no
    client) and its outcome. `costs` are the fields about keys and bytes."""
    real, broken = clients >= 0, outcome.broken
    used = outcome.used
    norms = np.asarray(outcome.norm[used])
    loss = outcome.loss.value / outcome.loss.weight if outcome.loss.weight > 0 else float("nan")
    return Record(
        round=number,
        seconds=seconds,
        clients=int(outcome.clients),
        examples=int(store.counts[clients[real]].sum()),
        loss=float(loss),
        empty=int(real.sum() - broken.sum() - outcome.clients),
        dropped=cohort.dropped,
        too_small=cohort.too_small,
        spare=cohort.spare,
        broken=tuple(store.client_ids[clients[broken]].tolist()),
        norms=spread_of(norms),
        outliers=tuple(store.client_ids[clients[used][outlying(norms)]].tolist()),
        **costs,
    )
