"""Figures 2 to 7 and Tables 2 and 3 of Federated Select, on the available data. Handwriting is MNIST by writer, or
FEMNIST if the data is FEMNIST.

Rates are tuned without selection. Every variant is trained with the same clients in the same rounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.algorithms.registry import configuration, settings_for
from partwise.data.loaders import femnist
from partwise.papers.study import Trials, Variant, compare, draw_curves, draw_sizes, once, tune
from partwise.runs.fingerprint import digest_of
from partwise.runs.train import OnStatus, Status
from partwise.tasks import PAPER, Task, load_task
from partwise.tasks.language import has_long_clients

RATES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # of clients and server, as in section 5.1
FEWER = (1e-2, 1e-1, 1.0)
FIGURE2 = "select-figure2"


class Study(NamedTuple):
    """A task, how long it is trained, and the grid of its rates."""

    task: str
    options: Mapping[str, Any]
    metric: str
    changes: Mapping[str, Any]
    unselected: Mapping[str, str]  # the choice of keys without selection
    grid: Mapping[str, Sequence[float]]
    tuning_rounds: int


TAGS = Study(
    "tags",
    {},
    "recall_at_5",
    {"rounds": 500, "simulation.evaluate_every": 25},
    {"select.word": "own"},  # rows of words that a client does not use have no gradient
    {"update.rate": RATES, "server.rate": RATES},
    100,
)
CNN = Study(
    "handwriting",
    {"network": "cnn"},
    "accuracy",
    {"rounds": 100, "simulation.evaluate_every": 10},
    {"select.filter": "all"},
    {"update.rate": FEWER, "server.rate": FEWER},
    20,
)
TWO_LAYERS = CNN._replace(
    options={"network": "2nn"},
    changes={"rounds": 300, "simulation.evaluate_every": 25},
    grid={"update.rate": RATES, "server.rate": RATES},
    tuning_rounds=50,
)
FEMNIST_ROUNDS = {"cnn": 600, "2nn": 300}  # 62 classes take longer than ten, and few filters longer than all
WORDS = Study(
    "next-word",
    {"num_words": 10_000},
    "accuracy",
    {"rounds": 300, "simulation.evaluate_every": 50},
    {"select.word": "all", "select.unit": "all"},
    {"update.rate": FEWER, "server.rate": (1e-3, 1e-2, 1e-1)},
    40,
)
# A quick check: few rounds, few clients with few examples, one set of rates, and smaller models if possible.
QUICK = {
    "rounds": 2,
    "cohort.size": 2,
    "update.max_steps": 1,
    "simulation.lanes": 1,  # one program, without a measurement
    "simulation.evaluate_every": 1,
}
QUICK_CLIENTS, QUICK_EXAMPLES = {"train": 40, "validation": 4, "test": 4}, 10
QUICK_OPTIONS = {
    "tags": {"num_words": 1000, "num_tags": 50, "width": 64},
    "handwriting": {},
    "femnist": {},
    "next-word": {"num_words": 500, "units": 64, "width": 16, "heads": 2},
}


class Setup:
    """One study: its task with some options, and its tuned rates."""

    def __init__(
        self, study: Study, data: str | None, out: Path, quick: bool, progress: OnStatus, **options: Any
    ):
        self.study, self.out, self.quick, self.progress = study, out, quick, progress
        small = QUICK_OPTIONS[study.task] if quick else {}
        self.task: Task = load_task(study.task, data, preset=PAPER, **{**study.options, **small, **options})
        if quick:
            parts = {part: getattr(self.task, part) for part in QUICK_CLIENTS}
            few = {
                part: store.take(np.arange(min(QUICK_CLIENTS[part], store.num_clients)))
                for part, store in parts.items()
            }
            self.task = self.task._replace(**{part: store.cap(QUICK_EXAMPLES) for part, store in few.items()})
        config = configuration(study.task, settings_for(self.task.defaults, "fed_select"))
        self.config = config.changed({**study.changes, **(QUICK if quick else {})})
        self.rates: dict[str, float] = {}
        self.tried: list[dict[str, Any]] = []

    def tune(self) -> dict[str, float]:
        """Tune the rates without selection, with one trial."""
        grid = {
            key: (np.median(values).item(),) if self.quick else values
            for key, values in self.study.grid.items()
        }
        rounds = min(self.study.tuning_rounds, self.config.rounds)
        config = self.config.changed(self.study.unselected).changed({"rounds": rounds})
        said: Callable[[Status], None] = lambda status: self.progress(
            status._replace(part="tuning the rates")
        )
        what = ("rates", config.to_toml(), self.task)
        kept = lambda changes, make: once(self.out, (*what, sorted(changes.items())), make)
        self.rates, self.tried = tune(self.task, config, grid, self.study.metric, said, kept)
        return self.rates

    def compare(self, variants: Sequence[Variant], seeds: Sequence[int]) -> list[Trials]:
        """Train all variants with the tuned rates."""
        config = self.config.changed(self.rates)
        return compare(self.task, config, variants, seeds, self.study.metric, self.progress, self.out)

    def rows(self, trials: Sequence[Trials]) -> list[dict[str, Any]]:
        """The rows of the table."""
        return [each.row(f"{self.study.metric} %") for each in trials]

    def num_keys(self, space: str) -> int:
        """How many keys a space of the task has."""
        return self.task.personal.partition.num_keys(space)

    def told(self) -> dict[str, Any]:
        """Values for the JSON: rates, the grid that was searched, and the data."""
        sizes = {part: getattr(self.task, part).num_clients for part in ("train", "validation", "test")}
        loaded = {"task": self.task.name, "data": self.task.loaded.get("path")}
        return {"rates": self.rates, "grid": self.tried, "clients": sizes, **loaded}


def _keys(space: str, how: str, *sizes: int) -> list[Variant]:
    return [Variant(f"m = {m:,}", {f"select.{space}": f"{how}:{m}"}) for m in sizes]


def _vocabularies(quick: bool) -> tuple[int, ...]:
    return (100, 1000) if quick else (1000, 10_000, 100_000)


def _tag_setups(
    data: str | None, out: Path, quick: bool, progress: OnStatus, sizes: Sequence[int]
) -> dict[int, Setup]:
    """The task at several numbers n of words (fewer if the data has fewer). The rates are tuned at the middle
    n."""
    setups: dict[int, Setup] = {}
    for n in sizes:
        setup = Setup(TAGS, data, out, quick, progress, num_words=n)
        setups[setup.num_keys("word")] = setup
    middle = list(setups.values())[len(setups) // 2]
    rates = middle.tune()
    for setup in setups.values():
        setup.rates, setup.tried = rates, middle.tried
    return setups


def _tag_grid(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> tuple[dict[str, list[Trials]], dict[str, Any]]:
    """Train for n words on the server and m keys per client. Returns the trials by n, and the results for the
    JSON."""
    setups = _tag_setups(data, out, quick, progress, _vocabularies(quick))
    panels, rows = {}, []
    for n, setup in setups.items():
        sizes = [m for m in ((10,) if quick else (100, 1000, 10_000)) if m < n]
        variants = [*_keys("word", "top", *sizes), Variant("no selection", setup.study.unselected)]
        panels[f"n = {n:,}"] = setup.compare(variants, seeds)
        for m, row in zip((*sizes, None), setup.rows(panels[f"n = {n:,}"]), strict=True):
            rows.append({**row, "row": f"n = {n:,}, {row['row']}", "n": n, "m": m})
    first = next(iter(setups.values()))
    return panels, {"rows": rows, **first.told(), "contents": digest_of(first.task)}


def figure2(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """Recall by round for numbers m of keys per client, at each number n of words on the server."""
    panels, result = _tag_grid(data, out, seeds, quick, progress)
    draw_curves(out / f"{FIGURE2}.png", panels, "recall@5 %, validation clients", quick)
    return result


def figure3(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """Recall at the end against the size of a client's model: at each m, over n. The trainings are those of
    Figure 2. If `out` has them, with the same data and trials, nothing is trained."""
    result = (
        _earlier(out / f"{FIGURE2}.json", lambda: _contents(data, out, quick, progress), seeds, quick)
        or _tag_grid(data, out, seeds, quick, progress)[1]
    )
    rows = sorted(result["rows"], key=lambda row: (row["m"] or np.inf, row["n"]))
    name = lambda m: f"m = {m:,}" if m else "no selection"
    groups = {name(row["m"]): [each for each in rows if each["m"] == row["m"]] for row in rows}
    draw_sizes(out / "select-figure3.png", groups, "recall@5 %, test clients", quick)
    return {name: result[name] for name in ("rates", "grid", "clients", "task", "data")} | {"rows": rows}


def _contents(data: str | None, out: Path, quick: bool, progress: OnStatus) -> str:
    """A digest of the data that Figure 2 is trained on."""
    return digest_of(Setup(TAGS, data, out, quick, progress, num_words=_vocabularies(quick)[0]).task)


def _earlier(
    file: Path, contents: Callable[[], str], seeds: Sequence[int], quick: bool
) -> dict[str, Any] | None:
    """The result of another reproduction, if it has the same data, trials and kind; otherwise None."""
    try:
        told = json.loads(file.read_text())
        same = told["quick"] == quick and all(row["seeds"] == len(seeds) for row in told["rows"])
        before = told["contents"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return told if same and before == contents() else None


def figure4(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """Ways to choose m keys: the most used, random own keys, random keys of the 2m most used."""
    m = 20 if quick else 100  # clients of this data have few words; the paper has 1,000
    panels, rows, setup = {}, [], None
    vocabularies = _vocabularies(quick)[-1:] if quick else _vocabularies(quick)
    for n, setup in _tag_setups(data, out, quick, progress, vocabularies).items():
        variants = [
            Variant("top", {"select.word": f"top:{m}"}),
            Variant("random", {"select.word": f"sample:{m}"}),
            Variant("random top", {"select.word": f"sample_top:{m}"}),
        ]
        panels[f"n = {n:,}, m = {m}"] = done = setup.compare(variants, seeds)
        rows += [{**row, "row": f"n = {n:,}, {row['row']}"} for row in setup.rows(done)]
    draw_curves(out / "select-figure4.png", panels, "recall@5 %, validation clients", quick)
    return {"rows": rows, **(setup.told() if setup else {})}


CNN_PAPER = {4: 75.02, 8: 81.92, 16: 84.15, 32: 85.66, 64: 86.71}
TWO_LAYERS_PAPER = {10: 14.17, 50: 50.61, 100: 63.97, 200: 74.93}


def _handwriting(study: Study, data: str | None) -> Study:
    """The study, on FEMNIST if that is what the data is, otherwise on MNIST by writer."""
    if femnist.locate(data) is None:
        return study
    changes = {"rounds": FEMNIST_ROUNDS[study.options["network"]], "simulation.evaluate_every": 25}
    # Rates are tuned for many rounds: the best of the 2NN after 50 (a client's 1) falls apart later.
    return study._replace(task="femnist", changes=changes, tuning_rounds=300)


def _random_keys(study: Study, paper: Mapping[int, float], name: str) -> Callable[..., dict[str, Any]]:
    """Tables 2 and 3, with Figure 5: m random filters or units per client."""

    def reproduction(
        data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
    ) -> dict[str, Any]:
        setup = Setup(_handwriting(study, data), data, out, quick, progress)
        setup.tune()
        most = setup.num_keys("filter")
        choice = lambda m: "all" if m == most else f"random:{m}"
        variants = [Variant(f"m = {m}", {"select.filter": choice(m)}, figure) for m, figure in paper.items()]
        done = setup.compare(variants[-2:] if quick else variants, seeds)
        draw_curves(
            out / f"{name}.png", {study.options["network"]: done}, "accuracy %, validation clients", quick
        )
        return {"rows": setup.rows(done), **setup.told()}

    return reproduction


table2 = _random_keys(CNN, CNN_PAPER, "select-table2")
table3 = _random_keys(TWO_LAYERS, TWO_LAYERS_PAPER, "select-table3")


def figure6(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """The same random keys for all clients of a round, or independent ones."""
    panels, rows, told = {}, [], {}
    for study, sizes in ((CNN, (8, 16)), (TWO_LAYERS, (50, 100))):
        setup = Setup(_handwriting(study, data), data, out, quick, progress)
        setup.tune()
        network = study.options["network"]
        variants = [
            Variant(f"{network}, m = {m}, {words}", {"select.filter": f"{how}:{m}"})
            for m in (sizes[:1] if quick else sizes)
            for how, words in (("random", "independent keys"), ("same", "the same keys"))
        ]
        panels[network] = setup.compare(variants, seeds)
        rows += setup.rows(panels[network])
        told[network] = setup.told()
    draw_curves(out / "select-figure6.png", panels, "accuracy %, validation clients", quick)
    return {"rows": rows, **told}


ALPHAS = (0.5, 0.25, 0.1, 0.05)
ALPHAS_OF_BLOGS = (0.25, 0.1, 0.05, 0.02)  # half of the people use at most 914 of 10,000 words


def figure7(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """Accuracy against the size of a client's model: structured, random and mixed keys by the factor alpha."""
    setup = Setup(WORDS, data, out, quick, progress)
    setup.tune()
    words, units = setup.num_keys("word"), setup.num_keys("unit")
    of_words = lambda a: {"select.word": f"top:{max(int(a * words), 1)}"}
    of_units = lambda a: {"select.unit": f"random:{max(int(a * units), 1)}"}
    kinds: dict[str, Callable[[float], dict[str, str]]] = {
        "structured": lambda a: {**of_words(a), "select.unit": "all"},
        "random": lambda a: {"select.word": "all", **of_units(a)},
        "mixed": lambda a: {**of_words(a), **of_units(a)},
    }
    if quick:
        del kinds["structured"], kinds["random"]  # each needs its own program, and mixed covers both
    alphas = (0.1,) if quick else ALPHAS_OF_BLOGS if has_long_clients(data) else ALPHAS
    variants = [Variant("alpha = 1", WORDS.unselected)]
    variants += [Variant(f"{kind}, alpha = {a}", choose(a)) for kind, choose in kinds.items() for a in alphas]
    whole, *rows = setup.rows(setup.compare(variants, seeds))
    groups = {kind: [whole, *rows[k * len(alphas) : (k + 1) * len(alphas)]] for k, kind in enumerate(kinds)}
    draw_sizes(out / "select-figure7.png", groups, "accuracy %, test clients", quick)
    return {"rows": [whole, *rows], **setup.told()}
