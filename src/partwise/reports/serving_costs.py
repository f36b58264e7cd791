"""What it would cost to serve a task's slices, in each way and with each encoding (Federated Select, section
3.2).

Cohorts are drawn and clients choose their keys as in a run with the same settings. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partwise.algorithm import Algorithm
from partwise.algorithms.entry import Prepared
from partwise.algorithms.registry import prepare
from partwise.data.ragged import row_indices
from partwise.model.partition import with_psi
from partwise.model.psi import PSIS
from partwise.randomness import client_numbers
from partwise.runs.resolve import resolve
from partwise.runs.sanity import check_cohort
from partwise.selection.choose import Chosen, choose_all
from partwise.selection.keys import own_keys
from partwise.selection.serving import (
    KEYS_SEEN_BY,
    WAYS,
    Demand,
    Served,
    num_distinct,
    serve,
    total,
)
from partwise.server.cohort import recruit
from partwise.simulation.backend import costs_of
from partwise.types import UserError


def compare_serving(
    name: str, data: str | None = None, changes: Mapping[str, Any] | None = None, rounds: int = 5
) -> dict[str, Any]:
    """The content of `partwise serving`, as a dict for JSON: a line for every way and encoding, and the best
    of them."""
    if rounds < 1:
        raise UserError(f"at least 1 round must be drawn, not {rounds} (--rounds)")
    task, config = resolve(name, data, changes or {})
    prepared = prepare(task, config)
    check_cohort(prepared)
    algorithm = prepared.build(prepared.rates)
    if not algorithm.partition.spaces:
        raise UserError(
            f"nothing is selected in task '{name}' with {config.algorithm}: no parameter is keyed, so there are no "
            f"slices to serve. `partwise describe TASK` shows the roles of a task's parameters."
        )
    drawn = [_draw(prepared, algorithm, config.seed, number) for number in range(rounds)]
    served = {psi: _serve_all(algorithm, psi, drawn) for psi in PSIS}
    lines = [_line(way, psi, served[psi][way], rounds) for way in WAYS for psi in PSIS]
    told = {"task": name, "algorithm": config.algorithm, "rounds": rounds, "cohort": prepared.recruiting.size}
    return {**told, "keys": algorithm.partition.all_keys, "lines": lines, "best": _best(lines)}


def _draw(prepared: Prepared, algorithm: Algorithm, seed: int, number: int) -> tuple[int, dict[str, Demand]]:
    """The number of clients in a round, and what they ask for."""
    clients = recruit(prepared.recruiting, prepared.store.counts, seed, number).clients
    cohort = prepared.store.gather(clients)
    partition = algorithm.partition
    own, numbers = own_keys(cohort, partition)[0], client_numbers(cohort.client_ids)
    chosen = choose_all(own, partition.all_keys, algorithm.choose, numbers, seed, number)
    return len(clients), {space: _demand(each, partition.num_keys(space)) for space, each in chosen.items()}


def _demand(chosen: Chosen, num_keys: int) -> Demand:
    keys = chosen.keys[row_indices(chosen.starts, chosen.counts)]
    return Demand(num_distinct(keys, num_keys), chosen.counts)


def _serve_all(
    algorithm: Algorithm, psi: str, drawn: Sequence[tuple[int, Mapping[str, Demand]]]
) -> dict[str, Served]:
    """The costs of all rounds together, by way of serving, with one encoding for all keyed leaves."""
    sizes = costs_of(algorithm._replace(partition=with_psi(algorithm.partition, PSIS[psi])))
    rounds = [serve(sizes, clients, demands) for clients, demands in drawn]
    return {way: total([each[way] for each in rounds]) for way in WAYS}


def _line(way: str, psi: str, served: Served, rounds: int) -> dict[str, Any]:
    clients = max(served.clients, 1)
    return {
        "way": way,
        "encoding": psi,
        "down_per_client": served.bytes_down / clients,
        "most_down": served.most_down,
        "up_per_client": served.bytes_up / clients,
        "bytes_per_round": (served.bytes_down + served.bytes_up) / rounds,
        "from_server_per_round": served.from_server / rounds,
        "from_cdn_per_round": served.from_cdn / rounds,
        "computed_per_round": served.computed / rounds,
        "computed_with_cache": (served.computed - served.cache_hits) / rounds,
        "cache_hit_rate": served.cache_hits / max(served.requests, 1),
        "peak": served.peak,
        "keys_seen_by": KEYS_SEEN_BY[way],
    }


def _best(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Which lines are cheapest for a client's downloads, and which ways are best for the server's work and
    for privacy."""
    least = min(line["down_per_client"] for line in lines)
    cheap = [line for line in lines if line["down_per_client"] == least]
    work = {line["way"]: line["computed_with_cache"] for line in lines}
    return {
        "down": [(line["way"], line["encoding"]) for line in cheap],
        "down_per_client": least,
        "work": [way for way in work if work[way] == min(work.values())],
        "work_per_round": work,  # slices that the server computes, with a cache
        "private": [way for way in WAYS if KEYS_SEEN_BY[way].startswith("nobody")],
    }
