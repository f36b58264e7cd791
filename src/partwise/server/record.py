"""What is recorded of a round, the same for the compiled cohort, the plain loop and a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from partwise.selection.serving import Served, Sizes
from partwise.types import DivergedError, UserError


class Record(NamedTuple):
    """One round, for people and for `metrics.jsonl`. What may not be told, because clients are promised privacy, is
    None; their number and loss then have noise (`server.private_sum`)."""

    round: int  # counted from 1
    seconds: float
    clients: int  # whose updates were used
    examples: int | None  # of the cohort
    loss: float  # mean over the batches that clients trained on
    bytes_down: int | None  # with the way of serving that the run uses
    bytes_up: int | None
    missed: int | None  # ids of the clients' examples that are not among the keys they asked for
    empty: int | None  # clients with no query example
    dropped: int | None
    too_small: int | None
    spare: int | None
    broken: tuple[Any, ...]  # ids of clients whose update was not finite
    norms: Mapping[str, float] | None  # of the updates that were used; None if there is none
    outliers: tuple[Any, ...]  # ids of clients whose update was out of all proportion to these
    serving: Mapping[str, Mapping[str, int]]  # way -> what it would cost; empty if no leaf is keyed


def told_of(record: Record, private: bool) -> Record:
    """The record, or what may be told of it if clients are promised privacy."""
    if not private:
        return record
    hidden = (
        "examples",
        "bytes_down",
        "bytes_up",
        "missed",
        "empty",
        "dropped",
        "too_small",
        "spare",
        "norms",
    )
    return record._replace(
        **dict.fromkeys(hidden), clients=max(record.clients, 0), broken=(), outliers=(), serving={}
    )


def costs(sizes: Sizes, served: Mapping[str, Served], way: str) -> dict[str, Any]:
    """The fields of a record about costs: what every way of serving costs, and the bytes of the way that is
    named."""
    serving = {name: each._asdict() for name, each in served.items()} if sizes.num_keys else {}
    return {
        "bytes_down": served[way].bytes_down,
        "bytes_up": served[way].bytes_up,
        "serving": serving,
    }


def diverged(record: Record, clients: list[Any], params: Mapping[str, Any] = {}) -> UserError:
    """Return the error for a run whose parameters, or what its optimizer keeps, are no longer finite. `params` are
    the parameters, if there is one run."""
    wrong = [path for path, leaf in params.items() if not np.isfinite(np.asarray(leaf, np.float32)).all()]
    what = "parameters are" if wrong or not params else "optimizer state is"
    those = f", those of {', '.join(map(repr, wrong))}" if wrong else ""
    whose = f"; clients {_some(clients)}" if clients else ""
    remedy = "lower server.rate, or the rates of the clients if their updates are large"
    if record.outliers:
        whom = f"client {_some(record.outliers)}"
        remedy = (
            f"the update of {whom} was out of all proportion to the others, so look at its data; or {remedy}"
        )
    return DivergedError(
        f"the server's {what} no longer finite after round {record.round}{those} (mean loss {record.loss:.4g}"
        f"{whose}). All updates that were used are finite, so their sum or the server's step made it: {remedy}."
    )


def _some(clients: Sequence[Any]) -> str:
    """The first ten clients, and how many more there are."""
    more = f" and {len(clients) - 10} more" if len(clients) > 10 else ""
    return ", ".join(map(str, clients[:10])) + more
