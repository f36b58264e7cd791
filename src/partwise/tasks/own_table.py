"""A user's own table for a named task: CSV, Parquet, or a client store written by partwise."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from partwise.data import row_batches
from partwise.data.store import ClientStore, is_store, open_store
from partwise.data.table import HEADER, column_names, is_delimited, read_table
from partwise.types import UserError, unknown

# Options of tasks that read such a table.
ClientColumn = Annotated[str, "the column that names the client"]
ItemColumn = Annotated[str, "the column of items"]
Delimiter = Annotated[str | None, "between the columns of a .csv or .tsv file, if not , or a tab"]
Encoding = Annotated[str, "of a .csv or .tsv file"]
Missing = Annotated[row_batches.Missing, "rows with an empty cell: refuse the table, or skip and count them"]


def read_own_table(
    task: str,
    data: str | None,
    named: Mapping[str, str],
    delimiter: str | None,
    encoding: str,
    missing: Missing = "refuse",
) -> ClientStore:
    """Read the table of a task.

    Args:
        task: The name of the task, for messages.
        data: The file, or the folder of a store, or the address of either.
        named: {option: column of the table}: `client`, `item` (ids), and others. The store's columns have the names
            of the options.
        delimiter: Between the columns of a .csv or .tsv file; None for the usual one.
        encoding: Of a .csv or .tsv file.
        missing: What is done with rows that have an empty cell.
    """
    if data is None:
        raise UserError(
            f"the task '{task}' needs a table: --data FILE.csv (.parquet, a client store; in Python, data=...)"
        )
    names = {column: option for option, column in named.items() if option != "client"}
    if is_store(data):
        store = open_store(data)
        return store.rename({column: names[column] for column in names if column in store.columns})
    _check_distinct(named)
    _check_named(data, named, column_names(data, delimiter, encoding))
    how: Any = {"delimiter": delimiter, "encoding": encoding, "missing": missing}
    return read_table(data, named["client"], list(names), ids=[named["item"]], **how).rename(names)


def _check_distinct(named: Mapping[str, str]) -> None:
    """Raise `UserError` if two options name the same column."""
    options: dict[str, str] = {}
    for option, column in named.items():
        other = options.setdefault(column, option)
        if other != option:
            raise UserError(
                f"the options data.{other} and data.{option} both name the column '{column}': give each its own, "
                f"as in --set data.{option}=NAME (in Python, {option}=...)"
            )


def _check_named(data: str, named: Mapping[str, str], there: Sequence[str]) -> None:
    """Raise `UserError` if an option names a column that the table does not have."""
    missing = {option: column for option, column in named.items() if column not in there}
    if not missing:
        return
    near = {option: difflib.get_close_matches(column, there, 1) for option, column in missing.items()}
    names = {option: found[0] if found else "NAME" for option, found in near.items()}
    command = " ".join(f"--set data.{option}={name}" for option, name in names.items())
    python = ", ".join(f'{option}="{name}"' for option, name in names.items())
    header = f"; {HEADER}" if is_delimited(data) else ""
    raise UserError(
        f"{data}: {unknown('column', next(iter(missing.values())), there)}{header}. Say what they are called: "
        f"{command} (in Python, {python})"
    )
