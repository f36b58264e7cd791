"""Ctrl-C (SIGINT) and SIGTERM: while there is nothing to lose they end the process at once, which no import can get
in the way of; once a run is at work they are raised, so that it can say how to go on.

This module imports next to nothing, because it comes before everything else.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


class Stopped(KeyboardInterrupt):
    """A signal came; `code` is what a shell expects of a process that one ended: 130 or 143."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


_working = False
_stopped: Stopped | None = None


def install() -> None:
    """Handle both signals from now on; one that the process was told to ignore stays ignored."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) == usual:
            signal.signal(number, _handle)


def begin_work() -> None:
    """From here on there is something to save."""
    global _working
    _working = True


def end_work() -> None:
    """There is nothing to lose any more."""
    global _working
    _working = False


def stopped() -> Stopped | None:
    """The signal that came, if one did; another library may have made another error of it."""
    return _stopped


def _handle(number: int, frame: Any) -> None:
    global _stopped
    stop = Stopped(128 + number)
    if not _working:
        _leave(stop.code)
    _stopped = stop
    end_work()  # whoever is impatient need not wait for what follows
    raise stop


def _leave(code: int) -> None:
    if "--json" in sys.argv:
        os.write(1, b'{"error": "stopped."}\n')
    os.write(2, b"partwise: stopped.\n")
    os._exit(code)
