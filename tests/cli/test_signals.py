"""Ctrl-C and SIGTERM at any moment: one sentence, the exit code that a shell expects, and never a traceback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from partwise.runs.folder import Folder

COMMAND = """
import signal, sys
from partwise.cli import interrupt, main
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupt.install()  # the first thing that main does
sys.stdout.write("begun\\n")
sys.stdout.flush()
sys.exit(main())
"""


def begun(*arguments: str) -> subprocess.Popen:
    """The command as a process, once its first line of code has run; before that Python itself is in charge. A
    signal that the tests were started to ignore (by nohup, say) is not ignored there."""
    command = [sys.executable, "-c", COMMAND, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    return process


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=600)
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    return process.returncode, out, " ".join(err.split())


@pytest.mark.parametrize("seconds", [0, 0.03, 0.1, 0.25, 0.5, 0.8])
def test_ctrl_c_while_everything_is_imported(tmp_path, small, seconds):
    process = begun("train", "planted", *small, "--rounds", "100000", "--out", str(tmp_path / "run"))
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code == 130
    assert "partwise: stopped" in err


IGNORED = """
import gc, os, signal, sys, time
from partwise.cli import interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupt.install()
interrupt.begin_work()
sys.stdout.write("begun\\n")
gc.disable()
def collecting(*_):
    gc.callbacks.clear()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)
gc.callbacks.append(collecting)
try:
    gc.collect()
    time.sleep(60)
except interrupt.Stopped as stopped:
    sys.exit(stopped.code)
"""


def test_ctrl_c_where_python_ignores_exceptions_is_not_lost():
    """JAX is called whenever Python collects garbage, and what is raised there goes nowhere."""
    process = subprocess.Popen([sys.executable, "-c", IGNORED], stdout=-1, stderr=-1, text=True)
    code, _, err = ended(process)
    assert (code, err) == (130, "")


def test_json_gets_its_error_too(tmp_path, small):
    process = begun("train", "planted", *small, "--out", str(tmp_path / "run"), "--json")
    process.send_signal(signal.SIGTERM)
    code, out, _ = ended(process)
    assert code == 143
    assert json.loads(out)["error"].startswith("stopped")


def wait_for(path: Path) -> None:
    until = time.monotonic() + 600
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert path.exists()


def test_sigterm_says_how_to_go_on_and_lets_the_folder_go(tmp_path, small):
    out = tmp_path / "run"
    endless = (
        "--rounds",
        "1000000",
        "--set",
        "simulation.evaluate_every=0",
        "--set",
        "server.schedule=constant",
    )
    process = begun("train", "planted", *small, *endless, "--out", str(out))
    wait_for(out / "metrics.jsonl")
    refused = begun("train", "--resume", "--out", str(out))
    code, _, err = ended(refused)
    assert (code, f"(process {process.pid} on " in err) == (2, True)
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert code == 143
    assert f"stopped. Go on with: partwise train --resume --out {out}" in err
    assert not list(out.rglob("*.tmp"))
    with Folder(out).held():
        assert Folder(out).records()
