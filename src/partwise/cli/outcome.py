"""From the arguments of a command to its exit code."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.text import Text

from partwise.cli import interrupt
from partwise.cli.parser import make_parser
from partwise.cli.process_shares import LOST
from partwise.cli.progress import process_start
from partwise.cli.show import err
from partwise.runs.versions import versions
from partwise.types import RunWarning, UserError


def run(given: Sequence[str], whole_process: bool = True) -> int:
    """Run a command and return its exit code.

    It is 0 for success, 2 with one paragraph for anything that the user can fix, and 1 for a bug in partwise,
    or for a sweep of which a run failed.
    If the process was started for this command, seconds are counted from the start of the process.
    """
    if list(given) == ["--version", "--json"]:
        sys.stdout.write(json.dumps(versions(), indent=1) + "\n")
        return 0
    if not given:
        make_parser().print_help(sys.stderr)
        return 2
    options = make_parser().parse_args(given)
    options.given = list(given)
    options.began = process_start() if whole_process else time.perf_counter()
    options.silent = False  # of several processes, one prints
    try:
        code = _ended(options, given)
    except KeyboardInterrupt as stop:  # while it told why it ends
        code = getattr(stop, "code", 130)
    if code and whole_process and "partwise.simulation.processes" in sys.modules:
        sys.modules["partwise.simulation.processes"].leave(code)
    return code


def _ended(options: argparse.Namespace, given: Sequence[str]) -> int:
    try:
        _keep_compiled_programs()
        with _told_warnings(options):
            result = options.run(options)
        if isinstance(result, int):
            return result
        if options.json and not options.silent:
            sys.stdout.write(json.dumps(_plain(result), indent=1) + "\n")
        return 2 if result.get("not_finite") else 1 if result.get("failed") else 0
    except UserError as error:
        return _fail(str(error), options, 2, shared=error.everywhere)
    except KeyboardInterrupt as stop:
        return _fail(_stopped(options), options, getattr(stop, "code", 130), shared=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        stop = interrupt.stopped()
        if stop:
            return _fail(_stopped(options), options, stop.code, shared=True)
        if _lost_others(error):
            return _fail(f"another process of this run is gone. {_going_on(options)}", options, LOST)
        return _fail(_bug(error, given), options, 1)


@contextmanager
def _told_warnings(options: argparse.Namespace) -> Iterator[None]:
    """Show warnings of runs as sentences, without the line of code that they come from."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", RunWarning)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if options.silent:
                return
            if issubclass(category, RunWarning):
                err.print(Text.assemble(("partwise:", "bold"), f" warning: {message}"), soft_wrap=True)
            else:
                usual(message, category, *place, **more)

        warnings.showwarning = show
        yield


def _fail(message: str, options: argparse.Namespace, code: int, shared: bool = False) -> int:
    """Tell why, and return the exit code. What several processes share is told by the one that prints."""
    if shared and options.silent:
        return code
    if options.json:
        sys.stdout.write(json.dumps({"error": message}) + "\n")
    err.print(Text.assemble(("partwise:", "bold red"), f" {message}"), soft_wrap=True)
    if options.debug or os.environ.get("PARTWISE_DEBUG"):
        traceback.print_exc()
    return code


def _stopped(options: argparse.Namespace) -> str:
    folder = getattr(options, "folder", None)
    if folder is None and not getattr(options, "again", None):
        return "stopped."
    if folder is not None and not (folder / "config.toml").exists():
        return "stopped before the first round; nothing was recorded."
    return f"stopped. {_going_on(options)}"


def _going_on(options: argparse.Namespace) -> str:
    """How to continue."""
    folder = shlex.quote(str(getattr(options, "folder", "")))
    return f"Go on with: {getattr(options, 'again', None) or f'partwise train --resume --out {folder}'}"


def _lost_others(error: Exception) -> bool:
    """Whether an error says that another of several processes is gone."""
    processes = sys.modules.get("partwise.simulation.processes")
    return processes is not None and processes.has_lost_others(error)


def _bug(error: Exception, arguments: Sequence[str]) -> str:
    return (
        f"this is a bug in partwise, not a mistake of yours: {type(error).__name__}: {error}. Please report it "
        f"with the command `{shlex.join(['partwise', *arguments])}` and what it prints with --debug."
    )


def _keep_compiled_programs() -> None:
    """Keep compiled programs on disk for the next command (JAX_COMPILATION_CACHE_DIR chooses where)."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(cache, "partwise", "jax")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.02")


def _plain(value: object) -> object:
    from partwise.runs.document import to_plain

    return to_plain(value)
