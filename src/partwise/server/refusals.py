"""What a server refuses, and why: messages of other tasks, keys that do not exist, values that no client sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

from partwise.model.partition import Partition
from partwise.server.messages import About
from partwise.server.total import Contribution

_ROUNDING = 1.001  # a row that all clients of a site hold has their weights, added up in another order
Reason = Literal[
    "malformed",
    "run",
    "version",
    "model",
    "task",
    "client",
    "duplicate",
    "declined",
    "closed",
    "early",
    "stale",
    "replayed",
    "keys",
    "not finite",
    "weight",
]


class Refused(NamedTuple):
    """Why a request or a report was not accepted. A refusal changes nothing in the round."""

    reason: Reason
    what: str  # in words


def wrong_place(belongs: About, here: About) -> Refused | None:
    """Refuse a report of another run, version, model or task; None if it belongs here."""
    reasons: tuple[Reason, ...] = ("run", "version", "model", "task")
    for reason in reasons:
        found, wanted = getattr(belongs, reason), getattr(here, reason)
        if found != wanted:
            return Refused(reason, f"the report's {reason} is {found!r}, and here it is {wanted!r}")
    return None


def wrong_keys(
    partition: Partition, keys: Mapping[str, np.ndarray], before: Mapping[str, np.ndarray] | None = None
) -> Refused | None:
    """Refuse keys that do not exist, or that differ from those that the task had `before`; None if all is well."""
    if set(keys) != set(partition.spaces):
        return Refused(
            "keys", f"keys of {sorted(keys)} were asked for, and there are {sorted(partition.spaces)}"
        )
    for space, each in keys.items():
        most = partition.num_keys(space)
        if each.ndim != 1 or not np.issubdtype(each.dtype, np.integer):
            return Refused("keys", f"keys of '{space}' must be a list of whole numbers")
        if len(each) and (each[0] < 0 or each[-1] >= most or np.any(each[1:] <= each[:-1])):
            return Refused("keys", f"keys of '{space}' must be sorted, each once, from 0 to {most - 1}")
        if before is not None and not np.array_equal(before[space], each):
            return Refused("keys", f"this task has asked for other keys of '{space}' before")
    return None


def norm_of(sent: Contribution) -> float | None:
    """The norm of the update of a weight of 1; infinite if its squares are too large for 32 bits. None if numbers
    are encoded as integers, whose sizes say nothing."""
    if not np.issubdtype(np.asarray(sent.weight).dtype, np.floating):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        flat = (np.ravel(each).astype(np.float32, copy=False) for each in sent.update.values())
        squares = sum((np.dot(each, each) for each in flat), np.float32(0))
        return float(np.sqrt(squares) / np.float32(sent.weight or 1))


def wrong_values(sent: Contribution, norm: float | None, clients: int = 1) -> Refused | None:
    """Refuse values that no correct client (or no site of so many `clients`) sends. Only floats can be checked:
    encoded integers may have any value. `norm` is that of `norm_of`."""
    if norm is None:
        return None
    if not all(np.isfinite(each).all() for each in (*sent.update.values(), *sent.held.values(), sent.weight)):
        return Refused("not finite", "the report says that it is finite, and it is not")
    if not np.isfinite(norm):
        return Refused("not finite", "the squares of the report's update are too large for 32 bits")
    whole = 0 <= sent.clients <= clients and sent.clients == np.floor(sent.clients)
    if sent.weight < 0 or not whole or (sent.clients > 0) != (sent.weight > 0):
        return Refused(
            "weight", f"a weight of {sent.weight} for {sent.clients} clients, of {clients} at most"
        )
    for space, held in sent.held.items():
        if np.any(held < 0) or np.any(held > sent.weight * _ROUNDING):
            return Refused(
                "weight", f"rows of '{space}' are held by less than nothing or by more than the whole"
            )
    return None
