"""Tables and figures of papers, by name: the paper's numbers beside ours, as JSON, picture and table."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from partwise.checkpoint import remove_temporary_files, write_file
from partwise.papers import (
    beyond,
    defaults,
    fedrecon,
    fedrecon_support,
    fedrecon_words,
    fedsubavg,
    long_tails,
    next_items,
    paper_settings,
    private_ratings,
    staleness,
    theory,
)
from partwise.papers import fedselect as select
from partwise.papers.study import own_parts, parts_in
from partwise.runs.document import to_json
from partwise.runs.lock import check_place, held
from partwise.runs.picture import QUICK
from partwise.runs.train import OnStatus, silent
from partwise.simulation.mesh import use_all_cores
from partwise.types import UserError, unknown

QUICK_SEEDS = 2
FILES = "csv|tsv|txt|dat|data|json|gz|zip|xml|npz|parquet|arrow|feather|sqlite|h5"  # data.csv is no setting
# Advice in an error of what is trained or read: another option of the command line, or a setting.
ADVICE = re.compile(
    r"--(?!data\b|out\b|seeds\b|quick\b)[a-z]+|\b(min|max|num)_[a-z]+"
    r"|\b(data|cohort|update|server|select|reconstruct|evaluation|simulation)"
    rf"\.(?!({FILES})\b)[a-z_]+"
)
OWN = (
    "`partwise reproduce` sets all this itself, and takes only --data, --out, --seeds and --quick: give it more "
    "data, or other data"
)


class Reproduction(NamedTuple):
    """function: (data, folder, seeds, quick, progress) -> {"rows": [...], ...}.

    shares: whether its parts are also those of other reproductions. They then stay in the folder at the end.
    """

    summary: str
    function: Callable[..., dict[str, Any]]
    seeds: int = 3  # as many trials as in the paper
    shares: bool = False


REPRODUCTIONS: dict[str, Reproduction] = {
    "fedrecon-table1": Reproduction("FedRecon, Tables 1 and 3: MovieLens", fedrecon.table1),
    "fedrecon-figure3": Reproduction("FedRecon, Figure 3: numbers of steps, MovieLens", fedrecon.figure3),
    "fedrecon-figure4": Reproduction("FedRecon, Figure 4: server optimizers, MovieLens", fedrecon.figure4),
    "staleness": Reproduction(
        "FedRecon, appendix A: kept local parts go stale, rebuilt ones do not, MovieLens", staleness.staleness
    ),
    "fedrecon-table2": Reproduction(
        "FedRecon, Tables 2 and 4: next word", fedrecon_words.table2, shares=True
    ),
    "fedrecon-figure2": Reproduction(
        "FedRecon, Figure 2: accuracy by parameters communicated, next word",
        fedrecon_words.figure2,
        shares=True,
    ),
    "fedrecon-figure3-words": Reproduction(
        "FedRecon, Figure 3: numbers of steps, next word", fedrecon_words.figure3, shares=True
    ),
    "fedrecon-figure5": Reproduction(
        "FedRecon, Figure 5: loss by vocabulary, next word", fedrecon_words.figure5, shares=True
    ),
    "fedrecon-figure6": Reproduction(
        "FedRecon, Figure 6: accuracy by number of buckets, next word", fedrecon_words.figure6, shares=True
    ),
    "fedrecon-support": Reproduction(
        "beyond FedRecon, section 5.2: what rebuilding gives by sentences of support, next word, blogs",
        fedrecon_support.support,
        shares=True,
    ),
    "select-figure2": Reproduction(
        "Federated Select, Figure 2: keys m by words n, tag prediction", select.figure2, 5
    ),
    "select-figure3": Reproduction(
        "Federated Select, Figure 3: words n at fixed keys m, tag prediction", select.figure3, 5
    ),
    "select-figure4": Reproduction("Federated Select, Figure 4: ways to choose keys", select.figure4, 5),
    "select-table2": Reproduction("Federated Select, Table 2 and Figure 5: CNN", select.table2, 5),
    "select-table3": Reproduction("Federated Select, Table 3 and Figure 5: 2NN", select.table3, 5),
    "select-figure6": Reproduction(
        "Federated Select, Figure 6: the same or independent keys", select.figure6, 5
    ),
    "select-figure7": Reproduction(
        "Federated Select, Figure 7: structured, random and mixed keys, transformer", select.figure7, 3
    ),
    "fedsubavg-table2": Reproduction(
        "FedSubAvg, Table 2 and Figure 3: rounds to a target, every algorithm", fedsubavg.table2
    ),
    "fedsubavg-figure3": Reproduction("FedSubAvg, Figure 3 (and Table 2): curves", fedsubavg.table2),
    "fedsubavg-table3": Reproduction(
        "FedSubAvg, Table 3 and Figure 4: rounds to a target by cohort size", fedsubavg.table3
    ),
    "fedsubavg-figure4": Reproduction("FedSubAvg, Figure 4 (and Table 3): curves", fedsubavg.table3),
    "fedsubavg-tails": Reproduction(
        "FedSubAvg beyond the paper: heat and rounds to a target, Yelp or blogs", long_tails.long_tails
    ),
    "defaults": Reproduction(
        "every algorithm with its defaults on every task without data, and on MovieLens-100k",
        defaults.defaults,
        5,
    ),
    "paper-settings": Reproduction(
        "what a task starts from beside the paper's settings: MovieLens, twenty seeds",
        paper_settings.paper_settings,
        20,
    ),
    "movielens-beyond": Reproduction(
        "beyond the papers, step by step: MovieLens, unseen users", beyond.beyond
    ),
    "privacy-movielens": Reproduction(
        "what epsilon 1, 4 and 8 cost in accuracy, Poisson and BLT: MovieLens",
        private_ratings.private_ratings,
    ),
    "next-items": Reproduction(
        "next items, federated beside centralised and popularity: Amazon Beauty, check-ins of New York",
        next_items.next_items,
    ),
    "fedsubavg-theory": Reproduction("FedSubAvg, Example 1, Theorems 1 and 2: MovieLens", theory.theory, 1),
}


def reproduce(
    name: str,
    data: str | None = None,
    out: str | Path | None = None,
    seeds: int | None = None,
    quick: bool = False,
    progress: OnStatus = silent,
) -> dict[str, Any]:
    """Run a reproduction, and write NAME.json and pictures under `out`.

    `quick` shows that it works; its numbers are not the result. If a reproduction is killed, its finished
    parts are under `out`/parts. They are not computed again the next time. Reproductions of the same trainings
    (`fedrecon-table2` and the language figures) share the parts of one folder, which then stay there.
    """
    if name not in REPRODUCTIONS:
        raise unknown("reproduction", name, REPRODUCTIONS)
    if seeds is None:
        seeds = min(REPRODUCTIONS[name].seeds, QUICK_SEEDS) if quick else REPRODUCTIONS[name].seeds
    if seeds < 1:
        raise UserError(f"the number of seeds must be at least 1, not {seeds} (--seeds, seeds=)")
    folder = check_place(Path("runs") / (f"{name}-quick" if quick else name) if out is None else out)
    with held(folder):
        return _reproduce(name, data, folder, range(seeds), quick, progress)


def _reproduce(
    name: str, data: str | None, folder: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    file, began = folder / f"{name}.json", time.perf_counter()
    replaced = _full_result(file)
    if quick and replaced:
        raise UserError(
            f"'{folder}' holds a full reproduction, which a quick check shall not overwrite: choose another folder "
            f"with --out (out=...)"
        )
    use_all_cores()
    with _own_options(), nullcontext() if REPRODUCTIONS[name].shares else own_parts(folder, name):
        remove_temporary_files(parts_in(folder))
        result = REPRODUCTIONS[name].function(data, folder, seeds, quick, progress)
        result = {
            "name": name,
            **result,
            "quick": quick,
            "seconds": time.perf_counter() - began,
            "folder": str(folder),
            "replaced": replaced,
        }
        write_file(file, to_json(result))
    return result


@contextmanager
def _own_options() -> Iterator[None]:
    """Say what a reproduction takes, in an error that advises what it does not take."""
    try:
        yield
    except UserError as error:
        if not ADVICE.search(str(error)):
            raise
        raise type(error)(f"{str(error).removesuffix('.')}. {OWN}") from error


def _full_result(file: Path) -> bool:
    """Whether the file has a full reproduction."""
    try:
        return not json.loads(file.read_text()).get("quick", False)
    except (OSError, ValueError, AttributeError):
        return False


def _ours(row: Mapping[str, Any]) -> tuple[str, str]:
    """The mean and its spread. For something that was not reached, the limit that it exceeds."""
    if row["ours"] is None:
        return f"> {row['beyond']}", ""
    return f"{row['ours']:.4f}", f"± {row['spread']:.4f}"


def show_table(console: Console, result: Mapping[str, Any]) -> None:
    """Print the table with the paper's numbers beside ours."""
    title = f"{result['name']}: {QUICK}" if result["quick"] else result["name"]
    table = Table("row", "metric", "paper", "ours", "spread", title=title)
    for row in result["rows"]:
        paper = "-" if row["paper"] is None else f"{row['paper']:.4g}"
        table.add_row(row["row"], row["metric"], paper, *_ours(row))
    console.print(table)
    console.print(f"{result['seconds']:.0f} s; JSON and pictures in {result['folder']}", highlight=False)
    if result["quick"]:
        console.print(f"This was a {QUICK}: few rounds, few rates, less data.", highlight=False)
    if result["replaced"]:
        console.print("The full result that was there before was replaced.", highlight=False)
