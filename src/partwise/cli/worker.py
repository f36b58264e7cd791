"""One of the processes of `--processes N`: `python -m partwise.cli.worker FD COMMAND ...`.

Messages go to the file descriptor FD. What libraries write when they crash goes to standard error, which is not
shown.
"""

from __future__ import annotations

import sys

from partwise.cli import main
from partwise.runs.parent import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    descriptor = int(sys.argv.pop(1))
    sys.stderr = open(descriptor, "w", buffering=1)  # noqa: SIM115
    sys.exit(main())
