"""Text from a user into one nested configuration with dotted keys.

A configuration is made of defaults (`config.sections`), changed by the task's settings (or those of one of its
presets), by a TOML file and by `--set dotted.key=value`, in that order.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from partwise.config.sections import (
    MOST_ROUNDS,
    CohortConfig,
    DeployConfig,
    EvaluationConfig,
    FineTuneConfig,
    KeepConfig,
    PrivacyConfig,
    ReconstructConfig,
    ServerConfig,
    ServingConfig,
    SimulationConfig,
    SplitConfig,
    StopConfig,
    UpdateConfig,
    setting,
)
from partwise.types import Limits, UserError


class Own(NamedTuple):
    """A setting that only one algorithm has: its default, which also gives its type, its meaning, and for a
    number its limits."""

    default: Any
    meaning: str
    limits: Limits | None = None

    def read(self, key: str, value: Any) -> Any:
        """Convert `value` to the setting's type and check its limits."""
        found = to_type(key, value, type(self.default).__name__)
        if self.limits is not None:
            self.limits.check(key, found)
        return found


# Settings that came after version 0.1. Runs of that version do not name them; they have the values that these have
# if nobody says otherwise.
LATER = ("update.schedule", "reconstruct.schedule", "stop.", "keep.", "update.begin", "split.count")
LATER += ("evaluation_split.count", "update.precision", "simulation.tables")
SELECT = (
    "keys that a client asks for: own, all, or a number of keys as in top:1000 (sample, sample_top, random, same; "
    "with_random: own ones and so many others); of device classes with their shares: top:1000@0.8,100@0.2. Unsaid: "
    "own, or all where the loss looks at the whole slice"
)
UNSAID = {"SPACE": "own or all"}  # for a key space that is not in `select`


@dataclass(frozen=True)
class Config:
    """Everything about a run.

    `data` has the task's own options. `select` says for each key space which keys a client asks for (see
    selection.choose). `own` has the values of the settings that only this algorithm has, by dotted key, and
    `declared` describes them.
    """

    task: str = setting("planted", "a name from `partwise tasks`")
    algorithm: str = setting("fed_recon", "a name from `partwise algorithms`")
    rounds: int = setting(500, "rounds of the run", 1, MOST_ROUNDS)
    seed: int = setting(
        0, "what the randomness of training comes from; the data has seeds of its own", 0, 2**32 - 1
    )
    data: Mapping[str, Any] = field(default_factory=dict)
    cohort: CohortConfig = field(default_factory=CohortConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    evaluation_split: SplitConfig = field(default_factory=lambda: SplitConfig("same"))
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    reconstruct: ReconstructConfig = field(default_factory=ReconstructConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    fine_tune: FineTuneConfig = field(default_factory=FineTuneConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    select: Mapping[str, str] = field(default_factory=dict, metadata={"meaning": SELECT})
    serving: ServingConfig = field(default_factory=ServingConfig)
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    keep: KeepConfig = field(default_factory=KeepConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    deploy: DeployConfig = field(default_factory=DeployConfig)
    own: Mapping[str, Any] = field(default_factory=dict)
    declared: Mapping[str, Own] = field(default_factory=dict)

    def owning(self, declared: Mapping[str, Own]) -> Config:
        """The configuration with an algorithm's own settings, with their defaults unless they are set
        already."""
        values = {key: self.own.get(key, each.default) for key, each in declared.items()}
        return dataclasses.replace(self, own=values, declared=declared)

    def changed(self, changes: Mapping[str, Any], options: Iterable[str] = ()) -> Config:
        """The configuration with these dotted keys changed. Unknown keys and values of the wrong type raise
        `UserError`. `options` are keys of the task's own, which a message may suggest."""
        config = self
        for key, value in changes.items():
            if key in self.declared:
                own = {**config.own, key: self.declared[key].read(key, value)}
                config = dataclasses.replace(config, own=own)
            else:
                try:
                    config = _changed(config, key, key.split("."), value)
                except KeyError:
                    known = [*shared_keys(), *self.declared, *options]
                    raise _unknown_key(key, known, self.task) from None
        return config

    def flat(self) -> dict[str, Any]:
        """Every value under its dotted key. `changed` with this mapping gives the same configuration again."""
        return dict(_dotted(self._nested(), ""))

    def to_toml(self) -> str:
        """The configuration as a TOML document. Reading it gives the same configuration again."""
        return tomli_w.dumps(self._nested())

    def _nested(self) -> dict[str, Any]:
        """Sections of values, including the algorithm's own settings."""
        nested = dataclasses.asdict(dataclasses.replace(self, own={}, declared={}))
        del nested["own"], nested["declared"]
        for key, value in self.own.items():
            section, _, name = key.partition(".")
            nested.setdefault(section, {})[name] = value
        return _without_none(nested)


def _unknown_key(key: str, known: Sequence[str], task: str) -> UserError:
    """Return the error for a setting that does not exist."""
    alike = _alike(key, known)
    found = f" (nearest: {', '.join(alike)})" if alike else ""
    example = alike[0] if alike else "server.rate"
    return UserError(
        f"unknown configuration key '{key}'{found}; `partwise settings {task}` lists them all (in Python, "
        f'{example.replace(".", "__")}=... or changes={{"{example}": ...}})'
    )


def _alike(key: str, known: Sequence[str]) -> list[str]:
    """The known keys that were probably meant: the same word in a section, nearly the same letters, the same
    last word, or similar letters. The first of these that finds any."""
    last = {name: name.split(".")[-1] for name in known}
    return (
        [name for name in known if last[name] == key]
        or difflib.get_close_matches(key, known, cutoff=0.75)
        or [name for name in known if re.search(rf"[._]{re.escape(last[name])}$", key)]
        or difflib.get_close_matches(key, known, cutoff=0.5)
    )


def _changed(part: Any, key: str, names: list[str], value: Any) -> Any:
    """The part with the value changed. Raises `KeyError` if there is no such key."""
    name, rest = names[0], names[1:]
    known = {f.name: f for f in dataclasses.fields(part)}
    if name not in known or name in ("own", "declared"):
        raise KeyError(key)
    current = getattr(part, name)
    if isinstance(current, Mapping):
        return dataclasses.replace(part, **{name: _with_option(current, key, ".".join(rest), value)})
    if dataclasses.is_dataclass(current):
        if not rest:
            raise UserError(f"'{key}' is a section, not a value: set one of its keys, as in {key}.name=value")
        return dataclasses.replace(part, **{name: _changed(current, key, rest, value)})
    if rest:
        raise UserError(f"'{key}' does not exist: '{key.removesuffix('.' + '.'.join(rest))}' is a value")
    return dataclasses.replace(part, **{name: _setting(key, value, known[name])})


def _with_option(options: Mapping[str, Any], key: str, name: str, value: Any) -> dict[str, Any]:
    """The options of a task or of the server's optimizer (which are all numbers), with one more."""
    if not name and isinstance(value, Mapping):
        return dict(value)
    if not name:
        raise UserError(f"'{key}' is a section, not a value: set one of its keys, as in {key}.name=value")
    return {**options, name: to_number(key, value) if key.startswith("server.") else value}


def _setting(key: str, value: Any, about: dataclasses.Field) -> Any:
    """Convert `value` to the key's type and check its limits."""
    read = to_type(key, value, str(about.type))
    if about.metadata["limits"] is not None:
        about.metadata["limits"].check(key, read)
    return read


def to_type(key: str, value: Any, kind: str) -> Any:
    """Convert `value` to a bool, int, float or str (or None, if `kind` allows it). Text is parsed. Raises
    `UserError` if the value does not fit."""
    names = kind.split(" | ")
    if str(value).lower() == "none" and "None" in names:
        return None
    if "bool" in names:
        truth = {"true": True, "false": False}.get(str(value).lower())
        return truth if truth is not None else _refuse(key, value, kind)
    if "int" in names or "float" in names:
        return to_number(key, value, kind)
    return str(value)


def to_number(key: str, value: Any, kind: str = "float") -> int | float:
    """A finite number. If `kind` has int, exactly the whole number that is written."""
    whole = "int" in kind.split(" | ")
    try:
        number = int(str(value)) if whole else float(str(value))
    except ValueError:
        number = _float_or_nan(value)
    if isinstance(number, float) and (not math.isfinite(number) or (whole and number % 1)):
        _refuse(key, value, kind)
    return int(number) if whole else number


def _float_or_nan(value: Any) -> float:
    try:
        return float(str(value))
    except ValueError:
        return math.nan


def _refuse(key: str, value: Any, kind: str) -> Any:
    words = {"bool": "true or false", "int": "a whole number", "float": "a number", "None": "none"}
    wanted = " or ".join(words.get(name, name) for name in kind.split(" | "))
    finite = " that is finite" if str(value).lower().lstrip("+-") in ("nan", "inf", "infinity") else ""
    raise UserError(f"'{key}' must be {wanted}{finite}, not {str(value)!r}")


@cache
def shared_keys() -> tuple[str, ...]:
    """The dotted keys of the settings that all algorithms have."""
    return tuple(name for name, _, _ in explain())


def explain(config: Config | None = None) -> list[tuple[str, Any, str]]:
    """(dotted key, value, meaning) of every setting, without the options of tasks and of optimizers. If no
    key space is named, `select.SPACE` stands for all of them."""
    config = config or Config()
    lines = []
    for about in dataclasses.fields(config):
        value = getattr(config, about.name)
        inner = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        keys = [(f"{about.name}.{f.name}", getattr(value, f.name), f) for f in inner]
        if isinstance(value, Mapping):
            keys = [(f"{about.name}.{name}", held, about) for name, held in (value or UNSAID).items()]
        lines += keys or [(about.name, value, about)]
    told = [(name, value, f.metadata["meaning"]) for name, value, f in lines if f.metadata]
    return told + [(key, config.own[key], each.meaning) for key, each in config.declared.items()]


def _without_none(value: Any) -> Any:
    """Values for TOML, which has no None. "none" is read as None."""
    if isinstance(value, Mapping):
        return {name: _without_none(inner) for name, inner in value.items()}
    return "none" if value is None else value


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as dotted keys."""
    try:
        return parse_toml(Path(path).read_text())
    except OSError as error:
        raise UserError(f"could not read the configuration '{path}': {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"'{path}' is not a TOML file: {error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """TOML text as dotted keys."""
    return dict(_dotted(tomllib.loads(text), ""))


def _dotted(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def is_record(settings: Mapping[str, Any]) -> bool:
    """Whether these dotted keys are a whole configuration, like a run's config.toml, and not only some
    settings that a user wrote."""
    return {name for name in Config().flat() if name != "task" and not name.startswith(LATER)} <= set(
        settings
    )


def parse_assignments(assignments: list[str]) -> dict[str, str]:
    """`["a.b=1", ...]` as dotted keys."""
    changes = {}
    for text in assignments:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise UserError(f"--set takes dotted.key=value, not '{text}'")
        changes[key.strip()] = value.strip()
    return changes
