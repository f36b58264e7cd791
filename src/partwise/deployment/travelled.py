"""How many bytes of parameters and keys a round costs, as in the record of a simulated round (`server.record`):
without the headers of messages and of HTTP, and before compression."""

from __future__ import annotations

from collections import Counter

from partwise.checkpoint import from_bytes
from partwise.deployment.book import TaskRow
from partwise.model.partition import Partition
from partwise.selection.serving import KEY_BYTES, sizes_of


class Travelled:
    """Counts `bytes_down` and `bytes_up` of the tasks of a round, one after the other.

    Down are the slices of every task that asked for them. If slices are files (not `on_demand`), only their host
    knows, and it is None. Up are the keys that were asked for, and the arrays of the reports, as they were written
    (`deploy.precision`): what a simulated client sends, and 16 bytes of sums.
    """

    def __init__(self, partition: Partition, on_demand: bool):
        self._sizes, self._on_demand = sizes_of(partition), on_demand
        self.begin()

    def begin(self) -> None:
        """Count from nothing: the tasks are read again."""
        self._asked, self._arrays, self._keys = 0, 0, Counter[str]()
        self.reports = 0  # bytes of reports, with their headers

    def counted(self, task: TaskRow) -> TaskRow:
        """The same task, which has been counted now."""
        if task.report is not None:
            self.reports += len(task.report)
            self._arrays += len(task.report) - _header(task.report)
        if task.keys is not None and self._on_demand:
            self._asked += 1
            self._keys.update({space: len(keys) for space, keys in from_bytes(task.keys)[0].items()})
        return task

    def record(self) -> dict[str, int | None]:
        """What is recorded of the round."""
        if not self._on_demand:
            return {"bytes_down": None, "bytes_up": self._arrays}
        slices = sum(self._sizes.slices[space] * each for space, each in self._keys.items())
        up = self._arrays + KEY_BYTES * self._keys.total()
        return {"bytes_down": self._asked * self._sizes.fixed + slices, "bytes_up": up}


def _header(message: bytes) -> int:
    """The bytes of a message before its arrays."""
    return 8 + int.from_bytes(message[:8], "little")
