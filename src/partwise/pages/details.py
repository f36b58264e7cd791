"""What a page shows of a run beyond its own files, if it is in its folder: heat, and metrics of every client."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from partwise.data.heat import Heat
from partwise.runs.run_view import HEAT_FILE, RunView, read_runs, tried
from partwise.types import UserError

CLIENTS_FILE = "clients-test.parquet"


def read_detailed(folders: Iterable[str | Path]) -> list[RunView]:
    """Read runs, with what lies beside them."""
    return [with_details(run) for run in read_runs(folders)]


def with_details(run: RunView) -> RunView:
    """The run with what lies beside it. A file of it that is damaged is a problem of the run."""
    heats, unread = tried(lambda: _heats(run.path), {})
    clients, untold = tried(lambda: _clients(run.path), {})
    problem = "; ".join(filter(None, (run.problem, unread, untold)))
    return run._replace(heats=heats, clients=clients, problem=problem)


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
