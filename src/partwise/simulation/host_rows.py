"""Rows of large tables in the memory of the host, read and written by all cores at once.

One core reads random rows at a fraction of what the memory gives. numpy lets other threads run while it copies
rows, so blocks of them go to a thread each.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from partwise.simulation.cores import own_cores

BLOCK_BYTES = 1 << 22  # what a thread copies at a time


def read_rows(table: np.ndarray, rows: np.ndarray, room: int) -> np.ndarray:
    """These rows of a table, padded with zeros to `room` of them."""
    found = np.empty((room, *table.shape[1:]), table.dtype)
    found[len(rows) :] = 0
    # Without a mode, numpy would write to a buffer first. The rows are there, so nothing is clipped.
    _in_blocks(found, len(rows), lambda at: np.take(table, rows[at], axis=0, out=found[at], mode="clip"))
    return found


def write_rows(table: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
    """Set these rows of a table, all different, to the first of the values."""
    _in_blocks(values, len(rows), lambda at: table.__setitem__(rows[at], values[at]))


def _in_blocks(like: np.ndarray, num_rows: int, copy: Callable[[slice], object]) -> None:
    size = max(1, BLOCK_BYTES // max(like.itemsize * int(np.prod(like.shape[1:])), 1))
    blocks = [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]
    each = map(copy, blocks) if len(blocks) < 2 else _threads().map(copy, blocks)
    for _ in each:  # and raise what a thread raised
        pass


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(own_cores()), thread_name_prefix="partwise-rows")
