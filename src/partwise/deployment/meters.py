"""What a server counts, for Prometheus."""

from __future__ import annotations

import resource

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 20, 60)


class Meters:
    """Counters of one process."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        named = lambda kind, name, text, labels=(), **more: kind(
            f"partwise_{name}", text, labels, registry=registry, **more
        )
        self._requests = named(Counter, "requests", "requests by path and status", ("path", "status"))
        self._seconds = named(Histogram, "request_seconds", "seconds of requests", ("path",), buckets=SECONDS)
        self._reports = named(Counter, "reports", "reports that were accepted")
        self._refused = named(Counter, "reports_refused", "reports that were refused", ("reason",))
        self._up = named(Counter, "report_bytes", "bytes of reports that were accepted")
        self._down = named(Counter, "slice_bytes", "bytes of slices that were sent")
        self._version = named(Gauge, "version", "the version of the model")
        self._waiting = named(Gauge, "devices_waiting", "devices whose polls wait for work")
        self._open = named(Gauge, "round_open", "whether a round is open")
        self._memory = named(Gauge, "memory_peak_bytes", "the most memory that the process had")

    def answered(self, path: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self._requests.labels(path, status).inc()
        self._seconds.labels(path).observe(seconds)

    def accepted(self, num_bytes: int) -> None:
        """A report was accepted."""
        self._reports.inc()
        self._up.inc(num_bytes)

    def refused(self, reason: str) -> None:
        """A report was refused."""
        self._refused.labels(reason).inc()

    def sent(self, num_bytes: int) -> None:
        """Slices were sent."""
        self._down.inc(num_bytes)

    def round(self, version: int, phase: str, waiting: int) -> None:
        """How things stand."""
        self._version.set(version)
        self._open.set(phase == "open")
        self._waiting.set(waiting)

    def refusals(self) -> dict[str, int]:
        """How many reports this process has refused, by reason."""
        found = next(iter(self._refused.collect())).samples
        return {each.labels["reason"]: int(each.value) for each in found if each.name.endswith("_total")}

    def errors(self) -> int:
        """How many requests this process could not answer by its own fault."""
        found = next(iter(self._requests.collect())).samples
        faults = (each for each in found if each.name.endswith("_total") and each.labels["status"] >= "500")
        return int(sum(each.value for each in faults))

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        self._memory.set(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return generate_latest(self._registry)
