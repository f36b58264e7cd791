"""A process that ends with the one that started it. The parent holds its standard input and never writes there."""

from __future__ import annotations

import os
import signal
import threading


def end_with_parent() -> None:
    """From now on, this process ends when its standard input does. Ctrl-C is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_wait, daemon=True).start()


def _wait() -> None:
    while os.read(0, 4096):  # not by `sys.stdin`, whose lock this thread would hold when the process ends
        pass
    os._exit(1)
