"""`partwise store`: a table as a client store, for populations larger than memory or in an object store."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from partwise.cli import show
from partwise.types import UserError


def store(options: argparse.Namespace) -> Mapping[str, Any]:
    """`partwise store`."""
    from partwise.data.object_store import shown_place
    from partwise.data.table import read_table

    columns = options.columns.split(",") if options.columns else None
    ids = {name: vocabulary or name for name, vocabulary in _pairs(options.ids)}
    lists = {name: _length(name, text) for name, text in _pairs(options.lists)}
    dialect = {"delimiter": options.delimiter} if options.delimiter else {}
    dialect |= {"encoding": options.encoding} if options.encoding else {}
    built = read_table(
        options.table, options.client, columns, ids, options.out, options.order_by, lists, **dialect
    )
    if not options.json:
        show.say(f"Wrote {shown_place(options.out)}: {built}.")
    return {
        "out": options.out,
        "clients": built.num_clients,
        "examples": built.num_examples,
        "columns": {name: str(values.dtype) for name, values in built.columns.items()},
    }


def _pairs(text: str) -> list[tuple[str, str]]:
    """`a,b=c` as [("a", ""), ("b", "c")]."""
    return [(name, value) for name, _, value in (part.partition("=") for part in text.split(",") if part)]


def _length(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"--lists names {name!r} without a length: give one, as in --lists {name}=20")
    return int(text)


def add_store(command: Callable[..., argparse.ArgumentParser]) -> None:
    """The command in the parser."""
    more = ", of which a run reads only the clients that it needs"
    sub = command("store", store, "write a table as a client store", more)
    sub.add_argument("table", metavar="TABLE", help="a file (.csv, .parquet, .arrow), or a folder of Parquet")
    sub.add_argument("--client", required=True, metavar="COLUMN", help="the column that names the client")
    sub.add_argument("--columns", default="", metavar="A,B", help="the columns to keep (default: all)")
    sub.add_argument(
        "--ids", default="", metavar="A,B", help="columns of ids; A=ITEM,B=ITEM for those that share them"
    )
    sub.add_argument(
        "--lists", default="", metavar="A=20", help="for lists of ids, how many are kept of each"
    )
    sub.add_argument("--order-by", metavar="COLUMN", help="sort each client's rows by it")
    sub.add_argument("--delimiter", metavar="C", help="between the columns of a .csv or .tsv file")
    sub.add_argument("--encoding", metavar="NAME", help="of a .csv or .tsv file (default: UTF-8)")
    sub.add_argument("--out", required=True, metavar="DIR|s3://...", help="a new folder, or an address")
