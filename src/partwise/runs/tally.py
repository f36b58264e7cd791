"""What is remembered about a run's rounds: sums, and a thinned curve. Its size does not grow with the rounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from partwise.server.update_sizes import Usual

POINTS = 2048  # the most points of a curve; with fewer rounds, the curve has all of them
LOOKS = 256  # the most evaluations that are kept
FIRST_ROUNDS = 3  # their losses are the usual losses
EXPLODED = 1e3  # times the usual loss, which counts as at least 1, so that losses near zero do not explode
SUMMED = ("clients", "empty", "too_small", "dropped", "bytes_down", "bytes_up")


class Thinned:
    """At most `most` of any number of things, spread evenly, and always the last one."""

    def __init__(self, most: int):
        self.most, self.every, self.seen = most, 1, 0
        self._kept: list[Any] = []
        self._last: Any = None

    def add(self, thing: Any) -> None:
        self._last = thing
        if self.seen % self.every == 0:
            self._kept.append(thing)
            if len(self._kept) > self.most:
                self._kept, self.every = self._kept[::2], 2 * self.every
        self.seen += 1

    def all(self) -> list[Any]:
        """The kept things, in their order."""
        last = (self.seen - 1) % self.every != 0
        return [*self._kept, *([self._last] if self.seen and last else [])]


class Tally:
    """Rounds, counted as they come."""

    def __init__(self):
        self.rounds = 0
        self.sums: Counter[str] = Counter()
        self._points, self._looks = Thinned(POINTS), Thinned(LOOKS)
        # metric of the validation clients -> its lowest, highest and last value, each with its round
        self.ranges: dict[str, tuple[tuple[float, int], tuple[float, int], tuple[float, int]]] = {}
        self._usual: list[float] = []
        self.wrong = 0  # of the latest rounds: those that went wrong minus the others
        self.wrong_since: int | None = None
        self.wrong_loss: float | None = None
        self.wrong_clients: tuple[Any, ...] = ()
        self._usual_norm = Usual()
        self.outlier: dict[str, Any] | None = None  # the first

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a round, as in metrics.jsonl."""
        self.rounds += 1
        for name in SUMMED:
            self.sums[name] += record[name] or 0  # None: it may not be told
        self.sums["broken"] += len(record["broken"])
        self._compare(record)
        point = {name: record[name] for name in ("round", "seconds", "train")} | {"evaluation": None}
        self._points.add(point)
        if record["evaluation"]:
            values = {n: v for n, v in record["evaluation"].items() if not isinstance(v, Mapping)}
            self._looks.add(point | {"evaluation": values})
            for name, value in values.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    here = (value, record["round"])
                    low, high, _ = self.ranges.get(name, (here, here, here))
                    low, high = (here if value < low[0] else low), (here if value > high[0] else high)
                    self.ranges[name] = (low, high, here)
        self._judge(record)

    def _compare(self, record: Mapping[str, Any]) -> None:
        """Count outliers."""
        outliers = self._usual_norm.outliers(record)
        if outliers:
            self.sums["outliers"] += len(outliers)
            norm = record["norms"]["largest"]
            first = {"round": record["round"], "clients": list(outliers[:5]), "norm": norm}
            self.outlier = self.outlier or first | {"times": norm / self._usual_norm.norm}

    def _judge(self, record: Mapping[str, Any]) -> None:
        loss, broken = record["train"]["loss"], record["broken"]
        loss = math.nan if loss is None else loss
        if self._went_wrong(loss, record["clients"], len(broken)):
            self.wrong_since = record["round"] if self.wrong == 0 else self.wrong_since
            self.wrong_loss, self.wrong_clients = loss, tuple(broken[:5]) or self.wrong_clients
            self.wrong += 1
        elif record["clients"]:
            self.wrong = max(self.wrong - 1, 0)
            if len(self._usual) < FIRST_ROUNDS:
                self._usual.append(abs(loss))

    def _went_wrong(self, loss: float, clients: int, broken: int) -> bool:
        """Whether most updates were not finite, or the loss is not finite or is far above the first rounds. A
        round in which no client was used for other reasons did not go wrong."""
        if broken > clients:
            return True
        known = len(self._usual) == FIRST_ROUNDS
        exploded = known and loss > EXPLODED * max(1.0, *self._usual)
        return bool(clients) and (exploded or not math.isfinite(loss))

    def curve(self) -> list[dict[str, Any]]:
        """Rounds for a picture, in order: the evaluated ones, and others between them."""
        rounds = {point["round"]: point for point in self._points.all()}
        rounds |= {point["round"]: point for point in self._looks.all()}
        return [rounds[number] for number in sorted(rounds)]

    def median_seconds(self) -> float:
        """The median seconds of a round; exact up to `POINTS` rounds."""
        seconds = [point["seconds"] for point in self._points.all()]
        return float(np.median(seconds)) if seconds else math.nan
