"""The roles of a model's leaves: shared, keyed, local or frozen, and how a leaf is stored in its role.

The server stores keyed leaves with the key axis first ("rows"). So every gather and scatter of the library is
along axis 0. `from_rows` moves the axis back before a model sees the leaf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax.numpy as jnp

from partwise.model.psi import PSIS, Psi, take
from partwise.types import UserError, unknown

Initial = Literal["random", "zero", "learned"]
Twin = Literal["add", "average"]


@dataclass(frozen=True)
class Role:
    """How the server and the clients treat one leaf. Made by `shared`, `keyed`, `local` and `frozen` below."""

    kind: Literal["shared", "keyed", "local", "frozen"]
    space: str = ""
    axis: int = 0
    initial: Initial = "random"
    twin: Twin | None = None
    block: int = 1
    interleaved: bool = False
    whole: bool = False
    summed: bool = False
    trained: bool = True
    fill: float = 0.0
    psi: Psi = take
    there: bool = False

    def __str__(self) -> str:
        if self.kind == "keyed":
            given = {"axis": self.axis, "block": self.block, "trained": self.trained, "psi": self.psi.name}
            plain = {"axis": 0, "block": 1, "trained": True, "psi": "take"}
            return (
                ", ".join([f"keyed({self.space}", *(f"{k}={v}" for k, v in given.items() if v != plain[k])])
                + ")"
            )
        if self.kind == "local" and self.initial != "random":
            return f"local(initial={self.initial})"
        if self.there:
            return "frozen(there=True)"
        return f"shared(twin={self.twin})" if self.twin else self.kind


def shared(twin: Twin | None = None) -> Role:
    """A role: sent to all clients, trained by all clients.

    Args:
        twin: "add" or "average" also gives every client a local leaf of the same shape. It is added to the
            shared leaf or averaged with it (the patent's overlapping parts). Its initial value changes
            nothing.
    """
    if twin not in (None, *get_args(Twin)):
        raise unknown("twin of a shared parameter", twin, get_args(Twin))
    return Role("shared", twin=twin)


def keyed(
    space: str,
    axis: int = 0,
    *,
    block: int = 1,
    interleaved: bool = False,
    whole: bool = False,
    summed: bool = False,
    trained: bool = True,
    fill: float = 0.0,
    psi: Psi | str = take,
) -> Role:
    """A role: a client is sent, and trains, only the slices of its keys.

    Args:
        space: The key space. Leaves of one space are cut by the same keys. The keys are in the column of the
            examples with this name, unless `partition(..., columns=...)` names other columns.
        axis: The axis along which the leaf is cut.
        block: How many entries along the axis belong to one key. They are neighbours (many words in one
            bucket), or every K-th entry if `interleaved` (the inputs of a layer after flattened filters).
        interleaved: See `block`.
        whole: Whether the loss depends on all of a client's slice, not only on the entries that its examples
            name (outputs of a softmax). A space without columns is always treated so.
        summed: Whether a model uses nothing but the sum of an example's rows, as `bag` does. A step then takes one
            row for an example, which is that sum, and the example's ids become one id.
        trained: Whether clients train the leaf. If not, its rows are constants (the genres of a movie): clients are
            sent those of their keys, and nothing changes them.
        fill: The value of padding, for clients with fewer keys than the largest (a bias of -1e9 before a
            softmax).
        psi: What is sent for a key: "take" (the values), "float16", "int8", or a Psi of your own.
    """
    if isinstance(psi, str):
        if psi not in PSIS:
            raise UserError(f"psi must be one of {', '.join(PSIS)} or a Psi, not '{psi}'")
        psi = PSIS[psi]
    if block < 1:
        raise UserError(f"a key owns at least one entry of an axis, not block={block}")
    return Role(
        "keyed",
        space=space,
        axis=axis,
        block=block,
        interleaved=interleaved,
        whole=whole,
        summed=summed,
        trained=trained,
        fill=fill,
        psi=psi,
    )


def local(initial: Initial = "random") -> Role:
    """A role: never leaves the client.

    Args:
        initial: The initial value: the model's own value ("random"), zero ("zero"), or a default that the
            clients learn together ("learned"; FedRecon, footnote 2).
    """
    if initial not in get_args(Initial):
        raise unknown("initial value of a local parameter", initial, get_args(Initial))
    return Role("local", initial=initial)


def frozen(there: bool = False) -> Role:
    """A role: sent to all clients in every round, never trained.

    Args:
        there: Whether clients have the leaf already, because it came with the program. It is then not sent: a
            client takes it from its own model, whose `init` must make it, always with the same values.
    """
    return Role("frozen", there=there)


def to_rows(role: Role, leaf: Any) -> Any:
    """A keyed leaf with one row per key: [keys, ...], or [keys, block, ...]."""
    leaf = jnp.moveaxis(leaf, role.axis, 0)
    if role.block == 1:
        return leaf
    keys, rest = leaf.shape[0] // role.block, leaf.shape[1:]
    if role.interleaved:
        return jnp.swapaxes(leaf.reshape(role.block, keys, *rest), 0, 1)
    return leaf.reshape(keys, role.block, *rest)


def from_rows(role: Role, rows: Any) -> Any:
    """Rows as the leaf that a model sees. The inverse of `to_rows`."""
    if role.block > 1:
        rows = jnp.swapaxes(rows, 0, 1) if role.interleaved else rows
        rows = rows.reshape(-1, *rows.shape[2:])
    return jnp.moveaxis(rows, 0, role.axis)


def neutral_twin(role: Role, leaf: Any) -> Any:
    """The twin that changes nothing: zero for "add", the shared value itself for "average"."""
    return jnp.zeros_like(leaf) if role.twin == "add" else leaf
