"""Trains families of a sweep in processes of their own, as many at once as suit the machine."""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from partwise.runs.train import OnStatus, Status
from partwise.simulation.cores import own_cores
from partwise.types import RunWarning, UserError

PROCESS_BYTES = 2 << 30  # memory that a process may need


def suited(families: int) -> int:
    """How many processes suit the machine: one for each core, but no more than there are families, nor than memory
    allows. With an accelerator it is one, which has it for itself."""
    import jax

    if jax.default_backend() != "cpu":
        return 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(min(families, len(own_cores()), memory // PROCESS_BYTES), 1)


def train_families(
    out: Path, families: Sequence[int], processes: int, progress: OnStatus, told: Callable[[str], None]
) -> None:
    """Train the families of the plan in `out` with these numbers. Each process has its share of the cores. The
    first error of a family stops all others."""
    free: queue.Queue[list[int]] = queue.Queue()
    for number in range(processes):
        free.put(own_cores()[number::processes] or own_cores())
    running: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(processes) as pool:
        jobs = [pool.submit(_train_one, out, family, free, running, progress, told) for family in families]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.kill()
            raise


def _train_one(
    out: Path,
    family: int,
    free: queue.Queue[list[int]],
    running: list[subprocess.Popen[str]],
    progress: OnStatus,
    told: Callable[[str], None],
) -> None:
    mine = free.get()
    given = [
        sys.executable,
        "-m",
        "partwise.runs.sweep_worker",
        str(out),
        str(family),
        ",".join(map(str, mine)),
    ]
    pipe: Any = subprocess.PIPE
    with subprocess.Popen(given, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        running.append(process)
        errors = ThreadPoolExecutor(1).submit(process.stderr.read)  # pyright: ignore[reportOptionalMemberAccess]
        lines = process.stdout or ()
        problem = "".join(_heard(json.loads(line), progress, told) for line in lines if line.startswith("{"))
    free.put(mine)
    if problem or process.returncode:
        last = (errors.result().strip().splitlines() or [f"it ended with code {process.returncode}"])[-1]
        raise UserError(
            problem or f"a process of the sweep ended early ({last}): go on with --resume (resume=True)"
        )


def _heard(line: dict[str, Any], progress: OnStatus, told: Callable[[str], None]) -> str:
    """Pass on what a process tells, and return its error."""
    if "status" in line:
        loss = line["status"]["loss"]
        progress(Status(**line["status"] | {"loss": math.nan if loss is None else loss}))
    elif "told" in line:
        told(line["told"])
    elif "warning" in line and line["of_run"]:
        warnings.warn(line["warning"], RunWarning, stacklevel=2)
    return line.get("error", "")
