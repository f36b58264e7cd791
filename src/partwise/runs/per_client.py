"""Metrics of every client by its id, and how fairly they are spread: percentiles, tenths, and groups of clients."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partwise.checkpoint import write_atomically
from partwise.config.settings import Config
from partwise.data.delimited import UTF8, dialect_of, find_not_text
from partwise.metrics import PERCENTILES, Sums, each_client
from partwise.model.spec import Metric, Model
from partwise.simulation.evaluator import Evaluator
from partwise.types import RunWarning, UserError, counted, unknown

if TYPE_CHECKING:
    import pyarrow as pa

CLIENT, EXAMPLES, JUDGED, GROUP = "client", "examples", "judged", "group"
DIRECTION = b"higher_is_better"  # in the metadata of a metric's column
PRIVACY = b"privacy"  # in the metadata of a table of clients under a promise of privacy
TENTH = 0.1


def client_table(
    evaluate: Evaluator, sums: Mapping[str, Sums], groups: Mapping[Any, Any] | None = None
) -> pa.Table:
    """A row for every evaluated client: `client` (its id), `examples` (all that it has), `judged` (the weight of
    those that it was judged on: their number, unless the model says otherwise), `group` if there are groups, and
    every metric that a client has alone. A metric without a value is null."""
    import pyarrow as pa

    store, model = evaluate.store, evaluate.algorithm.model
    metrics = {name: each_client(total, _finish(model, name)) for name, total in sums.items()}
    columns: dict[str, Any] = {
        CLIENT: pa.array(store.client_ids.tolist()),
        EXAMPLES: pa.array(store.counts.astype(np.int64)),
        JUDGED: pa.array(np.asarray(sums["loss"].weight, np.float64)),
    }
    clash = set(columns) | {GROUP}
    if groups is not None:
        columns[GROUP] = pa.array(_groups_of(store.client_ids, groups), pa.string())
    fields = [pa.field(name, column.type) for name, column in columns.items()]
    for name, values in metrics.items():
        column = name if name not in clash else f"metric {name}"
        columns[column] = pa.array(values, mask=~(np.asarray(sums[name].weight) > 0))
        told = {DIRECTION: str(_higher(model, name)).encode()}
        fields.append(pa.field(column, pa.float64(), metadata=told))
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))


def _finish(model: Model, name: str) -> Any:
    metric = model.metrics.get(name)
    return metric.finish if isinstance(metric, Metric) else float


def _higher(model: Model, name: str) -> bool:
    return name in model.metrics and model.metrics[name].higher_is_better


def _groups_of(client_ids: np.ndarray, groups: Mapping[Any, Any]) -> list[str | None]:
    """The group of every client, looked up by its id as text. Warns of clients without one."""
    if not isinstance(groups, Mapping):
        raise UserError(f"groups is a {type(groups).__name__}: give {{client id: group}}")
    known = {str(client): None if group is None else str(group) for client, group in groups.items()}
    found = [known.get(str(client)) for client in client_ids.tolist()]
    missing = found.count(None)
    if missing == len(found):
        raise UserError(
            f"the groups name none of the {counted(len(found), 'client')}: expected ids such as "
            f"{client_ids[:1].tolist()[0] if len(found) else '-'}, and got {', '.join(list(known)[:3]) or 'none'}"
        )
    if missing:
        warnings.warn(
            f"{missing:,} of {counted(len(found), 'client')} are in no group", RunWarning, stacklevel=4
        )
    return found


def read_groups(path: str | Path, client: str, column: str) -> dict[str, str]:
    """{client id: group} from two columns of a CSV file."""
    from pyarrow import csv

    try:
        with open(path, "rb") as file:
            options = csv.ConvertOptions(column_types={client: "string", column: "string"})
            table = csv.read_csv(file, convert_options=options)
    except OSError as error:
        raise UserError(f"could not read '{path}': {error.strerror or error}") from None
    except ValueError as error:
        odd = find_not_text(Path(path), dialect_of(".csv", None, UTF8), (client, column))
        raise odd or UserError(f"'{path}' is not a CSV file with a header: {error}") from None
    for name in (client, column):
        if name not in table.column_names:
            raise unknown(f"column of '{path}'", name, table.column_names)
    clients, groups = table[client].to_pylist(), table[column].to_pylist()
    twice = len(clients) - len(set(clients))
    if twice:
        raise UserError(f"'{path}' names {counted(twice, 'client')} twice in '{client}': give each one group")
    return {str(one): str(group) for one, group in zip(clients, groups, strict=True) if group}


def parse_groups(text: str) -> dict[str, str]:
    """Groups from `FILE.csv:CLIENT,COLUMN`."""
    path, _, names = text.rpartition(":")
    client, sign, column = names.partition(",")
    if not path or not sign:
        raise UserError(f"--group takes FILE.csv:CLIENT,COLUMN (two columns of the file), not '{text}'")
    return read_groups(path, client, column)


def write_clients(path: str | Path, table: pa.Table) -> None:
    """Write a table of clients as CSV or Parquet, by the file's ending."""
    from pyarrow import csv, parquet

    check_file(path)
    write = csv.write_csv if Path(path).suffix == ".csv" else parquet.write_table
    write_atomically(Path(path), lambda file: write(table, file))


def check_file(path: str | Path) -> None:
    """Raise `UserError` if the ending of a file does not say its form."""
    if Path(path).suffix not in (".csv", ".parquet"):
        raise UserError(f"'{path}' should end in .csv or .parquet, so that its form is known (--per-client)")


def fairness(table: pa.Table) -> dict[str, Any]:
    """How evenly a model serves the clients of a table (`run.clients`).

    Args:
        table: A row for every client.

    Returns:
        {metric: spread}: the mean over clients, percentiles, the means of the worst and of the best tenth of the
        clients, and the gap between these. If clients have groups, `groups` has the same for each, {group: {metric:
        spread}}, and `group_gap` the difference of the best and the worst group's mean, by metric.
    """
    import pyarrow as pa

    if not isinstance(table, pa.Table):
        raise UserError(f"the table is a {type(table).__name__}: give what `run.clients` returned")
    higher = {
        f.name: f.metadata[DIRECTION] == b"True" for f in table.schema if DIRECTION in (f.metadata or {})
    }
    spreads = lambda rows: {name: _spread(rows[name].to_numpy(), up) for name, up in higher.items()}
    result: dict[str, Any] = spreads(table)
    if GROUP in table.column_names:
        of = np.array(table[GROUP].to_pylist(), object)
        groups = {name: spreads(table.filter(of == name)) for name in sorted(set(of) - {None})}
        result |= {"groups": groups, "group_gap": {name: _group_gap(groups, name) for name in higher}}
    return result


def _spread(values: np.ndarray, higher_is_better: bool) -> dict[str, Any]:
    values = np.sort(values[np.isfinite(values)])
    if not len(values):
        return {"clients": 0}
    size = max(round(TENTH * len(values)), 1)
    low, high = float(values[:size].mean()), float(values[-size:].mean())
    worst, best = (low, high) if higher_is_better else (high, low)
    percentiles = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    tenths = {"worst_tenth": worst, "best_tenth": best, "gap": abs(best - worst)}
    return {"clients": len(values), "mean": float(values.mean()), **percentiles, **tenths}


def _group_gap(groups: Mapping[str, Mapping[str, Any]], metric: str) -> float | None:
    means = [spreads[metric]["mean"] for spreads in groups.values() if spreads[metric]["clients"]]
    return max(means) - min(means) if means else None


def labelled(table: pa.Table, config: Config, split: str) -> pa.Table:
    """The table, with a note and a warning if clients were promised privacy, which does not cover it."""
    if config.privacy.clip is None:
        return table
    whose = "training clients, who were promised privacy" if split == "train" else f"{split} clients"
    note = f"figures of single clients are not covered by the promise of privacy (epsilon): of {whose}"
    warnings.warn(f"{note}. Keep them as safe as the data.", RunWarning, stacklevel=4)
    return table.replace_schema_metadata({PRIVACY: note.encode()})
