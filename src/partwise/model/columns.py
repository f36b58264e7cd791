"""The batch that a model's functions are given: a dict of columns with a clear error for a missing column, and
the batch's mask for losses in which examples see each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from partwise.types import UserError

MASK = "mask"  # the name under which a batch has its mask, unless the data has a column of this name


@jax.tree_util.register_pytree_with_keys_class
class Columns(dict[str, Any]):
    """A dict that raises `UserError`, with the names of all columns, if a key is missing.

    `batch["mask"]` [B] says which examples of a batch are real and not padding. It is no column: what goes over all
    columns does not meet it. A column of the data that has this name comes first.
    """

    mask: Any = None

    def __missing__(self, name: str) -> Any:
        if name == MASK and self.mask is not None:
            return self.mask
        here = ", ".join(sorted(self)) or "none"
        raise UserError(
            f"the model reads the column '{name}', and the examples that it is given have only: {here}. Name it "
            f"among the columns of the setting, as in Setting(model, roles, ({_listed([*sorted(self), name])})), "
            f"and see that the data has it; a client on its own needs it in its table"
        )

    def tree_flatten_with_keys(self) -> tuple[Iterable[tuple[Any, Any]], tuple[str, ...]]:
        names = tuple(sorted(self))
        children = [(jax.tree_util.DictKey(name), self[name]) for name in names]
        return [*children, (jax.tree_util.GetAttrKey(MASK), self.mask)], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Iterable[Any]) -> Columns:
        *columns, mask = values
        return masked(dict(zip(names, columns, strict=True)), mask)


def masked(columns: Mapping[str, Any], mask: Any) -> Columns:
    """These columns as a batch with this mask."""
    batch = Columns(columns)
    batch.mask = mask
    return batch


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
