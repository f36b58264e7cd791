"""What is recorded of a round, the same for the compiled cohort, the plain loop and a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from partwise.selection.serving import Served, Sizes
from partwise.types import UserError


class Record(NamedTuple):
    """One round, for people and for `metrics.jsonl`."""

    round: int  # counted from 1
    seconds: float
    clients: int  # whose updates were used
    examples: int  # of the cohort
    loss: float  # mean over the batches that clients trained on
    bytes_down: int  # with the way of serving that the run uses
    bytes_up: int
    missed: int  # ids of the clients' examples that are not among the keys they asked for
    empty: int  # clients with no query example
    dropped: int
    too_small: int
    spare: int
    broken: tuple[Any, ...]  # ids of clients whose update was not finite
    serving: Mapping[str, Mapping[str, int]]  # way -> what it would cost; empty if no leaf is keyed


def costs(sizes: Sizes, served: Mapping[str, Served], way: str) -> dict[str, Any]:
    """The fields of a record about costs: what every way of serving costs, and the bytes of the way that is
    named."""
    serving = {name: each._asdict() for name, each in served.items()} if sizes.num_keys else {}
    return {
        "bytes_down": served[way].bytes_down,
        "bytes_up": served[way].bytes_up,
        "serving": serving,
    }


def diverged(record: Record, clients: list[Any]) -> UserError:
    """Return the error for a run whose parameters are no longer finite."""
    shown = ", ".join(map(str, clients[:10])) + (
        f" and {len(clients) - 10} more" if len(clients) > 10 else ""
    )
    return UserError(
        f"the server's parameters are no longer finite after round {record.round} (mean loss {record.loss:.4g}; "
        f"clients {shown}). Lower the learning rates of the server or the clients, or look at single clients "
        f"with --set simulation.backend=plain."
    )
