"""`partwise recommend`: the command and its options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from partwise.cli import show
from partwise.cli.network import kept_model


def recommend(options: argparse.Namespace) -> Mapping[str, Any]:
    """`partwise recommend`."""
    from partwise.runs.personal import Personal

    personal = Personal.open(kept_model(options.run_folder), options.task, options.model)
    local, column = personal.find_local(options.local), personal.ranked_column
    seen = personal.read(options.exclude, (column,), options.id) if options.exclude else None
    given = None
    if options.client:
        given = personal.read(options.client, personal.columns_in(options.client, but=column), options.id)
    found = personal.recommend(local, options.k, seen, given)
    if not options.json:
        show.recommended(column, found)
    unknown = {name: file.unknown for name, file in (("exclude", seen), ("client", given)) if file}
    return {"column": column, "recommended": [each._asdict() for each in found], "unknown": unknown}


def add_recommend(command: Callable[..., argparse.ArgumentParser]) -> None:
    """The command in the parser."""
    more = ": the items with the highest scores, offline"
    sub = command("recommend", recommend, "the catalogue, ranked for a client", more)
    add_run(sub, help="of a URL, the model that personalize fetched")
    sub.add_argument("--local", metavar="FILE", help="the client's local part, if the model has one")
    sub.add_argument("-k", type=int, default=10, metavar="N", help="how many (default: 10)")
    sub.add_argument("--exclude", metavar="FILE", help="CSV or Parquet with the items that are not wanted")
    sub.add_argument(
        "--client",
        metavar="FILE",
        help="the client's examples, if the model reads more than the item; the last counts",
    )
    sub.add_argument("--id", metavar="VALUE", help="the client whose rows are meant, if a file has several")


def add_run(sub: argparse.ArgumentParser, metavar: str = "RUN|URL", help: str | None = None) -> None:
    """A recorded run, the code that makes its task, and which of its models is meant."""
    sub.add_argument("run_folder", metavar=metavar, help=help)
    sub.add_argument(
        "--task",
        metavar="NAME",
        help="what the run was made of, if it is no named task: module:function",
    )
    sub.add_argument("--model", default="last", help="last, or best, the one that keep.best kept")
