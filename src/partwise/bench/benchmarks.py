"""All benchmarks by name, how they are run, and their table.

Every case runs in a separate process, so that its memory and its compile time are measured alone. Times are
medians over compiled calls of many rounds, without the first call.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from partwise.bench import costs, training_cases
from partwise.bench.case import Case, Columns
from partwise.bench.trainings import COLUMNS, measure
from partwise.privacy import slices_cost
from partwise.reports import process_seconds, recommend_seconds, remote_seconds
from partwise.types import UserError, unknown


class Benchmark(NamedTuple):
    """A benchmark. `cases` is a function of `quick` that returns the cases. The first column is the figure that is
    told of a case, and `note` is a sentence under the table."""

    summary: str
    cases: Callable[[bool], list[Case]]
    columns: Columns = COLUMNS
    note: str = "A step is one client's; a second: examples or tokens that are trained on."


BENCHMARKS: dict[str, Benchmark] = {
    "fedrecon-movielens": Benchmark(
        "FedRecon matrix factorisation: phases, cohort sizes, numbers of items",
        training_cases.fedrecon_movielens,
    ),
    "select-logistic": Benchmark(
        "Federated Select, tag prediction: full broadcast, m keys, table sizes",
        training_cases.select_logistic,
    ),
    "next-word": Benchmark(
        "Next word with an LSTM: lanes, precision, keyed and local words", training_cases.next_word
    ),
    "fedavg-2nn": Benchmark("Federated averaging of a 784-200-200-62 network", training_cases.writers("2nn")),
    "fedavg-cnn": Benchmark(
        "Federated averaging of a CNN of 1.7 million parameters", training_cases.writers("cnn")
    ),
    "deployment": Benchmark(
        "A server under devices that poll and report, and an agent that trains",
        costs.deployment,
        costs.DEPLOYMENT_COLUMNS,
        "Milliseconds as median/99th percentile. Polls include the wait for the next round.",
    ),
    "private-slices": Benchmark(
        "Rows fetched from two servers and sums written to them without telling keys",
        costs.private_slices,
        slices_cost.COLUMNS,
        slices_cost.NOTE,
    ),
    "processes": Benchmark(
        "A run in one process with two devices, and in two processes with one device each",
        costs.processes,
        process_seconds.COLUMNS,
        process_seconds.NOTE,
    ),
    "recommend": Benchmark(
        "The best of a catalogue for one client, by the number of items",
        costs.recommend,
        recommend_seconds.COLUMNS,
        recommend_seconds.NOTE,
    ),
    "remote": Benchmark(
        "Clients on a local disk, in an object store, and in one that answers after 50 ms",
        costs.remote,
        remote_seconds.COLUMNS,
        remote_seconds.NOTE,
    ),
    "secure-sum": Benchmark(
        "A secure sum with its cryptography: all clients and the server",
        costs.secure_sum,
        {title: f"{{{figure}}}".format_map for title, figure in costs.SUM_FIGURES.items()},
        "Processor time. A tenth of the clients drop out before the upload, three more before the end.",
    ),
}


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
