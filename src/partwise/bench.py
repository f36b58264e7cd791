"""Benchmarks: what a round costs, where the time goes, and how it grows.

Every case runs in a separate process, so that its memory and its compile time are measured alone. Times are
medians over compiled calls of many rounds, without the first call.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from partwise.privacy import slices_cost
from partwise.reports import recommend_seconds
from partwise.types import UserError, unknown

GENERATED = ("planted", "tags-planted", "writers", "next-word-planted")  # tasks that need no data


class Case(NamedTuple):
    """One line of a benchmark. `measure` is what measures it, if not `bench.measure`."""

    name: str
    task: str
    changes: Mapping[str, Any]
    rounds: int = 100
    measure: Callable[[Case, str | None], dict[str, Any]] | None = None


Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]  # title -> what a line says there
COLUMNS: Columns = {
    "ms a\nround": lambda line: f"{1e3 * line['seconds_per_round']:.2f}",
    "ms a\nstep": lambda line: "-" if (step := line["ms_per_client_step"]) is None else f"{step:.3g}",
    "a\nsecond": lambda line: "-" if (rate := line["weight_per_second"]) is None else f"{rate:,.0f}",
    "lanes": lambda line: str(line["lanes"]),
    "compile\ns": lambda line: f"{line['seconds_compile']:.1f}",
    "evaluation\ns (clients)": lambda line: f"{line['seconds_evaluation']:.3f} ({line['evaluated_clients']})",
    "peak\nMB": lambda line: f"{line['peak_memory_mb']:.0f}",
}


class Benchmark(NamedTuple):
    """A benchmark. `cases` is a function of `quick` that returns the cases. The first column is the figure that is
    told of a case, and `note` is a sentence under the table."""

    summary: str
    cases: Callable[[bool], list[Case]]
    columns: Columns = COLUMNS
    note: str = "A step is one client's; a second: examples or tokens that are trained on."


def bench(
    name: str,
    data: str | None = None,
    quick: bool = False,
    told: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure every case of a benchmark. `told` is called with a sentence about each. If a case fails after
    others were measured, its line has the error, and the remaining cases are still measured."""
    if name not in BENCHMARKS:
        raise unknown("benchmark", name, BENCHMARKS)
    cases, results = _alone(_cases, name, quick), []
    title, figure = next(iter(BENCHMARKS[name].columns.items()))
    for number, case in enumerate(cases, 1):
        try:
            results.append(_alone(case.measure or measure, case, data))
            text = f"{figure(results[-1])} {' '.join(title.split())}"
        except (UserError, RuntimeError) as error:  # such as out of memory
            if number == 1:
                raise
            results.append({"case": case.name, "error": str(error)})
            text = f"failed: {error}"
        told(f"{name}, case {number} of {len(cases)}, {case.name.strip()}: {text}")
    return {"name": name, "results": results}


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a separate process, which has all of the accelerator's memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        return alone.submit(function, *arguments).result()


def _cases(name: str, quick: bool) -> list[Case]:
    return BENCHMARKS[name].cases(quick)


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
    calls = []
    for records in simulation.run(case.rounds):
        calls.append(float(np.mean([record.seconds for record in records])))
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


def _fedrecon_movielens(quick: bool) -> list[Case]:
    case = lambda name, rounds=100, **changes: Case(
        name,
        "movielens",
        {"server.rate": 1.0} | {k.replace("__", "."): v for k, v in changes.items()},
        rounds,
    )
    setting = case("paper's setting, 100 clients")
    phases = [
        setting,
        case("  without reconstruction", reconstruct__max_steps=0),
        case("  without update", update__max_steps=0),
        case("closed form, 100 clients", reconstruct__method="solve", reconstruct__pull=2.0),
    ]
    cohorts = [
        case(f"cohort {size:,}", rounds=50, cohort__size=size)
        for size in ((10, 1000) if quick else (10, 30, 100, 300, 1000, 4832))
    ]
    items = [
        Case(
            f"generated, {number:,} items",
            "planted",
            {
                "data.num_items": number,
                "data.num_clients": 20_000,
                "data.mean_examples": 100,
                "data.dim": 50,
                "data.biases": False,
                "data.normalize": False,
                "cohort.size": 100,
                "data.initial": "random",
                "split.kind": "alternate",
                "reconstruct.method": "steps",
                "reconstruct.pull": 0.0,
                "update.rate": 0.1,
                "server.optimizer": "sgd",
                "server.rate": 1.0,
                "server.schedule": "constant",
            },
        )
        for number in ((10**3, 10**5) if quick else (10**3, 10**4, 10**5, 10**6))
    ]
    return [setting, *cohorts[:1], *items] if quick else [*phases, *cohorts, *items]


def _select_logistic(quick: bool) -> list[Case]:
    """One-vs-rest logistic regression 10,000 x 500, 50 clients, one epoch in batches of 16: full broadcast,
    and m keys. Then tables of 64 columns with the same number of keys."""
    size = {"data.num_clients": 200 if quick else 1000, "simulation.rounds_per_call": 5}
    cases = [
        Case("full broadcast", "tags-planted", {**size, "select.word": "all"}, rounds=10),
        Case("m = 1,000", "tags-planted", {**size, "select.word": "top:1000"}, rounds=50),
        Case("m = 100", "tags-planted", {**size, "select.word": "top:100"}, rounds=50),
    ]
    tables = [
        Case(
            f"m = 500, table {rows:,} x 64",
            "tags-planted",
            {
                **size,
                "data.num_words": rows,
                "data.num_tags": 64,
                "data.num_clients": 200,
                "select.word": "top:500",
                "server.optimizer": "sgd",
                "server.rate": 1.0,
            },
            rounds=50,
        )
        for rows in (10**4, 10**5, 10**6)
    ]
    return cases[1:2] if quick else [*cases, *tables]


def _writers(network: str) -> Callable[[bool], list[Case]]:
    """Federated averaging of all parameters: 62 classes, 28 x 28, 3,400 writers of log-normal size with
    median 180, 50 clients, batch 20, one epoch."""
    rounds = {"2nn": 20, "cnn": 3}[network]
    names = {"data.network": network, "algorithm": "fed_avg", "simulation.rounds_per_call": 1}
    small = {"data.num_clients": 60, "data.median": 20, "cohort.size": 4}
    return lambda quick: [
        Case("50 clients", "writers", {**names, **(small if quick else {})}, rounds=2 if quick else rounds)
    ]


def _next_word(quick: bool) -> list[Case]:
    """The LSTM of FedRecon and of Reddi et al. at a vocabulary of 10,000 (on a CPU a narrower one at 1,000),
    with all parameters trained: 200 clients, 16 steps of 16 x 20 words each, by precision and lanes. Then
    with keyed words, and FedRecon."""
    import jax

    small = quick or jax.default_backend() == "cpu"
    shape = (
        {"data.num_words": 1000, "data.embedding": 32, "data.units": 64}
        if small
        else {"data.num_words": 10_000, "data.embedding": 96, "data.units": 670}
    )
    size = (
        {"data.num_clients": 40, "cohort.size": 16}
        if quick
        else {"data.num_clients": 300, "cohort.size": 200}
    )
    base = {
        **shape,
        **size,
        "data.words": "input",
        "data.num_buckets": 100,
        "data.length": 20,
        "data.sentences": 64 if quick else 256,
        **dict.fromkeys(("update.rate", "server.rate"), 1e-3),  # small, so that nothing diverges
        "simulation.rounds_per_call": 1,
    }
    lanes = (1, 4) if quick else (1, 2, 4, 8, 16) if small else (8, 25, 50, 100, 200)
    case = lambda name, precision, count, **more: Case(
        name,
        "next-word-planted",
        {**base, "data.precision": precision, "simulation.lanes": count, **more},
        rounds=3 if quick else 6,
    )
    return [
        *(
            case(f"{precision}, {count} lanes", precision, count, algorithm="fed_avg")
            for precision in ("float32", "bfloat16")
            for count in lanes
        ),
        case("words keyed", "bfloat16", lanes[-1], algorithm="fed_select", **{"data.words": "keyed"}),
        case("FedRecon", "bfloat16", lanes[-1], **{"reconstruct.rate": 1e-3}),
    ]


def _deployment(quick: bool) -> list[Case]:
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


def _private_slices(quick: bool) -> list[Case]:
    """Rows of 96 float32: how many keys a client has, of how many."""
    large = [(10**2, 10**4), (10**3, 10**4), (10**2, 10**5), (10**3, 10**5), (10**2, 10**6)]
    sizes = [(50, 10**3)] if quick else large
    return [Case(f"{m:,} of {k:,}", "", {"of": (k, m, 96)}, 1, measure_private_slices) for m, k in sizes]


def measure_private_slices(case: Case, data: str | None) -> dict[str, Any]:
    """What private slices cost a client and a server."""
    return _deployed(case, slices_cost.measure_slices(*case.changes["of"]))


def _deployed(case: Case, figures: Mapping[str, Any]) -> dict[str, Any]:
    return {"case": case.name, **figures, "device": f"{os.cpu_count()} CPU cores"}


def _spread(name: str) -> Callable[[Mapping[str, Any]], str]:
    """A column with the median and the 99th percentile."""
    short = lambda number: f"{number:.1f}" if number < 10 else f"{number:.0f}"
    return lambda line: "-" if (each := line[name]) is None else "/".join(map(short, each.values()))


def _secure_sum(quick: bool) -> list[Case]:
    case = lambda n, words: Case(f"{n:,} x {words:,} words", "", {"n": n, "words": words}, 1, measure_sum)
    return [case(20, 10_000)] if quick else [case(100, 185_300), case(1000, 18_530)]


def measure_sum(case: Case, data: str | None) -> dict[str, Any]:
    """What a secure sum takes: n clients and the server on one core."""
    from partwise.privacy.masked_round import measure_round

    return {"case": case.name, **measure_round(**case.changes), "device": "1 CPU core"}


def _recommend(quick: bool) -> list[Case]:
    sizes = [10_000] if quick else [10_000, 100_000, 1_000_000]
    cases = [(n, "ratings") for n in sizes] + [(sizes[-1], "two_tower")]
    return [
        Case(f"{n:,} x 64, {model}", "", {"num_items": n, "dim": 64, "model": model}, 1, measure_recommend)
        for n, model in cases
    ]


def measure_recommend(case: Case, data: str | None) -> dict[str, Any]:
    """What a recommendation takes."""
    return {"case": case.name, **recommend_seconds.measure_recommend(**case.changes)}


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
BENCHMARKS: dict[str, Benchmark] = {
    "fedrecon-movielens": Benchmark(
        "FedRecon matrix factorisation: phases, cohort sizes, numbers of items", _fedrecon_movielens
    ),
    "select-logistic": Benchmark(
        "Federated Select, tag prediction: full broadcast, m keys, table sizes", _select_logistic
    ),
    "next-word": Benchmark("Next word with an LSTM: lanes, precision, keyed and local words", _next_word),
    "fedavg-2nn": Benchmark("Federated averaging of a 784-200-200-62 network", _writers("2nn")),
    "fedavg-cnn": Benchmark("Federated averaging of a CNN of 1.7 million parameters", _writers("cnn")),
    "deployment": Benchmark(
        "A server under devices that poll and report, and an agent that trains",
        _deployment,
        DEPLOYMENT_COLUMNS,
        "Milliseconds as median/99th percentile. Polls include the wait for the next round.",
    ),
    "private-slices": Benchmark(
        "Rows fetched from two servers and sums written to them without telling keys",
        _private_slices,
        slices_cost.COLUMNS,
        slices_cost.NOTE,
    ),
    "recommend": Benchmark(
        "The best of a catalogue for one client, by the number of items",
        _recommend,
        recommend_seconds.COLUMNS,
        recommend_seconds.NOTE,
    ),
    "secure-sum": Benchmark(
        "A secure sum with its cryptography: all clients and the server",
        _secure_sum,
        {title: f"{{{figure}}}".format_map for title, figure in SUM_FIGURES.items()},
        "Processor time. A tenth of the clients drop out before the upload, three more before the end.",
    ),
}


def show_table(console: Console, result: Mapping[str, Any]) -> None:
    """Print a line for each case, and the error of each case that failed."""
    benchmark = BENCHMARKS[result["name"]]
    table = Table("case", title=result["name"], box=box.SIMPLE_HEAD, padding=0)  # for 80 characters
    for title in benchmark.columns:
        table.add_column(title, justify="right", no_wrap=True)
    measured = [line for line in result["results"] if "error" not in line]
    for line in measured:
        table.add_row(line["case"], *(figure(line) for figure in benchmark.columns.values()))
    console.print(table)
    console.print(benchmark.note, highlight=False)
    for line in result["results"]:
        if "error" in line:
            console.print(f"{line['case'].strip()} failed: {line['error']}", highlight=False, markup=False)
    console.print(measured[0]["device"] if measured else "", highlight=False)
