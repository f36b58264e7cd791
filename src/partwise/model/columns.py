"""The batch that a model's functions are given: a dict of columns with a clear error for a missing column."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from partwise.types import UserError


@jax.tree_util.register_pytree_with_keys_class
class Columns(dict[str, Any]):
    """A dict that raises `UserError`, with the names of all columns, if a key is missing."""

    def __missing__(self, name: str) -> Any:
        here = ", ".join(sorted(self)) or "none"
        raise UserError(
            f"the model reads the column '{name}', and the examples that it is given have only: {here}. Name it "
            f"among the columns of the setting, as in Setting(model, roles, ({_listed([*sorted(self), name])})), "
            f"and see that the data has it; a client on its own needs it in its table"
        )

    def tree_flatten_with_keys(self) -> tuple[Iterable[tuple[Any, Any]], tuple[str, ...]]:
        names = tuple(sorted(self))
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Iterable[Any]) -> Columns:
        return cls(zip(names, values, strict=True))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
