"""The select function psi: what a client is sent for a key (Federated Select, eq. 4 and section 4).

A key owns a row of every leaf of its space. `take` sends the row itself. The others send fewer bytes, which
the client decodes. The client trains the decoded row, and its update is the change from the decoded row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Psi(NamedTuple):
    """How rows are sent.

    encode: rows [r, ...] -> what is sent, arrays [r, ...] by name
    decode: (what was sent, dtype) -> rows of this dtype
    bound:  rows -> the largest error of any entry, for each row [r]
    """

    name: str
    encode: Callable[[Any], Mapping[str, Any]]
    decode: Callable[[Mapping[str, Any], Any], Any]
    bound: Callable[[Any], Any]

    def received(self, rows: Any) -> Any:
        """Rows as a client sees them, after encoding and decoding."""
        return rows if self is take else self.decode(self.encode(rows), rows.dtype)

    def row_bytes(self, shape: tuple[int, ...], dtype: Any) -> int:
        """Bytes that are sent for one row of this shape."""
        parts = self.encode(jnp.zeros((1, *shape), dtype))
        return sum(int(np.prod(part.shape)) * part.dtype.itemsize for part in parts.values())


def _largest(rows: Any) -> Any:
    """The largest absolute entry of every row [r, 1, ...]."""
    return jnp.max(jnp.abs(rows), axis=tuple(range(1, rows.ndim)), keepdims=True)


def _to_int8(rows: Any) -> dict[str, Any]:
    scale = _largest(rows) * (1 / 127)  # not "/ 127": XLA divides one row and many rows in different ways
    whole = jnp.round(rows / jnp.where(scale > 0, scale, 1))
    return {"int8": whole.astype(jnp.int8), "scale": scale.astype(jnp.float32)}


take = Psi(
    "take",
    lambda rows: {"rows": rows},
    lambda parts, dtype: parts["rows"],
    lambda rows: jnp.zeros(rows.shape[0]),
)
float16 = Psi(
    "float16",
    lambda rows: {"float16": rows.astype(jnp.float16)},
    lambda parts, dtype: parts["float16"].astype(dtype),
    lambda rows: jnp.maximum(_largest(rows).reshape(-1) * 2.0**-11, 2.0**-25),
)
int8 = Psi(
    "int8",
    _to_int8,
    lambda parts, dtype: (parts["int8"] * parts["scale"]).astype(dtype),
    # a scale below the smallest normal number is flushed to 0, and the row with it
    lambda rows: jnp.maximum(_largest(rows).reshape(-1) / 127 * 0.501, 128 * jnp.finfo(jnp.float32).tiny),
)
PSIS: Mapping[str, Psi] = {psi.name: psi for psi in (take, float16, int8)}
