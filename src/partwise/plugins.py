"""Names that installed packages add to the library's own, with entry points.

A package declares in its pyproject.toml: [project.entry-points."partwise.tasks"] name = "module:ENTRY".
Nothing is imported before the name is used.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any, NamedTuple

from partwise.types import UserError, unknown


class Lazy(NamedTuple):
    """An entry of the library that is imported when it is first used. It may need an extra."""

    summary: str
    where: str  # module:NAME
    extra: str = ""  # the extra that it needs


def is_code(name: str) -> bool:
    """Whether a task's name is that of a user's own code: `module:function` (see `tasks.own_code`)."""
    return ":" in name


def find(registry: dict[str, Any], group: str, kind: str, name: str) -> Any:
    """The entry with this name, from the library or from an installed package. A package's entry is then
    added to the registry."""
    if name not in registry:
        found = {point.name: point for point in metadata.entry_points(group=group)}
        if name not in found:
            raise unknown(kind, name, [*registry, *found])
        registry[name] = _load(found[name])
    if isinstance(registry[name], Lazy):
        registry[name] = _import(kind, name, registry[name])
    return registry[name]


def names(registry: dict[str, Any], group: str) -> list[str]:
    """Every name, the library's own first; nothing is imported."""
    return list(dict.fromkeys([*registry, *(point.name for point in metadata.entry_points(group=group))]))


def find_all(registry: dict[str, Any], group: str, kind: str) -> dict[str, Any]:
    """Every entry, the library's own first. The library's entries may still be `Lazy`."""
    known = dict(registry)
    return known | {
        name: find(registry, group, kind, name) for name in names(registry, group) if name not in known
    }


def _import(kind: str, name: str, lazy: Lazy) -> Any:
    module, _, entry = lazy.where.partition(":")
    try:
        return getattr(importlib.import_module(module), entry)
    except ImportError as error:
        if not lazy.extra:
            raise
        raise UserError(
            f"the {kind} '{name}' needs a package that is not installed ({error.name}): "
            f"pip install 'partwise[{lazy.extra}]'"
        ) from None


def _load(point: metadata.EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        package = point.dist.name if point.dist else "?"
        raise UserError(
            f"'{point.name}' could not be loaded from {point.value} of the installed package {package}: {error!r}. "
            f"Mend the package or uninstall it."
        ) from error
