"""A server's memory: what closing a round needs at least, what the process may have, and what is given back."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from partwise.deployment.rules import Rules
from partwise.server.messages import LARGEST_HEADER
from partwise.server.round import Server
from partwise.server.sealed_form import SealedForm
from partwise.types import UserError

PROCESS = 250_000_000  # bytes of a server without a model; 300 to 340 MB were measured
COPIES = 3  # of a report that is added up: as it was sent, unpacked, and where it is computed with


def check_memory(server: Server, state: Any, rules: Rules, root: Path = Path("/")) -> None:
    """Raise `UserError` if rounds cannot be closed with the memory that this process may have.

    Args:
        server: The server side of the algorithm.
        state: The shapes of its state.
        rules: The rules of the run.
        root: Where the files of the system are.
    """
    need, limits = memory_of_closing(server, state, rules), memory_limits(root)
    if not limits:
        return
    where = min(limits, key=lambda name: limits[name])
    if need > limits[where]:
        raise UserError(
            f"to close a round, this run's server needs {need / 1e6:,.0f} MB of memory or more, and it may have "
            f"{limits[where] / 1e6:,.0f} MB ({where}): raise that (MemoryMax= of a systemd unit, --memory of a "
            f"container), or train a smaller model, or one whose optimizer keeps less (server.optimizer)"
        )


def memory_of_closing(server: Server, state: Any, rules: Rules) -> int:
    """The least bytes with which a server can close a round: less than was measured, never more.

    It has the first state and the last one. With both, it has the sum, and then the next state or the report that
    is added up. Two servers have all reports of a round at once.
    """
    states, total = _size(state), _size(jax.eval_shape(server.zero, state.params))
    if server.sealed:
        report = server.largest - LARGEST_HEADER
    else:  # a client may have few rows of a table, and has all of what is shared
        spaces = server.algorithm.partition.spaces
        report = _size(server.form.shapes(dict.fromkeys(spaces, 0)))
    reports = rules.recruiting.size if isinstance(server.sealed, SealedForm) else COPIES
    return PROCESS + min(rules.rounds, 2) * states + total + max(states, reports * report)


def memory_limits(root: Path = Path("/")) -> Mapping[str, int]:
    """How many bytes this process may have, by what says so. What may be swapped out counts as memory."""
    found = {f"{path}": limit + _swap(root) for path, limit in _group_limits(root)}
    with contextlib.suppress(OSError, ValueError):
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found["the memory of this machine"] = there + _swap(root)
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        found["ulimit -v"] = space
    return found


def _group_limits(root: Path) -> Iterator[tuple[Path, int]]:
    """The limits of this process's control groups, of version 2 or 1, and of those that they are in."""
    groups = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        kinds, _, path = line.partition(":")[2].partition(":")
        if kinds and "memory" not in kinds.split(","):
            continue
        top, name = (groups / "memory", "memory.limit_in_bytes") if kinds else (groups, "memory.max")
        here = top / path.lstrip("/")
        for folder in (here, *here.parents):
            limit = _text(folder / name).strip()
            if limit.isdigit():  # not `max`
                yield folder / name, int(limit)
            if folder == top:
                break


def _swap(root: Path) -> int:
    lines = [line.split() for line in _text(root / "proc/meminfo").splitlines()]
    return sum(1024 * int(line[1]) for line in lines if line[:1] == ["SwapTotal:"])


def _text(path: Path) -> str:
    """What is in a file of the system; "" if it is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _size(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree_util.tree_leaves(tree))


def give_back_memory() -> None:
    """Give back what compiling has left, where the C library can (glibc): some 70 MB of 440."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
