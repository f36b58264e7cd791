"""The rounds of a run for people who look at it: a few numbers of each, whoever recorded them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from partwise.server.update_sizes import Usual

COUNTED = ("dropped", "missing", "empty", "too_small")  # clients of a round that were not used, by reason
NAMED = ("broken", "outliers")  # clients that the record names, and that count


class Look(NamedTuple):
    """An evaluation on validation clients: after which round, and after how many bytes (None: not told)."""

    round: int
    sent: int | None
    metrics: Mapping[str, float]


class Series:
    """The rounds of a run, one list for each thing that is shown."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.epsilons: list[float] = []
        self.looks: list[Look] = []
        self.sent: int | None = 0
        self.counts: dict[str, int | None] = dict.fromkeys((*COUNTED, *NAMED), 0)  # None: it may not be told
        self.last: Mapping[str, Any] = {}
        self._usual_norm = Usual()

    @property
    def done(self) -> int:
        """The number of the last round."""
        return self.rounds[-1] if self.rounds else 0

    @property
    def lost(self) -> int | None:
        """How many clients were asked and never reported; None if it may not be told."""
        return _sum(self.counts["dropped"], self.counts["missing"])

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a round: a line of metrics.jsonl, from a simulation or from a deployment. Raises ValueError, and adds
        nothing, if it has another form."""
        try:
            loss = (record.get("train") or record).get("loss")
            epsilon = (record.get("privacy") or {}).get("epsilon")
            down, up = record.get("bytes_down"), record.get("bytes_up")
            sent = None if self.sent is None or down is None or up is None else self.sent + down + up
            told = {name: record.get(name, 0) for name in COUNTED}
            outliers = self._usual_norm.outliers(record)
            private = bool(record.get("privacy"))  # then no client is named
            for name, named in (("broken", record.get("broken")), ("outliers", outliers)):
                told[name] = None if private else len(named or ())
            counts = {name: _sum(self.counts[name], each) for name, each in told.items()}
            found = record.get("evaluation") or record.get("metrics") or {}
            metrics = dict(metrics_of(found))
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"this version cannot read it: {error}") from None
        self.rounds.append(record["round"])
        self.losses.append(as_float(loss))
        self.seconds.append(as_float(record.get("seconds")))
        self.epsilons.append(as_float(epsilon))
        self.sent, self.counts, self.last = sent, counts, record
        if found:
            self.looks.append(Look(record["round"], sent, metrics))


def metrics_of(evaluation: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """The metrics of an evaluation that have a value, without its counts and tables."""
    is_count = lambda name: name == "clients" or name.startswith("clients_")
    return (
        (name, float(value)) for name, value in evaluation.items() if is_number(value) and not is_count(name)
    )


def main_metric(names: Iterable[str]) -> str:
    """The first of a model's metrics, the loss left out; the loss if there is no other."""
    return next((name for name in names if name != "loss"), "loss")


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def as_float(value: Any) -> float:
    """A number; NaN for what is not told or not a number."""
    return float(value) if is_number(value) else math.nan


def is_number(value: Any) -> bool:
    """Whether this is a number; truth values are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
