"""Parts from text and tables, and back: what `--set`, TOML files and records are read and written by."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import tomli_w

from partwise.parts.declare import FieldType, Part, declarations, find, kind_name, names
from partwise.types import UserError

NAME = "part"  # the key of a table that says which part it is
Some = TypeVar("Some", bound=Part)


def assignments(given: Sequence[str]) -> dict[str, str]:
    """`["a.b=1", ...]` as {dotted name: text}."""
    pairs = [each.partition("=") for each in given]
    for each, (name, sign, _) in zip(given, pairs, strict=True):
        if not sign or not name.strip():
            raise UserError(f"--set takes name=value, not '{each}'")
    return {name.strip(): value.strip() for name, _, value in pairs}


def changed(base: Some, settings: Mapping[str, Any], lenient: bool = False) -> Some:
    """A part with settings changed.

    Args:
        base: The part.
        settings: {"reconstruct": "solve", "reconstruct.l2": 0.5} in any order, or nested tables. Values are text,
            numbers or parts.
        lenient: Whether settings that the part lacks are left out.
    """
    return _Filling(lenient).filled(type(base), nested(settings), "", base)


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as tables. A name with a value and with names below it names a part: both `a = "solve"` and
    `a.l2 = 1` are {"a": {"part": "solve", "l2": 1}}."""
    root: dict[str, Any] = {}
    for dotted, value in settings.items():
        *way, last = dotted.split(".")
        table = root
        for word in way:
            inner = table.get(word, {})
            table[word] = table = inner if isinstance(inner, dict) else {NAME: inner}
        value = nested(value) if isinstance(value, Mapping) else value
        if isinstance(table.get(last), dict):
            table[last] |= value if isinstance(value, dict) else {NAME: value}
        elif isinstance(value, dict) and last in table:
            table[last] = {NAME: table[last], **value}
        else:
            table[last] = value
    return root


class _Filling(NamedTuple):
    lenient: bool

    def filled(
        self, cls: Any, table: Mapping[str, Any], at: str, base: Part | None, beside: Iterable[str] = ()
    ) -> Any:
        """A part of this class: the values of `base` if it has this class, else defaults, and those of the table.
        `beside` are names of the part around it that may have been meant."""
        fields = declarations(cls)
        values = {name: getattr(base, name) for name in fields} if type(base) is cls else {}
        for name, value in _in_full(cls, fields, table).items():
            here = f"{at}{name}"
            if name not in fields:
                if self.lenient:
                    continue
                raise _unknown(cls, name, at, beside)
            about = fields[name]
            before = values.get(name, about.default)
            if about.sort == "choice":
                around = fields if name == cls.MAIN else ()
                values[name] = self.part(about, value, here, before, around)
            elif about.sort == "choices":
                values[name] = self.parts(about, value, here, before)
            elif isinstance(value, Mapping):
                raise UserError(f"'{here}' is a value and has no '{next(iter(value))}'")
            else:
                values[name] = about.read(value, here)
        try:
            return cls(**values)
        except UserError as error:  # of `validate`: each value is checked already
            raise UserError(f"{at.rstrip('.')}: {error}" if at else str(error)) from None

    def parts(self, about: FieldType, value: Any, at: str, base: Mapping[str, Part]) -> dict[str, Part]:
        """Parts by name, with those of a table changed or added."""
        if not isinstance(value, Mapping):
            kinds = "|".join(names(about.kind))
            raise UserError(f"'{at}' has parts by name: give one of them, {at}.NAME={kinds}")
        none = FieldType(about.declared._replace(sort="choice"), about.kind, (), True, None)
        found = {name: self.part(none, each, f"{at}.{name}", base.get(name)) for name, each in value.items()}
        return {name: each for name, each in {**base, **found}.items() if each is not None}

    def part(self, about: FieldType, value: Any, at: str, base: Any, beside: Iterable[str] = ()) -> Any:
        """A part for a field: of a name, of a table with or without a name, or as it is given."""
        if about.none and str(value).lower() == "none":
            return None
        if not isinstance(value, Mapping):
            value = {NAME: value}
        named, rest = value.get(NAME), {name: x for name, x in value.items() if name != NAME}
        kind = about.kind
        if isinstance(named, about.kind):  # an object, and settings that change it
            return self.filled(type(named), rest, f"{at}.", named, beside)
        main = _class(base, kind).MAIN
        if isinstance(named, str) and (not main or _is_name(kind, named)):
            return self.filled(find(kind, named), rest, f"{at}.", base, beside)
        if NAME in value and not main:
            return about.checked(named, at)
        if NAME in value:  # a value of the part's main field
            given = {**rest, main: named} if main not in rest else {**rest, main: {**rest[main], NAME: named}}
            return self.filled(_class(base, kind), given, f"{at}.", base, beside)
        if base is None and not dataclasses.is_dataclass(kind):
            raise UserError(f"'{at}' is none: choose one first, {at}={'|'.join(names(kind))}")
        return self.filled(_class(base, kind), rest, f"{at}.", base, beside)


def _class(base: Any, kind: Any) -> Any:
    return type(base) if base is not None else kind


def _is_name(kind: type[Part], name: str) -> bool:
    """Whether a text names a part of the kind, not a value of the main field of the one that there is."""
    return name in names(kind) or (":" in name and not dataclasses.is_dataclass(kind))


def _in_full(cls: Any, fields: Mapping[str, FieldType], table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with what is no field of this part, but of the one in its main field, put there."""
    main = cls.MAIN
    if not main or fields[main].sort != "choice":
        return dict(table)
    moved = {name: value for name, value in table.items() if name not in fields}
    if not moved:
        return dict(table)
    inner = table.get(main, {})
    rest = {name: value for name, value in table.items() if name not in moved}
    return {**rest, main: {**(inner if isinstance(inner, Mapping) else {NAME: inner}), **moved}}


def _unknown(cls: Any, name: str, at: str, beside: Iterable[str]) -> UserError:
    """solve has no learning_rate (steps has optimizer.learning_rate); solve has: l2"""
    kinds = [kind for kind in cls.__mro__ if "_known" in vars(kind)]
    others = {each._name: each for kind in kinds for each in kind._known.values() if isinstance(each, type)}
    own, where = [each.name for each in listing(cls)], []
    for each in others.values():
        inner = [x.name for x in listing(each) if x.name.split(".")[-1] == name] if each is not cls else []
        where += [each._name + (" has" if inner[0] == name else f" has {inner[0]}")] if inner else []
    near = [n for n in own if n.split(".")[-1] == name] or difflib.get_close_matches(
        name, [*own, *beside], 1, 0.6
    )
    hint = f" (nearest: {near[0]})" if near else f" ({', '.join(where)})" if where else ""
    has = ", ".join(declarations(cls)) or "no settings"
    return UserError(
        f"{at.rstrip('.') + ': ' if at else ''}{cls._name} has no {name}{hint}; {cls._name} has: {has}"
    )


class Listed(NamedTuple):
    """A setting of a part: its dotted name, its value (of a part its name), and its declaration."""

    name: str
    value: Any
    about: FieldType

    @property
    def meaning(self) -> str:
        """What it is, and what it may be."""
        words = self.about.words or (
            names(self.about.kind) if self.about.sort in ("choice", "choices") else ()
        )
        return self.about.declared.meaning + (f": {', '.join(words)}" if len(words) > 1 else "")


def listing(of: Any, at: str = "") -> Iterator[Listed]:
    """Every setting of a part, or of a class with its defaults."""
    for name, about in declarations(of if isinstance(of, type) else type(of)).items():
        value = about.default if isinstance(of, type) else getattr(of, name)
        here = f"{at}{name}"
        if about.sort == "choices":
            for key, each in value.items():
                yield from _listed(each, about, f"{here}.{key}")
        elif about.sort == "choice":
            yield from _listed(value, about, here)
        else:
            yield Listed(here, value, about)


def _listed(value: Part | None, about: FieldType, at: str) -> Iterator[Listed]:
    if value is None or len(names(about.kind)) > 1:
        yield Listed(at, value and value._name, about)
    if value is not None:
        yield from listing(value, f"{at}.")


def flat(of: Any) -> dict[str, Any]:
    """{dotted name: value} of every setting of a part."""
    return {each.name: plain(each.value) for each in listing(of)}


def plain(value: Any) -> Any:
    """A value for TOML and JSON. Neither has None in the form that is wanted; "none" is read as None."""
    if hasattr(value, "dtype"):
        return float(str(value)) if value.ndim == 0 else value.tolist()
    return list(value) if isinstance(value, tuple) else "none" if value is None else value


def tables(of: Part, keep: Callable[[FieldType, Any], bool] = lambda about, value: True) -> dict[str, Any]:
    """Nested tables, for TOML, of the fields to `keep`."""
    found: dict[str, Any] = {}
    for name, about in declarations(type(of)).items():
        value = getattr(of, name)
        if not keep(about, value):
            continue
        if about.sort == "choices":
            found[name] = {key: _table(about, each, keep) for key, each in value.items()}
        else:
            found[name] = _table(about, value, keep) if isinstance(value, Part) else plain(value)
    return found


def _table(about: FieldType, value: Part, keep: Callable[[FieldType, Any], bool]) -> dict[str, Any]:
    named = {NAME: value._name} if len(names(about.kind)) > 1 or value._name not in about.kind._known else {}
    return named | tables(value, keep)


def to_toml(of: Part) -> str:
    """A part as a TOML document."""
    return tomli_w.dumps(tables(of))


def from_toml(cls: type[Some], document: str) -> Some:
    """A part from a TOML document."""
    try:
        return _Filling(False).filled(cls, nested(tomllib.loads(document)), "", None)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"this is no TOML: {error}") from None


def digest(of: Part) -> str:
    """A digest of what makes two runs different ones. Fields at their default do not count, so that a new field
    does not change the digests of runs without it."""
    told = tables(of, lambda about, value: about.declared.identity and value != about.default)
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def differences(one: Part, other: Part) -> list[tuple[str, Any, Any]]:
    """(dotted name, value, value) of what differs; "-" where a part has no such setting."""
    a, b = flat(one), flat(other)
    return [
        (n, a.get(n, "-"), b.get(n, "-")) for n in dict.fromkeys([*a, *b]) if a.get(n, "-") != b.get(n, "-")
    ]


def fixed_differences(before: Part, now: Part, may: Callable[[FieldType], bool]) -> list[str]:
    """The dotted names of what differs and may not. `may` says of a declaration whether it may."""
    if type(before) is not type(now):
        return [kind_name(type(now))]
    found = []
    for name, about in declarations(type(now)).items():
        one, other = getattr(before, name), getattr(now, name)
        if may(about) or one == other:
            continue
        deeper = isinstance(one, Part) and type(one) is type(other)
        found += [f"{name}.{each}" for each in fixed_differences(one, other, may)] if deeper else [name]
    return found


def schema(cls: Any) -> dict[str, Any]:
    """The JSON schema of a part's TOML document, for editors."""
    found = {name: _schema(about) for name, about in declarations(cls).items()}
    return {
        "type": "object",
        "description": _summary(cls),
        "properties": found,
        "additionalProperties": False,
    }


TYPES = {"flag": "boolean", "whole": "integer", "rate": "number", "number": "number", "text": "string"}


def _schema(about: FieldType) -> dict[str, Any]:
    said: dict[str, Any] = {"description": about.declared.meaning}
    if about.sort in ("choice", "choices"):
        options = []
        for name in names(about.kind):
            one = schema(find(about.kind, name))
            one["properties"] = {NAME: {"const": name}} | one["properties"]
            options += [{"const": name}, one]
        either = {"anyOf": options + ([{"const": "none"}] if about.none else [])}
        return said | (
            {"type": "object", "additionalProperties": either} if about.sort == "choices" else either
        )
    if about.sort == "numbers":
        return said | {"type": "array", "items": {"type": "number"}}
    limits = (
        {}
        if about.declared.least is None
        else {"minimum": about.declared.least, "maximum": about.declared.most}
    )
    value = {"enum": list(about.words)} if about.words else {"type": TYPES[about.sort]} | limits
    return (
        said
        | ({"anyOf": [value, {"const": "none"}]} if about.none else value)
        | {"default": plain(about.default)}
    )


def _summary(cls: Any) -> str:
    return (cls.__doc__ or "").strip().partition("\n")[0]
