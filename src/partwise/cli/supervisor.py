"""`partwise train --processes N`: starts N processes on this machine, and goes on if one of them is lost.

A process that is killed, that crashes or that hangs (JAX's heartbeat) ends all others, and the same number begins
again from the last checkpoint. If two beginnings in a row get no further, half as many go on. A mistake of the user
(exit code 2) and a bug (1) end all. This module does not start JAX.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from partwise.cli.process_shares import LOST, MachineShare, shares
from partwise.cli.show import err, say
from partwise.types import UserError

WORKER = ("-m", "partwise.cli.worker")
SAME_AGAIN = 2  # beginnings that get no further before half as many processes go on
LOOK_SECONDS = 0.02
GRACE_SECONDS = 5  # for the others to end by themselves after a mistake of the user
STDERR = 2  # not that of `sys.stderr`, which may be no file (a notebook's)
LAST_LINES = 20  # of what a process wrote, if nobody knows why it ended


class Worker(NamedTuple):
    """A process, and the file to which it writes."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]


class Ended(NamedTuple):
    """How a set of processes ended: the exit code, or LOST if one of them was; why, and what was written last, if
    nobody has told the user."""

    code: int
    why: str = ""
    written: str = ""


def supervise(given: Sequence[str], number: int, folder: Path) -> int:
    """Run a command in so many processes, until it ends, and return its exit code. `folder` is that of its run."""
    idle, done, again = 0, rounds_saved(folder), []
    while True:
        ended = _run([*given, *again], shares(number))
        if ended.code == 2 and ended.written:
            raise UserError(ended.written.removeprefix("partwise: "))
        if ended.code != LOST:
            if ended.written:
                say(ended.written, err)
            return ended.code
        idle, done = (0 if rounds_saved(folder) > done else idle + 1), rounds_saved(folder)
        if idle >= SAME_AGAIN:
            number, idle = number // 2, 0
        if number == 0:
            raise UserError(
                f"{ended.why}, again and again, also when it was alone. SIGKILL is how a system ends what takes "
                f"too much memory: fewer lanes take less (simulation.lanes). Written last: {ended.written}"
            )
        again = ["--resume"] if (folder / "config.toml").exists() else []
        where = f"round {done}" if done else "the beginning"
        say(f"partwise: {ended.why}: going on from {where} with {number} of them", err)


def rounds_saved(folder: Path) -> int:
    """The round of the last checkpoint; 0 if there is none."""
    names = [path.stem for path in (folder / "checkpoints").glob("*.safetensors")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _run(given: Sequence[str], places: Sequence[MachineShare]) -> Ended:
    """Run a command in a process for every share of the machine, and return how it ended."""
    address = f"127.0.0.1:{_free_port()}"
    workers: list[Worker] = []
    try:
        for index, share in enumerate(places):
            joining = {"PARTWISE_COORDINATOR": address, "PARTWISE_PROCESSES": str(len(places))}
            joining |= {"PARTWISE_PROCESS": str(index), **share.environment}
            workers.append(_start(given, index, joining, share.cores))
        return _watched(workers)
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.wait()
            worker.log.close()


def _start(given: Sequence[str], index: int, more: Mapping[str, str], cores: Sequence[int]) -> Worker:
    """Start a process on these cores. The first one's messages are the command's own."""
    log = tempfile.TemporaryFile()  # noqa: SIM115
    messages = os.dup(STDERR if index == 0 else log.fileno())
    try:
        with _on_cores(cores):
            process = subprocess.Popen(
                [sys.executable, *WORKER, str(messages), *given],
                stdin=subprocess.PIPE,
                stdout=None if index == 0 else subprocess.DEVNULL,
                stderr=log,
                pass_fds=(messages,),
                env={**os.environ, **more},
            )
    finally:
        os.close(messages)
    return Worker(process, log)


@contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    """A block in which processes begin on these cores."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _watched(workers: Sequence[Worker]) -> Ended:
    """Wait until all processes have ended well, or one has not."""
    while True:
        codes = [worker.process.poll() for worker in workers]
        bad = [index for index, code in enumerate(codes) if code]
        if bad:
            return _judged(workers, _first_cause(codes, bad))
        if all(code == 0 for code in codes):
            return Ended(0)
        time.sleep(LOOK_SECONDS)


def _first_cause(codes: Sequence[int | None], bad: Sequence[int]) -> int:
    """Which of several processes ended first, as far as that is known: others only follow one that was killed."""
    killed = [index for index in bad if codes[index] == -signal.SIGKILL]
    crashed = [index for index in bad if (codes[index] or 0) < 0]
    return [*killed, *crashed, *bad][0]


def _judged(workers: Sequence[Worker], index: int) -> Ended:
    """How it ends because this process did."""
    code = workers[index].process.returncode
    if code < 0 or code == LOST:
        how = signal.Signals(-code).name if code < 0 else "it heard nothing of the others"
        return Ended(LOST, f"process {index} was lost ({how})", _written(workers[index]))
    _wait_for_all(workers)
    said = workers[0].process.returncode == code  # it has told the user itself
    return Ended(code, written="" if said else _written(workers[index]))


def _wait_for_all(workers: Sequence[Worker]) -> None:
    until = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(until - time.monotonic(), 0))


def _written(worker: Worker) -> str:
    """The last lines that a process wrote."""
    worker.log.seek(0)
    lines = worker.log.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-LAST_LINES:])


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
