"""Ctrl-C (SIGINT) and SIGTERM.

While there is nothing to lose, a signal ends the process at once, and no import can delay this. Once a run is
at work, the signal is raised as an exception, so that the run can say how to continue. This module imports
almost nothing, because it is imported before everything else.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


class Stopped(KeyboardInterrupt):
    """A signal came. `code` is the exit code that a shell expects after this signal: 130 or 143."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


_working = False
_stopped: Stopped | None = None
_unraisable = sys.unraisablehook
SOON = 0.01  # seconds


def install() -> None:
    """Handle both signals from now on. A signal that the process was told to ignore is still ignored."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) == usual:
            signal.signal(number, _handle)
    sys.unraisablehook = _send_again


def begin_work() -> None:
    """From here on there is something to save."""
    global _working
    _working = True


def end_work() -> None:
    """From now on there is nothing to lose."""
    global _working
    _working = False


def stopped() -> Stopped | None:
    """The signal that came, or None. It is needed because another library may have turned the exception into
    another one."""
    return _stopped


def same_command(options: Any) -> str:
    """The command that was given, to continue what it began."""
    import shlex

    return f"partwise {shlex.join(options.given)}" + ("" if options.resume else " --resume")


def _handle(number: int, frame: Any) -> None:
    global _stopped
    stop = Stopped(128 + number)
    if not _working:
        _leave(stop.code)
    _stopped = stop
    end_work()  # a second signal ends the process at once
    raise stop


def _send_again(ignored: Any) -> None:
    """A signal that came where Python ignores exceptions, such as while it collects garbage, comes again."""
    if not isinstance(ignored.exc_value, Stopped):
        _unraisable(ignored)
        return
    import threading

    begin_work()
    timer = threading.Timer(SOON, os.kill, (os.getpid(), ignored.exc_value.code - 128))
    timer.daemon = True
    timer.start()


def _leave(code: int) -> None:
    if "--json" in sys.argv:
        os.write(1, b'{"error": "stopped."}\n')
    os.write(2, b"partwise: stopped.\n")
    os._exit(code)
