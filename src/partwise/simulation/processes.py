"""Several processes that train one run together, by JAX's own distributed runtime (gloo on CPUs, NCCL on GPUs).

Every process runs the same program on its own devices. Process 0 is the writer: it alone writes files and prints.
JAX must know of the processes before it starts, so joining is the first thing that such a process does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partwise.randomness import AXIS
from partwise.simulation.mesh import ask_for_all_cores, make_mesh, use_all_cores
from partwise.types import RunWarning, UserError

COORDINATOR, NUMBER, INDEX = "PARTWISE_COORDINATOR", "PARTWISE_PROCESSES", "PARTWISE_PROCESS"
HEARTBEAT = "PARTWISE_HEARTBEAT"
HEARTBEAT_SECONDS = 30  # after so long without a sign of life, a process counts as lost
SOON_SECONDS = 15  # a process that waits longer for the others says so
LEAVE_SECONDS = 3  # for others to end too
WAIT_SECONDS = 600  # for all processes to come; then JAX aborts this one


class ProcessPlace(NamedTuple):
    """Where the first process listens, how many there are, and which this one is."""

    address: str
    number: int
    index: int


def num_processes() -> int:
    """How many processes train together. Does not start JAX if this process is alone."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def process_index() -> int:
    """The number of this process."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_writer() -> bool:
    """Whether this process writes files and prints."""
    return process_index() == 0


def check_alone(what: str, remedy: str) -> None:
    """Raise `UserError` if this process is one of several, and what it is to do is for one alone."""
    if num_processes() > 1:
        raise UserError(f"{what}, in one process, and here are {num_processes()}: {remedy}")


def join_processes(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> None:
    """Make this process one of several that train together. A script that is started several times calls it first,
    before anything uses JAX; then `partwise.train` works as ever, and process 0 writes and prints.

    What is not given is found in the environment: `PARTWISE_COORDINATOR`, `PARTWISE_PROCESSES` and
    `PARTWISE_PROCESS`, or the variables of Slurm, Open MPI or a Kubernetes indexed Job.

    Args:
        coordinator: HOST:PORT at which process 0 can be reached by all. The port must be free there.
        processes: How many processes there are.
        process: The number of this one, from 0.
    """
    if jax.distributed.is_initialized():
        raise UserError("this process has joined others already: call join_processes once")
    place = find_place(os.environ, coordinator, processes, process)
    _let_threads_finish()
    ask_for_all_cores()  # before anything asks JAX how many processes there are, which starts it
    # Its handler of SIGTERM would take the place of ours, and nobody here asks it.
    jax.config.update("jax_enable_preemption_service", False)
    waiting = threading.Timer(SOON_SECONDS, _tell_waiting, [place])
    waiting.daemon = True
    waiting.start()
    try:
        jax.distributed.initialize(
            coordinator_address=place and place.address,
            num_processes=place and place.number,
            process_id=place and place.index,
            cluster_detection_method="deactivate" if place else None,
            initialization_timeout=WAIT_SECONDS,
            heartbeat_timeout_seconds=_heartbeat(os.environ),
        )
    except Exception as error:  # also of the package kubernetes, which JAX asks
        raise UserError(_why_alone(error, place)) from error
    finally:
        waiting.cancel()
    use_all_cores()
    meet()


def _let_threads_finish() -> None:
    """Let a thread of this process that wakes up wait until the one that runs on its core pauses (threads that are
    made from here on). gloo's thread asks again and again for a lock that another thread holds; if it had taken the
    core from just that thread, a sum of any size would last until the next tick of the system's clock, 4 ms."""
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def has_lost_others(error: BaseException) -> bool:
    """Whether an error of JAX says that it does not hear of another process any more."""
    about_others = ("gloo", "nccl", "heartbeat", "coordination", "connection", "unavailable")
    mine = num_processes() > 1 and isinstance(error, jax.errors.JaxRuntimeError)
    return mine and any(word in str(error).lower() for word in about_others)


def leave(code: int) -> None:
    """End this process, if it is one of several, without waiting for others that may never end. (JAX would wait for
    minutes.) Those that end too are waited for, so that none of them takes the others' end for a crash. A launcher
    that ends them all is not heard: the exit code says what happened first."""
    if not jax.distributed.is_initialized():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.flush()
    sys.stderr.flush()
    ending = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    ending.start()
    ending.join(LEAVE_SECONDS)
    os._exit(code)


def find_place(
    environment: Mapping[str, str],
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
) -> ProcessPlace | None:
    """The place of this process, from what is given and the environment; None if neither says anything, so that it
    is a cluster's to say."""
    given = {COORDINATOR: coordinator, NUMBER: processes, INDEX: process}
    found = {name: value if value is not None else environment.get(name) for name, value in given.items()}
    missing = [name for name, value in found.items() if value is None]
    if len(missing) == len(found):
        return None
    if missing:
        there = ", ".join(f"{name}={value}" for name, value in found.items() if value is not None)
        raise UserError(f"{there} is set, but not {', '.join(missing)}: set all three, or none of them")
    return _checked(str(found[COORDINATOR]), found[NUMBER], found[INDEX])


def _checked(address: str, number: object, index: object) -> ProcessPlace:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"{COORDINATOR} must be HOST:PORT, as in 10.0.0.1:1234, not '{address}'")
    if not (str(number).isdecimal() and str(index).isdecimal() and int(str(index)) < int(str(number))):
        raise UserError(
            f"{NUMBER} must be the number of processes and {INDEX} one of 0, 1, ... below it, not {number} and "
            f"{index}"
        )
    return ProcessPlace(address, int(str(number)), int(str(index)))


def _heartbeat(environment: Mapping[str, str]) -> int:
    seconds = environment.get(HEARTBEAT, str(HEARTBEAT_SECONDS))
    if not seconds.isdecimal() or int(seconds) < 1:
        raise UserError(f"{HEARTBEAT} must be whole seconds of at least 1, not '{seconds}'")
    return int(seconds)


def _tell_waiting(place: ProcessPlace | None) -> None:
    told = f"process {place.index} of {place.number} waits for the others at {place.address}" if place else ""
    warnings.warn(told or "waiting for the other processes of this run", RunWarning, stacklevel=2)


def _why_alone(error: Exception, place: ProcessPlace | None) -> str:
    """Why this process found no others."""
    told, by_hand = _first_line(error), f"set {COORDINATOR}, {NUMBER} and {INDEX}"
    if "before any JAX calls" in told:
        return "JAX was used before join_processes(): call it first, right after the imports"
    if place is None and isinstance(error, ValueError):
        return (
            f"no launcher that JAX knows has started this process (Slurm's srun, Open MPI's mpirun, or an indexed "
            f"Job of Kubernetes with the package kubernetes): {by_hand}, or start several processes on this "
            f"machine with --processes N"
        )
    if place is None and not isinstance(error, jax.errors.JaxRuntimeError):
        found = ", ".join(f"{type(e).__name__}: {_first_line(e)}" for e in (error, error.__cause__) if e)
        return f"the launcher does not say which process this is ({found}): mend that, or {by_hand}"
    where = (
        f"{place.number} processes did not all come to {place.address}" if place else "not all processes came"
    )
    return f"{where} ({told}): see to it that all are started, and that they can reach that address"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


@cache
def meet() -> None:
    """Add up a number over all devices. From then on they are connected: a first sum must be begun by all within
    30 seconds (gloo), later ones wait for as long as a process lives."""
    if num_processes() == 1:
        return
    mesh = make_mesh()
    mine = [jax.device_put(np.ones(1, np.float32), device) for device in mesh.local_devices]
    ones = jax.make_array_from_single_device_arrays((mesh.size,), NamedSharding(mesh, P(AXIS)), mine)
    add = jax.shard_map(lambda x: jax.lax.psum(x, AXIS), mesh=mesh, in_specs=P(AXIS), out_specs=P())
    with _no_greetings():
        jax.block_until_ready(jax.jit(add)(ones))


@contextmanager
def _no_greetings() -> Iterator[None]:
    """Keep gloo from writing to standard output that it is connected; a JSON document may come there."""
    sys.stdout.flush()
    before, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(nowhere)
