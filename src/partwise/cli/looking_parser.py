"""The options of the commands that make something to look at."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from partwise.cli import looking

Command = Callable[..., argparse.ArgumentParser]


def add_looking(command: Command) -> None:
    """Add them."""
    more = ": curves, results, clients, costs, privacy, settings. One HTML file that needs no network."
    sub = command("report", looking.report, "runs as a page to read and to send", more)
    sub.add_argument(
        "run_folders", metavar="RUN", nargs="+", help="those that differ only in seed are one line"
    )
    sub.add_argument("--out", default="report.html", metavar="FILE", help="default: report.html")
    more = ". The page is served on this machine alone. With --json: how it stands now, and no page."
    sub = command("watch", looking.watch, "follow a run in the browser, while it trains or is served", more)
    sub.add_argument("run_folder", metavar="RUN|URL", help="folder of a run, or the URL of its server")
    sub.add_argument(
        "--port", type=int, default=0, metavar="N", help="of the page (default: one that is free)"
    )
    sub.add_argument("--no-open", action="store_true", help="open no browser")
    sub.add_argument("--token", metavar="FILE", help="an operator's token, for a URL")
    sub.add_argument("--authority", metavar="FILE", help="certificate that signed the server's, for a URL")
