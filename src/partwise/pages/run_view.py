"""What a page shows of a run, read from the files of its folder. A damaged or unfinished run is shown as such."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from partwise.data.heat import Heat
from partwise.runs.folder import Folder
from partwise.runs.records import iterate_records
from partwise.types import UserError

HEAT_FILE, START_FILE = "heat.safetensors", "first.safetensors"  # of a run that is deployed
CLIENTS_FILE = "clients-test.parquet"
COUNTED = ("dropped", "missing", "empty", "too_small")  # clients of a round that were not used, by reason
Content = TypeVar("Content")


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
        self.counts = dict.fromkeys((*COUNTED, "broken"), 0)
        self.last: Mapping[str, Any] = {}

    @property
    def done(self) -> int:
        """The number of the last round."""
        return self.rounds[-1] if self.rounds else 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a round: a line of metrics.jsonl, from a simulation or from a deployment."""
        self.rounds.append(record["round"])
        self.losses.append(as_float((record.get("train") or record).get("loss")))
        self.seconds.append(as_float(record.get("seconds")))
        self.epsilons.append(as_float((record.get("privacy") or {}).get("epsilon")))
        down, up = record.get("bytes_down"), record.get("bytes_up")
        self.sent = None if self.sent is None or down is None or up is None else self.sent + down + up
        for name in COUNTED:
            self.counts[name] += record.get(name) or 0
        self.counts["broken"] += len(record.get("broken") or ())
        found = record.get("evaluation") or record.get("metrics") or {}
        if found:
            values = {name: float(each) for name, each in found.items() if is_metric(name, each)}
            self.looks.append(Look(record["round"], self.sent, values))
        self.last = record


class RunView(NamedTuple):
    """A run as a page shows it.

    name:     of its folder
    settings: config.toml as dotted keys; empty if it cannot be read
    summary:  summary.json; empty if the run has not ended
    problem:  what is wrong with its files, in words; empty if nothing is
    ended:    whether all its rounds were run
    heats:    how many clients hold each key, if there is such a file
    clients:  {metric: [clients]} of the test clients, if there is such a file
    """

    name: str
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    series: Series
    problem: str = ""
    ended: bool = False
    heats: Mapping[str, Heat] = {}
    clients: Mapping[str, Any] = {}

    @property
    def rounds(self) -> int:
        """How many rounds the run shall have."""
        return int(self.settings.get("rounds") or 0)

    @property
    def state(self) -> str:
        """finished, unfinished or damaged."""
        return "damaged" if self.problem else "finished" if self.ended else "unfinished"


def read_run(path: str | Path) -> RunView:
    """Read a run's folder. Raises `UserError` if it holds no run."""
    folder, problems = Folder(path), list[str]()
    if not folder.exists():
        folder.settings()  # says what there is instead
    read = lambda make, otherwise: _tried(make, otherwise, problems)
    settings, series = read(folder.settings, {}), read_series(folder, problems)
    summary = read(lambda: read_summary(folder, series), {})
    heats, clients = read(lambda: _heats(folder.path), {}), read(lambda: _clients(folder.path), {})
    ended = bool(summary) or has_ended(folder.path)
    name = folder.path.resolve().name
    return RunView(name, settings, summary, series, "; ".join(problems), ended, heats, clients)


def _tried(make: Callable[[], Content], otherwise: Content, problems: list[str]) -> Content:
    try:
        return make()
    except UserError as error:
        problems.append(str(error))
        return otherwise


def read_series(folder: Folder, problems: list[str]) -> Series:
    """The rounds up to the first damaged line, which is added to the problems. A last line that is still being
    written is none."""
    series = Series()
    try:
        for record in iterate_records(folder.metrics, folder.run):
            series.add(record)
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"could not read '{folder.metrics}': {error.strerror or error}")
    except UserError as error:  # start.json
        problems.append(str(error))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        number = len(series.rounds) + 1
        if not _cut_short(folder.metrics, number):
            problems.append(f"'{folder.metrics}' is damaged from line {number} on: {error}")
    return series


def _cut_short(path: Path, number: int) -> bool:
    """Whether this line is the last one, and has no end yet."""
    with open(path, "rb") as file:
        lines = file.readlines()
    return len(lines) == number and not lines[-1].endswith(b"\n")


def read_summary(folder: Folder, series: Series) -> dict[str, Any]:
    """summary.json; empty if there is none yet, or if the run goes on after it."""
    told = known(folder.summary()) if (folder.path / "summary.json").exists() else {}
    return told if told.get("rounds", 0) >= len(series.rounds) else {}


def known(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without what is null. Runs of other versions may have less, and that is the same to a page."""
    inside = lambda value: known(value) if isinstance(value, Mapping) else value
    return {name: inside(value) for name, value in document.items() if value is not None}


def has_ended(path: Path) -> bool:
    """Whether a run that was deployed, which has no summary, has ended."""
    return (path / START_FILE).exists() and (path / "model.safetensors").exists()


def _heats(path: Path) -> dict[str, Heat]:
    """How many clients hold each key, if a file of the run says so. If clients are promised privacy, the file has
    only what was counted with noise."""
    if not (path / HEAT_FILE).exists():
        return {}
    from partwise.selection.key_heat import load_heats

    return load_heats(path / HEAT_FILE)


def _clients(path: Path) -> dict[str, Any]:
    """The metrics of every test client, if `evaluate --per-client` wrote a table of them into the folder:
    its metrics say which values are better."""
    if not (path / CLIENTS_FILE).exists():
        return {}
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path / CLIENTS_FILE)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"could not read '{path / CLIENTS_FILE}': {error}") from None
    is_told = lambda field: pa.types.is_floating(field.type) and b"higher_is_better" in (field.metadata or {})
    kept = [field.name for field in table.schema if is_told(field)]
    return {name: table[name].drop_null().to_numpy() for name in kept}


def as_float(value: Any) -> float:
    """A number; NaN for what is not told or not a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def is_metric(name: str, value: Any) -> bool:
    """Whether an entry of an evaluation is a metric with a value, and not a count or a table."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and name != "clients" and not name.startswith("clients_")


def metric_names(runs: Iterator[RunView]) -> list[str]:
    """All metrics of these runs, the main one first and the loss last."""
    found: dict[str, None] = {}
    for run in runs:
        best = run.summary.get("best") or {}
        test = run.summary.get("test") or {}
        names = [name for name, value in test.items() if is_metric(name, value)]
        names += [name for look in run.series.looks for name in look.metrics]
        found |= dict.fromkeys(sorted(names, key=lambda name: name not in best))
    return sorted(found, key=lambda name: name == "loss")
