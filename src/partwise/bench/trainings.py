"""Trains a case for some rounds: what a round, its compilation and an evaluation cost."""

from __future__ import annotations

import resource
import time
from typing import Any

from partwise.bench.case import Case, Columns
from partwise.types import UserError

GENERATED = ("planted", "tags-planted", "writers", "next-word-planted")  # tasks that need no data
COLUMNS: Columns = {
    "ms a\nround": lambda line: f"{1e3 * line['seconds_per_round']:.2f}",
    "ms a\nstep": lambda line: "-" if (step := line["ms_per_client_step"]) is None else f"{step:.3g}",
    "a\nsecond": lambda line: "-" if (rate := line["weight_per_second"]) is None else f"{rate:,.0f}",
    "lanes": lambda line: str(line["lanes"]),
    "compile\ns": lambda line: f"{line['seconds_compile']:.1f}",
    "evaluation\ns (clients)": lambda line: f"{line['seconds_evaluation']:.3f} ({line['evaluated_clients']})",
    "peak\nMB": lambda line: f"{line['peak_memory_mb']:.0f}",
}


def resolved(case: Case, data: str | None) -> tuple[Any, Any]:
    """The task and configuration of a case. The papers' settings are measured, not the best ones."""
    from partwise.runs.resolve import resolve

    if case.task in GENERATED:
        return resolve(case.task, None, case.changes)
    return resolve(case.task, data, case.changes, preset="paper")


def measure(case: Case, data: str | None) -> dict[str, Any]:
    """Train a case for some rounds, evaluate it, and return what it took."""
    import jax
    import numpy as np

    from partwise.algorithms.registry import prepare
    from partwise.runs.backends import make_evaluator, make_simulation
    from partwise.simulation.clock import compile_seconds
    from partwise.simulation.mesh import use_all_cores

    use_all_cores()
    task, config = resolved(case, data)
    prepared = prepare(task, config)
    loaded = _resident_mb()
    simulation = make_simulation(prepared, config, config.simulation.lanes)
    calls, used, broken = [], 0, 0
    for records in simulation.run(case.rounds):
        calls.append(float(np.mean([record.seconds for record in records])))
        used += sum(record.clients for record in records)
        broken += sum(len(record.broken) for record in records)
    if broken > used:
        raise UserError(
            f"{broken} of {used + broken} updates were not finite, so what was timed is no training: lower "
            f"update.rate, or look at the data"
        )
    compiling = compile_seconds()
    evaluate = make_evaluator(prepared, config, task.test)
    evaluate(simulation.state.params)
    began = time.perf_counter()
    evaluate(simulation.state.params)
    seconds = float(np.median(calls[1:] or calls))
    return {
        "case": case.name,
        "seconds_per_round": seconds,
        **_rates(task, config, seconds),
        "seconds_compile": compiling,
        "seconds_evaluation": time.perf_counter() - began,
        "evaluated_clients": task.test.num_clients,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "data_memory_mb": loaded,
        "lanes": simulation.lanes,
        "resident": getattr(simulation, "resident", False),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def _rates(task: Any, config: Any, seconds: float) -> dict[str, float | None]:
    """The cost of one client's step, and the weight (examples or tokens) that is trained in a second. Both
    are means of the population. They are None if clients do more than such steps."""
    import jax.numpy as jnp
    import numpy as np

    from partwise.config.parts import make_schedule

    if config.algorithm == "fed_recon":
        return {"ms_per_client_step": None, "weight_per_second": None}
    store = task.train.gather(np.arange(min(task.train.num_clients, 100)))
    schedule, counts = make_schedule(config), store.counts
    steps = np.asarray(schedule.num_steps(jnp.asarray(counts)))
    epochs, more = np.divmod(steps, np.maximum(schedule.steps_per_epoch(counts), 1))
    trained = epochs * counts + np.minimum(more * schedule.batch_size, counts)  # last batches may not be full
    weight = np.asarray(
        task.personal.model.weight({k: jnp.asarray(v) for k, v in store.columns.items()})
    ).sum()
    passes = trained.sum() / max(store.num_examples, 1)
    size = config.cohort.size
    return {
        "ms_per_client_step": 1e3 * seconds / (size * steps.mean()),
        "weight_per_second": float(size * weight / store.num_clients * passes / seconds),
    }


def _resident_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
