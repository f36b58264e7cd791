"""How many bytes of parameters and keys a round costs, as in the record of a simulated round (`server.record`):
without the headers of messages and of HTTP, and before compression."""

from __future__ import annotations

from collections.abc import Iterable

from partwise.checkpoint import from_bytes
from partwise.deployment.book import TaskRow
from partwise.model.partition import Partition
from partwise.selection.serving import KEY_BYTES, sizes_of


def travelled(partition: Partition, tasks: Iterable[TaskRow], on_demand: bool) -> dict[str, int | None]:
    """`bytes_down` and `bytes_up` of the tasks of a round.

    Down are the slices of every task that asked for them. If slices are files, only their host knows, and it is
    None. Up are the keys that were asked for, and the arrays of the reports, as they were written
    (`deploy.precision`): what a simulated client sends, and 16 bytes of sums.
    """
    tasks, sizes = list(tasks), sizes_of(partition)
    up = sum(len(task.report) - _header(task.report) for task in tasks if task.report is not None)
    if not on_demand:
        return {"bytes_down": None, "bytes_up": up}
    asked = [from_bytes(task.keys)[0] for task in tasks if task.keys is not None]
    num_keys = {space: sum(len(keys[space]) for keys in asked) for space in partition.spaces}
    down = len(asked) * sizes.fixed + sum(sizes.slices[space] * each for space, each in num_keys.items())
    return {"bytes_down": down, "bytes_up": up + KEY_BYTES * sum(num_keys.values())}


def _header(message: bytes) -> int:
    """The bytes of a message before its arrays."""
    return 8 + int.from_bytes(message[:8], "little")
