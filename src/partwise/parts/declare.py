"""Declaring parts: their fields, the limits of these, and how JAX sees them.

    class Reconstruct(Part):            a kind: what one can choose for a field
        def __call__(self, ...): ...

    @part("solve")
    class Solve(Reconstruct):           one of its parts, by its name
        l2: float = rate(0.5, "strength of the pull towards the default")

A field's declaration is the only place that says what a setting means, which values it takes and where it matters.
Rates are leaves of a pytree, so that compiled programs take them as values. Everything else is static and decides
what is compiled. Parts of a `static` kind have no rates. They are no pytrees, and need no JAX.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
import typing
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar, dataclass_transform

from partwise.types import UserError, unknown

LARGEST = 1e30  # the largest rate: far beyond practical use, and still a float32
WORDS = {
    "flag": "true or false",
    "whole": "a whole number",
    "rate": "a number",
    "number": "a number",
    "numbers": "numbers with commas between them",
    "text": "text",
}


class Declared(NamedTuple):
    """The declaration of a field.

    sort:     rate (a leaf), number, whole, flag, text, numbers, choice (another part) or choices (parts by name)
    meaning:  what it is, for lists of settings
    least:    the smallest value of a number, and `most` the largest
    resume:   whether a resumed run may change it
    identity: whether runs that differ in it are different runs
    where:    "deployment" if only a deployed run has it
    """

    sort: str
    meaning: str
    least: float | None = None
    most: float | None = None
    resume: bool = False
    identity: bool = True
    where: str = ""


def _field(default: Any, *about: Any, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"declared": Declared(*about, **more)})


# These return Any and are no `field_specifiers`: type checkers take `x: float = rate(0.5, ...)` for a default.
def rate(default: float | None, meaning: str, least: float = 0.0, most: float = LARGEST, **more: Any) -> Any:
    """A number that a compiled program takes as a value. None, if the type allows it, leaves its term out of the
    program; a rate of 0 does not."""
    return _field(default, "rate", meaning, least, most, **more)


def number(default: float | None, meaning: str, least: float, most: float, **more: Any) -> Any:
    """A number that is a constant of the compiled program."""
    return _field(default, "number", meaning, least, most, **more)


def whole(default: int | None, meaning: str, least: int, most: int, **more: Any) -> Any:
    """A whole number."""
    return _field(default, "whole", meaning, least, most, **more)


def flag(default: bool, meaning: str, **more: Any) -> Any:
    """True or false."""
    return _field(default, "flag", meaning, **more)


def text(default: str, meaning: str, **more: Any) -> Any:
    """Text; if the type is a `Literal`, one of its values."""
    return _field(default, "text", meaning, **more)


def numbers(default: tuple[float, ...], meaning: str, least: float, most: float, **more: Any) -> Any:
    """A tuple of numbers."""
    return _field(default, "numbers", meaning, least, most, **more)


def choice(default: Any, meaning: str, **more: Any) -> Any:
    """Another part, of the kind that the field's type names."""
    return _field(default, "choice", meaning, **more)


def choices(meaning: str, **more: Any) -> Any:
    """Parts by name, of the kind that the field's type `Mapping[str, Kind]` names. By default there are none."""
    declared = {"declared": Declared("choices", meaning, **more)}
    return dataclasses.field(default_factory=dict, metadata=declared)


class Part:
    """The base of all parts. A direct subclass is a kind. Classes decorated with `part` are what one can choose.

    A kind may have keywords: `static` if its parts have no rates, `lazily={"name": "module:Class"}` for parts
    that are imported when they are used, `group` for the entry points by which installed packages add parts.
    `MAIN` names the field that is meant if a value is given for the part itself: `cohort = 100`.
    """

    MAIN: ClassVar[str] = ""
    _name: ClassVar[str]
    _static: ClassVar[bool] = False
    _group: ClassVar[str] = ""
    _known: ClassVar[dict[str, type[Part] | str]]  # of a kind: its parts by name, or "module:Class"

    def __init_subclass__(
        cls, *, static: bool = False, lazily: Mapping[str, str] | None = None, group: str = "", **more: Any
    ):
        super().__init_subclass__(**more)
        if Part in cls.__bases__ and not any("_known" in vars(base) for base in cls.__mro__[1:]):
            cls._known, cls._static, cls._group = dict(lazily or {}), static, group

    def __post_init__(self) -> None:
        for name, about in declarations(type(self)).items():
            object.__setattr__(self, name, about.checked(getattr(self, name), f"{type(self)._name}.{name}"))
        self.validate()

    def validate(self) -> None:
        """Raise `UserError` if fields do not fit each other."""

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, name), getattr(other, name)) for name in declarations(type(self)))

    def __hash__(self) -> int:
        values = (getattr(self, name) for name in declarations(type(self)))
        return hash((type(self), *(tuple(x.items()) if isinstance(x, Mapping) else x for x in values)))


def _same(a: Any, b: Any) -> bool:
    if a is b or isinstance(a, Part | Mapping | tuple | float | int | str | None):
        return bool(a is b or a == b)
    import numpy as np  # rates may be arrays: of runs side by side

    return np.array_equal(a, b)


class FieldType(NamedTuple):
    """A declaration with what its type says: the kind of parts or the words to choose from, and whether None is
    one."""

    declared: Declared
    kind: Any
    words: tuple[str, ...]
    none: bool
    default: Any

    @property
    def sort(self) -> str:
        return self.declared.sort

    def checked(self, value: Any, at: str) -> Any:
        """The value in its type, within its limits. Arrays and tracers pass as rates, because JAX makes parts of
        them."""
        if value is None:
            return None if self.none else self._refuse(value, at)
        if self.sort == "choice":
            return value if isinstance(value, self.kind) else self._refuse(value, at, a(self.kind))
        if self.sort == "choices":
            wrong = [each for each in value.values() if not isinstance(each, self.kind)]
            return self._refuse(wrong[0], at, f"parts by name, each {a(self.kind)}") if wrong else dict(value)
        if self.sort == "text":
            if isinstance(value, str) and (not self.words or value in self.words):
                return value
            raise (
                unknown(f"value of {at}", str(value), self.words) if self.words else self._refused(value, at)
            )
        if self.sort == "flag":
            return value if isinstance(value, bool) else self._refuse(value, at)
        if self.sort == "numbers":
            return tuple(self._number(each, at) for each in value)
        if self.sort == "rate" and hasattr(value, "dtype") and not isinstance(value, float):
            return value
        return self._number(value, at)

    def _number(self, value: Any, at: str) -> int | float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse(value, at)
        if not math.isfinite(value) or (self.sort == "whole" and value % 1):
            self._refuse(value, at)
        least, most = self.declared.least, self.declared.most
        if least is not None and most is not None and not least <= value <= most:
            raise UserError(f"'{at}' must be between {_shown(least)} and {_shown(most)}, not {value}")
        return int(value) if self.sort == "whole" else float(value)  # an int as a rate would be compiled anew

    def read(self, value: Any, at: str) -> Any:
        """`checked`, of text."""
        if not isinstance(value, str) or self.sort in ("text", "choice", "choices"):
            return self.checked(list(value) if self.sort == "numbers" else value, at)
        low = value.strip().lower()
        if low == "none" and self.none:
            return None
        try:
            if self.sort == "flag":
                return self.checked({"true": True, "false": False}[low], at)
            if self.sort == "numbers":
                return self.checked([_of_text(each) for each in low.split(",") if each.strip()], at)
            return self.checked(_of_text(low), at)
        except (KeyError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise self._refused(value, at) from None

    def _refused(self, value: Any, at: str, wanted: str = "") -> UserError:
        wanted = wanted or WORDS[self.sort]
        finite = " that is finite" if isinstance(value, float) and not math.isfinite(value) else ""
        shown = value._name if isinstance(value, Part) else repr(value)
        return UserError(f"'{at}' must be {wanted}{finite}{' or none' if self.none else ''}, not {shown}")

    def _refuse(self, value: Any, at: str, wanted: str = "") -> NoReturn:
        raise self._refused(value, at, wanted)


def _of_text(text: str) -> int | float:
    text = text.strip()
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def _shown(value: float) -> str:
    """Whole numbers in full, and others in short form."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


@cache
def declarations(cls: type[Part]) -> dict[str, FieldType]:
    """The fields of a part, with what their types say."""
    try:
        hints, found = typing.get_type_hints(cls), {}
    except NameError as error:  # postponed annotations are looked up in the module
        raise TypeError(
            f"{cls.__name__}: define {error.name} at the top of a module, not in a function"
        ) from error
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        declared, hint = field.metadata["declared"], hints[field.name]
        if declared.sort == "choices":
            found[field.name] = FieldType(declared, typing.get_args(hint)[1], (), False, {})
            continue
        literal = typing.get_origin(hint) is typing.Literal
        union = typing.get_args(hint) if typing.get_args(hint) and not literal else (hint,)
        kinds = [each for each in union if each is not type(None)]
        words = typing.get_args(kinds[0]) if typing.get_origin(kinds[0]) is typing.Literal else ()
        found[field.name] = FieldType(declared, kinds[0], words, type(None) in union, field.default)
    return found


Cls = TypeVar("Cls", bound=type)


@dataclass_transform(frozen_default=True, eq_default=False)
def part(name: str = "") -> Callable[[Cls], Cls]:
    """Make a class a part: a frozen dataclass, known to its kinds by its name; a pytree unless its kind is static.

    Without a name it is known as module:Class, which is how a part in a user's own file is recorded.
    """

    def make(cls: Any) -> Any:
        cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
        sorts = {}
        for field in dataclasses.fields(cls):
            if "declared" not in field.metadata or field.name == "part":
                raise TypeError(
                    f"{cls.__name__}.{field.name} needs a declaration (rate, whole, ...), and not the name part"
                )
            sorts[field.name] = field.metadata["declared"].sort
        if cls._static and "rate" in sorts.values():
            raise TypeError(
                f"{cls.__name__} has a rate, and parts of its kind are static: declare it as a number"
            )
        cls._name = name or f"{_module_of(cls)}:{cls.__qualname__}"
        for kind in cls.__mro__:
            if "_known" in vars(kind):
                kind._known[cls._name] = cls
        if not cls._static:
            _register(cls, sorts)
        return cls

    return make


def _module_of(cls: type) -> str:
    """The module by which another process finds a class; for a script that is run, the name of its file."""
    if cls.__module__ != "__main__":
        return cls.__module__
    return Path(getattr(sys.modules["__main__"], "__file__", "") or "__main__").stem


def _register(cls: Any, sorts: Mapping[str, str]) -> None:
    """Rates and parts with rates are children; the rest is static. Not by `register_dataclass`, which calls
    `__init__`: JAX also puts tracers, axes and gradients where rates are, and these need not be within limits."""
    from jax.tree_util import GetAttrKey, register_pytree_with_keys

    def is_child(of: Any, name: str) -> bool:
        value = of.__dict__[name]
        if sorts[name] in ("choice", "choices"):
            some = next(iter(value.values()), None) if isinstance(value, dict) else value
            return not (isinstance(some, Part) and type(some)._static)
        return sorts[name] == "rate"

    def parts(of: Any) -> tuple[list[str], tuple]:
        inner = [name for name in sorts if is_child(of, name)]
        rest = tuple((name, _frozen(of.__dict__[name])) for name in sorts if name not in inner)
        return inner, (tuple(inner), rest)

    def flatten(of: Any) -> tuple[Any, Any]:
        inner, about = parts(of)
        return tuple(of.__dict__[name] for name in inner), about

    def flatten_with_keys(of: Any) -> tuple[Any, Any]:
        inner, about = parts(of)
        return tuple((GetAttrKey(name), of.__dict__[name]) for name in inner), about

    def unflatten(about: Any, values: Any) -> Any:
        made, (inner, rest) = object.__new__(cls), about
        found = {name: dict(x) if isinstance(x, _Items) else x for name, x in rest}
        made.__dict__.update(zip(inner, values, strict=True), **found)
        return made

    register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


class _Items(tuple):
    """A mapping that can be hashed."""


def _frozen(value: Any) -> Any:
    return _Items(value.items()) if isinstance(value, dict) else value


def kind_name(kind: type) -> str:
    """The name of a kind in words."""
    return "".join(f" {c.lower()}" if c.isupper() else c for c in kind.__name__).strip()


def a(kind: type) -> str:
    """The name of a kind with its article."""
    name = kind_name(kind)
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def names(kind: type[Part]) -> list[str]:
    """The names of a kind's parts, its own first. Nothing is imported."""
    added = metadata.entry_points(group=kind._group) if kind._group else ()
    own = [name for name in kind._known if ":" not in name]
    return list(dict.fromkeys([*own, *(point.name for point in added)]))


def find(kind: type[Part], name: str) -> type[Part]:
    """The part of a kind by its name, or by module:Class for one in a user's file."""
    found = kind._known.get(name)
    if found is None and kind._group:
        found = next(
            (point.value for point in metadata.entry_points(group=kind._group) if point.name == name), None
        )
    if found is None and ":" in name:
        found = name
    if isinstance(found, str):
        found = _imported(kind, name, found)
    if found is None:
        raise unknown(kind_name(kind), name, names(kind))
    if not (isinstance(found, type) and issubclass(found, kind) and dataclasses.is_dataclass(found)):
        raise UserError(
            f"'{name}' is not {a(kind)}: it must be a class with @part that extends {kind.__name__}"
        )
    return found


def _imported(kind: type[Part], name: str, where: str) -> Any:
    module, _, attribute = where.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"the {kind_name(kind)} '{name}' could not be imported: {error}") from error


def rates_of(tree: Any) -> dict[str, Any]:
    """The rates of a part by their dotted names: its leaves."""
    from jax.tree_util import tree_leaves_with_path

    return {".".join(_word(key) for key in path): leaf for path, leaf in tree_leaves_with_path(tree)}


def with_rates(tree: Any, rates: Mapping[str, Any]) -> Any:
    """The part with other rates, which are not checked: they may be traced, or stacked."""
    from jax.tree_util import tree_map_with_path

    at = lambda path: ".".join(_word(key) for key in path)
    return tree_map_with_path(lambda path, leaf: rates.get(at(path), leaf), tree)


def _word(key: Any) -> str:
    return str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))))
