"""The commands that make something to look at: report, watch."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from partwise.cli import show
from partwise.cli.interrupt import begin_work
from partwise.cli.network import needed
from partwise.cli.operator_requests import is_url, status_asker
from partwise.types import UserError, counted

Options = argparse.Namespace
Result = Mapping[str, Any]


def report(options: Options) -> Result:
    """`partwise report`."""
    from partwise.pages.details import read_detailed
    from partwise.pages.report import write_report

    runs = read_detailed(options.run_folders)
    num_bytes = write_report(runs, options.out)
    states = [{"run": run.name, "state": run.state, "problem": run.problem or run.failed} for run in runs]
    if not options.json:
        show.say(f"Wrote {options.out}: {counted(len(runs), 'run')}, {num_bytes / 1e3:.0f} kB.")
        for each in states:
            if each["state"] != "finished":
                state = each["state"] if each["state"] == "failed" else f"is {each['state']}"
                why = f": {each['problem'].rstrip('.')}" if each["problem"] else ""
                show.say(f"{each['run']} {state}{why}.")
    return {"out": str(options.out), "bytes": num_bytes, "runs": states}


@needed()
def watch(options: Options) -> Result:
    """`partwise watch`."""
    from partwise.pages.live_server import LivePage, LiveServer
    from partwise.pages.moment import status

    if not 0 <= options.port < 1 << 16:
        raise UserError(f"--port must be from 0 (any that is free) to 65,535, not {options.port}")
    follower = _follower(options)
    if options.json:
        return status(*follower.look())
    server = LiveServer(LivePage(follower), options.port)
    show.say(server.url)
    show.say("Ctrl-C ends watching; the run goes on.", show.err)
    if not options.no_open and _has_screen():
        import webbrowser

        webbrowser.open(server.url)
    with contextlib.suppress(KeyboardInterrupt):
        begin_work()
        _tell_changes(server.page)
    server.close()
    return status(server.page.run, server.page.moment)


def _follower(options: Options) -> Any:
    if not is_url(options.run_folder):
        from partwise.pages.follow_run import FolderFollower

        return FolderFollower(options.run_folder)
    from partwise.pages.follow_coordinator import CoordinatorFollower

    ask = status_asker(options.run_folder, options.token, options.authority)
    return CoordinatorFollower(options.run_folder, ask)


def _tell_changes(page: Any) -> None:
    """Show how the run stands: on a terminal as a line that changes, elsewhere when its state does."""
    from partwise.pages.moment import tell

    if show.err.is_terminal:
        with show.err.status(tell(page.run, page.moment)) as line:
            while True:
                time.sleep(0.5)
                line.update(tell(page.run, page.moment))
    before = ""
    while True:
        if page.moment.state != before:
            before = page.moment.state
            show.say(tell(page.run, page.moment))
        time.sleep(0.2)


def _has_screen() -> bool:
    """Whether a browser would open in a window, and not in this terminal."""
    return sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
