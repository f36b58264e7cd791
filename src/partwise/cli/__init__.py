"""The command line. Every command prints a table for people, or with --json one JSON document for machines."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from partwise.cli import interrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Without `arguments`, the command is that of the process, and
    signals are handled. With `arguments`, signals are left to the caller."""
    if arguments is None:
        interrupt.install()
    from partwise.cli.outcome import (
        run,
    )  # after the above, so that Ctrl-C is quiet while everything is imported

    return run(list(sys.argv[1:] if arguments is None else arguments), whole_process=arguments is None)
