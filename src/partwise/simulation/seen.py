"""A compiled round as it is recorded."""

from __future__ import annotations

from typing import Any

import numpy as np

from partwise.server.cohort import Cohort
from partwise.server.record import Record
from partwise.simulation.compiled import Outcome
from partwise.simulation.stage import Slots


def seen(
    number: int,
    seconds: float,
    cohort: Cohort,
    slots: Slots,
    outcome: Outcome,
    client_ids: np.ndarray,
    **costs: Any,
) -> Record:
    """The record of round `number`, from its slots [devices, chunks, lanes] and its outcome. `client_ids` are those
    of the slots' population; `costs` are the fields about keys and bytes."""
    real, broken = slots.client >= 0, outcome.broken
    loss = outcome.loss.value / outcome.loss.weight if outcome.loss.weight > 0 else float("nan")
    return Record(
        round=number,
        seconds=seconds,
        clients=int(outcome.clients),
        examples=int(slots.count.sum()),
        loss=float(loss),
        empty=int(real.sum() - broken.sum() - outcome.clients),
        dropped=cohort.dropped,
        too_small=cohort.too_small,
        spare=cohort.spare,
        broken=tuple(client_ids[slots.client[broken]].tolist()),
        **costs,
    )
