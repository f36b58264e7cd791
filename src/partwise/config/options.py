"""A task's own options (`data.*`): converted to the types that its `load` names, and explained."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from partwise.config.settings import to_type
from partwise.tasks import Task, keyword_options
from partwise.types import unknown


def read_options(load: Callable[..., Task], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with their values converted to the types of `load`. Names that `load` does not have are passed
    on; it refuses them."""
    known = keyword_options(load)
    return {name: _read(f"data.{name}", value, known.get(name)) for name, value in options.items()}


def _read(key: str, value: Any, about: inspect.Parameter | None) -> Any:
    kind, _ = _kind(about)
    if isinstance(kind, tuple):
        if str(value) not in kind:
            raise unknown(f"value of {key}", str(value), kind)
        return str(value)
    return to_type(key, value, kind) if kind else _literal(value)


def _kind(about: inspect.Parameter | None) -> tuple[str | tuple[str, ...], str]:
    """(type in words for `to_type`, or the values to choose from, or "" if unknown; meaning)."""
    wanted, meaning = about.annotation if about else Any, ""
    if typing.get_origin(wanted) is typing.Annotated:
        wanted, meaning = typing.get_args(wanted)[:2]
    if typing.get_origin(wanted) is typing.Literal:
        return tuple(map(str, typing.get_args(wanted))), str(meaning)
    parts = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    names = ["None" if part is type(None) else getattr(part, "__name__", "") for part in parts]
    simple = all(name in ("bool", "int", "float", "str", "None") for name in names)
    return " | ".join(names) if simple else "", str(meaning)


def _literal(value: Any) -> Any:
    """Text as the number or truth value that it looks like."""
    if not isinstance(value, str):
        return value
    for read in (int, float):
        try:
            return read(value)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(value.lower(), value)


def explain_options(load: Callable[..., Task]) -> list[tuple[str, Any, str]]:
    """(dotted key, default, meaning) of every option of a task."""
    lines = []
    for name, about in keyword_options(load).items():
        kind, meaning = _kind(about)
        if isinstance(kind, tuple):
            meaning += f": {', '.join(kind)}"
        lines.append((f"data.{name}", about.default, meaning))
    return lines
