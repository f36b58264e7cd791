"""What is measured besides training: a deployment, private slices, secure sums, recommendations."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from partwise.bench.case import Case, Columns
from partwise.bench.trainings import GENERATED
from partwise.privacy import slices_cost
from partwise.reports import process_seconds, recommend_seconds, remote_seconds


def deployment(quick: bool) -> list[Case]:
    """Devices that poll and train nothing, and an agent that trains. Reports have about 2 kB."""
    small = {"data.num_clients": 40, "data.num_items": 500, "data.dim": 32}
    polling = lambda devices, rounds: Case(
        f"{devices:,} polling", "planted", {**small, "cohort.size": devices}, rounds, measure_polling
    )
    agent = Case("1 agent", "planted", {**small, "cohort.size": 1}, 20 if quick else 200, measure_agent)
    return [polling(1, 20 if quick else 200), polling(*((20, 5) if quick else (1000, 10))), agent]


def measure_polling(case: Case, data: str | None) -> dict[str, Any]:
    """How a server does under devices that poll, of 10,000 (and more) that are registered."""
    from partwise.deployment import load

    return _deployed(case, load.measure_polling(case.task, case.changes, case.rounds, 11_000))


def measure_agent(case: Case, data: str | None) -> dict[str, Any]:
    """How an agent does that trains."""
    from partwise.deployment import load

    return _deployed(case, load.measure_agent(case.task, case.changes, case.rounds))


def private_slices(quick: bool) -> list[Case]:
    """Rows of 96 float32: how many keys a client has, of how many."""
    large = [(10**2, 10**4), (10**3, 10**4), (10**2, 10**5), (10**3, 10**5), (10**2, 10**6)]
    sizes = [(50, 10**3)] if quick else large
    return [Case(f"{m:,} of {k:,}", "", {"of": (k, m, 96)}, 1, measure_private_slices) for m, k in sizes]


def measure_private_slices(case: Case, data: str | None) -> dict[str, Any]:
    """What private slices cost a client and a server."""
    return _deployed(case, slices_cost.measure_slices(*case.changes["of"]))


def _deployed(case: Case, figures: Mapping[str, Any]) -> dict[str, Any]:
    return {"case": case.name, **figures, "device": f"{os.cpu_count()} CPU cores"}


def secure_sum(quick: bool) -> list[Case]:
    case = lambda n, words: Case(f"{n:,} x {words:,} words", "", {"n": n, "words": words}, 1, measure_sum)
    return [case(20, 10_000)] if quick else [case(100, 185_300), case(1000, 18_530)]


def measure_sum(case: Case, data: str | None) -> dict[str, Any]:
    """What a secure sum takes: n clients and the server on one core."""
    from partwise.privacy.masked_round import measure_round

    return {"case": case.name, **measure_round(**case.changes), "device": "1 CPU core"}


def recommend(quick: bool) -> list[Case]:
    sizes = [10_000] if quick else [10_000, 100_000, 1_000_000]
    cases = [(n, "ratings") for n in sizes] + [(sizes[-1], "two_tower")]
    return [
        Case(f"{n:,} x 64, {model}", "", {"num_items": n, "dim": 64, "model": model}, 1, measure_recommend)
        for n, model in cases
    ]


def measure_recommend(case: Case, data: str | None) -> dict[str, Any]:
    """What a recommendation takes."""
    return {"case": case.name, **recommend_seconds.measure_recommend(**case.changes)}


def remote(quick: bool) -> list[Case]:
    """Clients on a local disk, in an object store, and in one that is slow to answer."""
    return [
        Case(name, task, {"changes": changes, "latency": latency}, rounds, measure_remote)
        for name, task, changes, rounds, latency in remote_seconds.cases(quick)
    ]


def measure_remote(case: Case, data: str | None) -> dict[str, Any]:
    """What a round takes on clients that are elsewhere."""
    measured = remote_seconds.measure_remote(case.task, case.rounds, **case.changes)
    return {"case": case.name, **measured}


def processes(quick: bool) -> list[Case]:
    """A run in one process, and the same in two."""
    return [
        Case(name, training.task, {"training": training, "pairs": pairs}, training.rounds, measure_processes)
        for name, training, pairs in process_seconds.cases(quick)
    ]


def measure_processes(case: Case, data: str | None) -> dict[str, Any]:
    """What a round takes in one process and in two. Only a task that is not generated reads `data`."""
    training, pairs = case.changes["training"], case.changes["pairs"]
    known = training if training.task in GENERATED else training._replace(data=data)
    return {"case": case.name, **process_seconds.measure_processes(known, pairs)}


def _spread(name: str) -> Callable[[Mapping[str, Any]], str]:
    """A column with the median and the 99th percentile."""
    short = lambda number: f"{number:.1f}" if number < 10 else f"{number:.0f}"
    return lambda line: "-" if (each := line[name]) is None else "/".join(map(short, each.values()))


DEPLOYMENT_COLUMNS: Columns = {
    "reports\na second": lambda line: f"{line['reports_per_second']:,.0f}",
    "client\nround": _spread("client_round_ms"),
    "poll": _spread("poll_ms"),
    "slices": _spread("slices_ms"),
    "report": _spread("report_ms"),
    "lost": lambda line: str(line["lost"]),
    "server\nMB": lambda line: f"{line['server_mb']:.0f}",
    "agent\nMB": lambda line: "-" if (size := line["agent_mb"]) is None else f"{size:.0f}",
}
SUM_FIGURES = {"all s": "seconds:.2f", "client ms": "client_ms:.1f", "unmask s": "unmask_seconds:.2f"}
SUM_FIGURES |= {"neighbours": "degree", "upload / vector": "upload_ratio:.3f", "peak MB": "peak_mb:.0f"}
