"""What a client's report looks like as bytes: written on the client, checked and read on the server.

A report has the client's update (under the names of the model's leaves), and one array of sums: weight, clients,
loss and its weight. If the server was not asked for the slices, and so does not know the client's keys, the report
names them. A report of several clients is their sum, on the rows of all their keys; where the mean needs it, it
says which weight holds each row. To send fewer bytes, updates can be rounded (`PRECISIONS`), each row by itself; a
shared leaf is one row. Errors are at most those that `Psi.bound` states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partwise.metrics import Sums
from partwise.model.partition import Partition
from partwise.model.psi import Psi, float16, int8, take
from partwise.server.messages import LARGEST_HEADER, About, Shapes, check_arrays, open_message, write_message
from partwise.server.total import Aggregator, Contribution
from partwise.types import UserError, unknown

SUMS = "#sums"  # weight, clients, loss and its weight, in one array; no leaf has this name
KEYS = "#keys:"  # and the name of a key space
HELD = "#held:"  # and the name of a key space: for each row the weight of the clients that hold it
PRECISIONS: Mapping[str, Psi] = {"float32": take, "float16": float16, "int8": int8}


class ReportForm:
    """The form of the reports of an algorithm. Shapes are worked out once for every number of keys.

    Args:
        aggregator: Gives the types of what is added up.
        partition: The roles of the model's leaves.
        precision: How updates are written: float32 (as they are), float16 or int8.
    """

    def __init__(self, aggregator: Aggregator, partition: Partition, precision: str = "float32"):
        if precision not in PRECISIONS:
            raise unknown("value of deploy.precision", precision, PRECISIONS)
        zero: Any = lambda like: jax.eval_shape(aggregator.zero, like)
        self._partition, self._psi, self._known = partition, PRECISIONS[precision], {}
        self._held = aggregator.held
        self._leaves = {path: zero(partition.server_shapes[path]) for path in partition.trained_paths}
        self._sums = jax.ShapeDtypeStruct((4,), zero(jax.ShapeDtypeStruct((), jnp.float32)).dtype)
        if self._psi is not take and not jnp.issubdtype(self._sums.dtype, jnp.floating):
            raise UserError(
                f"deploy.precision = {precision} rounds updates, and what is added up here are whole numbers, "
                f"which must stay as they are: use float32"
            )
        keys = 4 * sum(partition.all_keys.values())
        self.largest = (
            LARGEST_HEADER
            + keys
            + sum(each.size * each.dtype.itemsize for each in self.shapes(partition.all_keys, 2).values())
        )  # bytes of any report

    def shapes(self, num_keys: Mapping[str, int], clients: int = 1) -> Shapes:
        """The names, shapes and types of the arrays in a report with this many keys of every space, without
        the keys. `clients` is how many clients it may be the sum of."""
        held = self._held if clients > 1 else ()
        counts = (held, *(num_keys[space] for space in self._partition.spaces))
        if counts not in self._known:
            arrays = {SUMS: self._sums}
            for space in held:
                arrays[f"{HELD}{space}"] = jax.ShapeDtypeStruct((num_keys[space],), self._sums.dtype)
            for path, leaf in self._leaves.items():
                space = self._space(path)
                shape = (num_keys[space], *leaf.shape[1:]) if space else leaf.shape
                like = jax.ShapeDtypeStruct(shape, leaf.dtype)
                arrays |= (
                    {path: like}
                    if self._psi is take
                    else jax.eval_shape(lambda x, path=path: self._encoded(path, x), like)
                )
            self._known[counts] = arrays
        return self._known[counts]

    def write(
        self, belongs: About, sent: Contribution, keys: Mapping[str, np.ndarray] | None = None
    ) -> bytes:
        """Write a contribution as bytes. One that is not valid is sent without its values.

        Args:
            belongs: The task that it belongs to.
            sent: The contribution.
            keys: The keys of its rows, if the server does not know them.
        """
        if not sent.valid:
            return write_message("report", belongs, {}, {"valid": False})
        arrays = {SUMS: np.stack([np.asarray(each) for each in (sent.weight, sent.clients, *sent.loss)])}
        for path, leaf in sent.update.items():
            arrays |= self._encoded(path, leaf)
        for space, each in sent.held.items():
            arrays[f"{HELD}{space}"] = each
        for space, each in (keys or {}).items():
            arrays[f"{KEYS}{space}"] = each.astype(np.int32)
        return write_message("report", belongs, arrays, {"valid": True})

    def read(
        self, data: bytes, keys: Mapping[str, np.ndarray] | None, clients: int = 1
    ) -> tuple[Contribution, Mapping[str, np.ndarray]]:
        """Read what `write` wrote, for a client of these keys; if they are None, of those that the report names.
        `clients` is how many clients the report may be the sum of.

        Raises:
            UserError: The arrays are not those that such a report has.
        """
        if len(data) > self.largest:
            raise UserError(
                f"a report of {len(data):,} bytes is too large: here it has {self.largest:,} at most"
            )
        arrays, header = open_message("report", data)
        if header.get("valid") is not True:
            return _nothing(arrays), keys or {space: np.zeros(0, int) for space in self._partition.spaces}
        if keys is None or any(name.startswith(KEYS) for name in arrays):
            keys = _own_keys(arrays, self._partition, keys)
        check_arrays(
            "report", arrays, self.shapes({space: len(each) for space, each in keys.items()}, clients)
        )
        weight, used, *loss = arrays[SUMS]
        update = {path: self._decoded(path, arrays) for path in self._leaves}
        held = {space: arrays[f"{HELD}{space}"] for space in (self._held if clients > 1 else ())}
        return Contribution(update, weight, used, Sums(*loss), np.asarray(True), held), keys  # pyright: ignore

    def _space(self, path: str) -> str:
        role = self._partition.roles.get(path)
        return (role.space or "") if role else ""

    def _encoded(self, path: str, leaf: Any) -> dict[str, Any]:
        """A leaf's update as it is sent."""
        if self._psi is take:
            return {path: leaf}
        rows = leaf if self._space(path) else leaf[None]
        return {f"{path}:{name}": part for name, part in self._psi.encode(rows).items()}

    def _decoded(self, path: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        if self._psi is take:
            return arrays[path]
        mark = f"{path}:"
        parts = {name.removeprefix(mark): part for name, part in arrays.items() if name.startswith(mark)}
        rows = np.asarray(self._psi.decode(parts, self._leaves[path].dtype))
        return rows if self._space(path) else rows[0]


def _nothing(arrays: Mapping[str, np.ndarray]) -> Contribution:
    """What a client sends that has nothing to send."""
    if arrays:
        raise UserError("the report says that it is not valid, and has values")
    zero: Any = np.float32(0)
    return Contribution({}, zero, zero, Sums(zero, zero), np.asarray(False))  # pyright: ignore


def _own_keys(
    arrays: dict[str, np.ndarray], partition: Partition, known: Mapping[str, np.ndarray] | None
) -> dict[str, np.ndarray]:
    """The keys that a report names, which must be those that are known. They are taken out of its arrays."""
    found = {}
    for space in partition.spaces:
        each = arrays.pop(f"{KEYS}{space}", None)
        if each is None or each.ndim != 1 or each.dtype != np.int32:
            raise UserError(f"the report must have '{KEYS}{space}', the keys of its rows, as int32")
        if known is not None and not np.array_equal(known[space], each):
            raise UserError(f"the report names other keys of '{space}' than its task has")
        found[space] = each.astype(np.int64)
    return found
