"""The command line. Every command prints a table for people, or with --json one JSON document for machines."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from partwise.cli import interrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of the process (or `arguments`, and then signals are the caller's own); its exit code."""
    if arguments is None:
        interrupt.install()
    from partwise.cli.outcome import (
        run,
    )  # after the above, so that Ctrl-C is quiet while everything is imported

    return run(list(sys.argv[1:] if arguments is None else arguments), whole_process=arguments is None)
