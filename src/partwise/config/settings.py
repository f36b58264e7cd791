"""Text from a user into one nested configuration, whose keys are dotted.

A configuration is the defaults below, changed by the task's published settings, by a TOML file and by
`--set dotted.key=value`, in that order.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from partwise.types import UserError, unknown


@dataclass(frozen=True)
class CohortConfig:
    """Who takes part in a round (see data.cohort)."""

    size: int = 50
    over_selection: float = 1.0
    dropout: float = 0.0
    min_examples: int = 0


@dataclass(frozen=True)
class SplitConfig:
    """Support and query sets: alternate (batches), halves (first `percent` / rest) or none.

    For evaluation also `same`: as in training, or alternate where training has none.
    """

    kind: str = "alternate"
    batch_size: int = 5
    percent: int = 50


@dataclass(frozen=True)
class ReconstructConfig:
    """R: `steps` of an optimizer, `solve` (closed form) or `skip`; `pull` towards the default."""

    method: str = "steps"
    optimizer: str = "sgd"
    rate: float = 0.1
    epochs: int | None = 5
    max_steps: int | None = 50
    batch_size: int = 5
    pull: float = 0.0


@dataclass(frozen=True)
class UpdateConfig:
    """U: `steps` of an optimizer or `solve`; `joint` trains the local part along; `passes` of R and U."""

    method: str = "steps"
    optimizer: str = "sgd"
    rate: float = 0.5
    epochs: int | None = 1
    max_steps: int | None = 50
    batch_size: int = 5
    joint: bool = False
    passes: int = 1
    pull: float = 1.0


@dataclass(frozen=True)
class ServerConfig:
    """The server's optimizer with its own settings, and what a client weighs: `examples` or `uniform`.

    The rate stays (`constant`) or falls to zero over the run's rounds (`cosine`).
    """

    optimizer: str = "sgd"
    rate: float = 1.0
    schedule: str = "constant"
    weighting: str = "examples"
    settings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SimulationConfig:
    """How the rounds are run: `lanes` 0 measures and chooses; `backend` compiled or plain."""

    backend: str = "compiled"
    lanes: int = 0
    rounds_per_call: int = 25
    evaluate_every: int = 50
    checkpoint_every: int = 100


@dataclass(frozen=True)
class Config:
    """Everything about a run. `data` are the task's own options."""

    task: str = "planted"
    algorithm: str = "fed_recon"
    rounds: int = 500
    seed: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)
    cohort: CohortConfig = field(default_factory=CohortConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    evaluation_split: SplitConfig = field(default_factory=lambda: SplitConfig("same"))
    reconstruct: ReconstructConfig = field(default_factory=ReconstructConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    simulation: SimulationConfig = field(default_factory=SimulationConfig)

    def changed(self, changes: Mapping[str, Any]) -> Config:
        """With dotted keys changed; unknown keys and values of the wrong type are errors."""
        config = self
        for key, value in changes.items():
            config = _changed(config, key, key.split("."), value)
        return config

    def flat(self) -> dict[str, Any]:
        """Every value under its dotted key; `changed` with it gives this configuration again."""
        return dict(_dotted(_without_none(dataclasses.asdict(self)), ""))

    def to_toml(self) -> str:
        """As a TOML document; reading it gives this configuration again."""
        return tomli_w.dumps(_without_none(dataclasses.asdict(self)))


def _changed(section: Any, key: str, parts: list[str], value: Any) -> Any:
    name, rest = parts[0], parts[1:]
    if isinstance(section, Mapping):
        return {**section, ".".join(parts): _literal(value)}
    known = {f.name: f for f in dataclasses.fields(section)}
    if name not in known:
        raise unknown("configuration key", key, _dotted_keys())
    if rest:
        return dataclasses.replace(section, **{name: _changed(getattr(section, name), key, rest, value)})
    return dataclasses.replace(
        section, **{name: _typed(key, value, getattr(section, name), str(known[name].type))}
    )


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


def _typed(key: str, value: Any, current: Any, kind: str) -> Any:
    """`value` as the key's type; text from the command line is read, anything else must fit."""
    if dataclasses.is_dataclass(current) or isinstance(current, Mapping):
        if isinstance(value, Mapping) and isinstance(current, Mapping):
            return dict(value)
        raise UserError(f"'{key}' is a section, not a value: set one of its keys, as in {key}.name=value")
    if str(value).lower() == "none" and "None" in kind:
        return None
    wanted = next(t for t in (bool, int, float, str) if t.__name__ in kind.split(" | "))
    text = str(value)
    try:
        if wanted is bool:
            return {"true": True, "false": False}[text.lower()]
        if wanted is int and float(text) != int(float(text)):
            raise ValueError
        return int(float(text)) if wanted is int else wanted(text)
    except (KeyError, ValueError, OverflowError):
        raise UserError(f"'{key}' must be {_words(kind)}, not {value!r}") from None


def _words(kind: str) -> str:
    return {"bool": "true or false", "int": "a whole number", "float": "a number"}.get(
        kind, kind.replace("int", "a whole number").replace("None", "none").replace("|", "or")
    )


def _dotted_keys() -> list[str]:
    keys = []
    for f in dataclasses.fields(Config):
        default = getattr(Config(), f.name)
        if dataclasses.is_dataclass(default):
            keys += [f"{f.name}.{inner.name}" for inner in dataclasses.fields(default)]
        else:
            keys.append(f.name)
    return keys


def _without_none(value: Any) -> Any:
    """TOML has no None; "none" is read as one."""
    if isinstance(value, Mapping):
        return {name: _without_none(inner) for name, inner in value.items()}
    return "none" if value is None else value


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as dotted keys."""
    try:
        document = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(f"could not read the configuration '{path}': {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"'{path}' is not a TOML file: {error}") from None
    return dict(_dotted(document, ""))


def _dotted(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def parse_assignments(assignments: list[str]) -> dict[str, str]:
    """`["a.b=1", ...]` as dotted keys."""
    changes = {}
    for text in assignments:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise UserError(f"--set takes dotted.key=value, not '{text}'")
        changes[key.strip()] = value.strip()
    return changes
