"""One writer to a folder: a second is refused at once, a killed one is no hindrance."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from partwise.papers import reproduce as papers
from partwise.runs import lock
from partwise.runs.train import train
from partwise.types import UserError

HOLD = """
import sys, time
from partwise.runs.lock import held
with held(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path/run."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_writer_is_refused_before_any_work(holder, tmp_path, monkeypatch):
    def work(*_):
        raise AssertionError("it went to work")

    monkeypatch.setattr("partwise.runs.train.resolve", work)
    monkeypatch.setattr("partwise.runs.train.resumed", work)
    (tmp_path / "run" / "config.toml").write_text("")
    says = rf"another run is writing to .*run' \(process {holder.pid} on .*\): wait until it ends"
    for resume in (False, True):
        with pytest.raises(UserError, match=says):
            train("planted", out=tmp_path / "run", resume=resume)
    with pytest.raises(UserError, match=says):
        papers.reproduce("fedrecon-table1", out=tmp_path / "run")


def test_the_command_line_refuses_it_before_jax_is_imported(holder, tmp_path):
    code = f"""
import sys
from partwise.cli import main
for command in (["train", "--out"], ["train", "--resume", "--out"], ["reproduce", "fedrecon-table1", "--out"]):
    assert main([*command, {str(tmp_path / "run")!r}]) == 2
    assert "jax" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stderr.split()).count(f"(process {holder.pid} on") == 3


def test_a_killed_writer_lets_go(holder, tmp_path):
    with pytest.raises(UserError), lock.held(tmp_path / "run"):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with lock.held(tmp_path / "run"):
        assert (tmp_path / "run" / lock.FILE).exists()
    assert list((tmp_path / "run").iterdir()) == []


def test_folders_made_in_vain_are_removed(tmp_path):
    with lock.held(tmp_path / "a" / "b"), pytest.raises(UserError, match=f"process {os.getpid()}"):
        lock.refuse_if_held(tmp_path / "a" / "b")
    lock.refuse_if_held(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    with lock.held(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "file").write_text("mine")
    assert (tmp_path / "a" / "b" / "file").read_text() == "mine"


def test_many_that_come_and_go_never_hold_it_together(tmp_path):
    """Each adds 1 to a number that is read and written apart; a lock that leaks would lose some."""
    code = """
import sys, time
from pathlib import Path
from partwise.runs.lock import held
from partwise.types import UserError
number, done = Path(sys.argv[1]) / "number", 0
while done < 20:
    try:
        with held(Path(sys.argv[1]) / "run"):
            value = int(number.read_text())
            time.sleep(0.001)
            number.write_text(str(value + 1))
            done += 1
    except UserError:
        time.sleep(0.001)
"""
    (tmp_path / "number").write_text("0")
    command = [sys.executable, "-c", code, str(tmp_path)]
    for process in [subprocess.Popen(command) for _ in range(3)]:
        assert process.wait(timeout=600) == 0
    assert (tmp_path / "number").read_text() == "60"


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("", "name is empty"),
        ("x" * 100_000, r"xxx\.\.\. \(100000 characters\)' as a folder: File name too long"),
        ("/dev/null", "is not a folder"),
        ("/dev/null/run", "Not a directory"),
        ("/proc/partwise", "as a folder"),  # may not be written to, not even by root
        ("a\0b", "null"),
    ],
    ids=["empty", "long", "device", "below a device", "read-only", "null"],
)
def test_places_that_cannot_be_folders(place, says):
    for resume in (False, True):
        with pytest.raises(UserError, match=says if not resume else rf"{says}|holds no run"):
            train("planted", out=place, resume=resume)
    with pytest.raises(UserError, match=says):
        papers.reproduce("fedrecon-table1", out=place)


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(lock.UNSUPPORTED[0], "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with pytest.warns(lock.RunWarning, match="without locks"), lock.held(tmp_path / "run"):
        pass
