"""Algorithms by name. To add one to the library, write a file with an `AlgorithmEntry`, and add a line here.
Another package adds one with an entry point of the group `partwise.algorithms`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from partwise.algorithms.entry import AlgorithmEntry, Prepared
from partwise.client.split import Split, none
from partwise.client.state import Client
from partwise.client.update import check_solvable
from partwise.config.parts import make_split
from partwise.config.secure_sums import secured
from partwise.config.settings import Config, shared_keys
from partwise.model.precision import with_precision
from partwise.plugins import Lazy, find, find_all
from partwise.tasks.base import Task, algorithm_of, defaults_for
from partwise.types import UserError

GROUP = "partwise.algorithms"  # the group of entry points

ALGORITHMS: dict[str, AlgorithmEntry | Lazy] = {
    name: Lazy("", f"partwise.algorithms.{where}")
    for name, where in {
        "fed_recon": "fed_recon:FED_RECON",
        "fed_select": "fed_select:FED_SELECT",
        "fed_sub_avg": "fed_sub_avg:FED_SUB_AVG",
        "fed_avg": "fed_avg:FED_AVG",
        "fed_prox": "fed_prox:FED_PROX",
        "scaffold": "scaffold:SCAFFOLD",
        "fed_per": "fed_per:FED_PER",
        "lg_fed_avg": "fed_per:LG_FED_AVG",
        "fed_rep": "fed_per:FED_REP",
        "fed_adagrad": "fed_opt:FED_ADAGRAD",
        "fed_adam": "fed_opt:FED_ADAM",
        "fed_yogi": "fed_opt:FED_YOGI",
        "central": "central:CENTRAL",
        "count_heat": "count_heat:COUNT_HEAT",
    }.items()
}


def find_algorithm(name: str) -> AlgorithmEntry:
    """The algorithm with this name, from the library or from an installed package."""
    return find(ALGORITHMS, GROUP, "algorithm", name)


def all_algorithms() -> dict[str, AlgorithmEntry]:
    """Every named algorithm, including those of installed packages."""
    return {name: find_algorithm(name) for name in find_all(ALGORITHMS, GROUP, "algorithm")}


def prepare(task: Task, config: Config) -> Prepared:
    """Find the algorithm that the configuration names, and prepare it for the task."""
    entry = find_algorithm(config.algorithm)
    prepared = entry.prepare(task, config.owning(entry.own))
    if config.privacy.clip is not None and not prepared.build(prepared.rates).aggregator.private:
        raise UserError(
            f"{config.algorithm} tells the server more than a noisy sum of clipped updates, so it cannot keep the "
            f"promise of privacy.clip: use fed_recon, fed_select or fed_avg"
        )
    if config.update.method == "solve":
        prepared = _solving(prepared)
    if config.update.precision != "float32":
        _check_steps(config)
        prepared = _rounding(prepared, config.update.precision)
    if config.privacy.sums == "plain" and not config.privacy.keys:
        return prepared
    secure = partial(secured, config=config, num_clients=prepared.store.num_clients)
    return prepared._replace(build=lambda rates: secure(prepared.build(rates)))


def training_split(config: Config) -> Split:
    """How the training clients of a configuration split their examples."""
    return make_split(config.split) if find_algorithm(config.algorithm).splits else none()


def _solving(prepared: Prepared) -> Prepared:
    """With clients that check whether they can solve for what they train."""

    def build(rates: Any) -> Any:
        algorithm = prepared.build(rates)

        def check(client: Client) -> None:
            check_solvable(client)
            if algorithm.check:
                algorithm.check(client)

        return algorithm._replace(check=check)

    return prepared._replace(build=build)


def _rounding(prepared: Prepared, precision: str) -> Prepared:
    """With clients whose steps have this precision. They are judged and checked in float32, because two ways to
    the same sum differ if they are rounded to 16 bits."""

    def build(rates: Any) -> Any:
        algorithm = prepared.build(rates)
        return algorithm._replace(model=with_precision(algorithm.model, precision))

    return prepared._replace(build=build, checked=prepared.build)


def _check_steps(config: Config) -> None:
    solved = [f"{n}.method" for n in ("update", "reconstruct") if getattr(config, n).method == "solve"]
    if config.update.precision != "float32" and solved:
        raise UserError(
            f"update.precision = {config.update.precision} is for steps, and {' and '.join(solved)} = solve needs "
            f"float32: use steps, or leave update.precision out"
        )


def settings_for(defaults: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """A task's settings (its `defaults`) for an algorithm."""
    return defaults_for(defaults, algorithm, find_algorithm(algorithm).defaults)


def configuration(task: str, changes: Mapping[str, Any]) -> Config:
    """The configuration of a task with these dotted keys changed. They may include `algorithm` and its own
    settings."""
    algorithm = _algorithm(changes)
    own = find_algorithm(algorithm).own
    for key in changes:
        if key not in own and (owners := _owners(key)):
            raise UserError(
                f"{key} is a setting of {', '.join(owners)}: leave it out with {algorithm}, or use {owners[0]}"
            )
    return Config(task=task).owning(own).changed(changes)


def check_keys(changes: Mapping[str, Any], task: str, options: Iterable[str] = ()) -> None:
    """Raise `UserError` if no algorithm has a key, or if the value of a common key has the wrong type.
    `options` are the keys of the task's own options, for messages."""
    Config(task=task).changed({key: value for key, value in changes.items() if not _owners(key)}, options)


def without_foreign(settings: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """Recorded settings without those that only other algorithms have, because these have no meaning for this
    one."""
    own = find_algorithm(algorithm).own
    return {key: value for key, value in settings.items() if key in own or not _owners(key)}


def recorded(settings: Mapping[str, Any]) -> Config:
    """The configuration in a run's config.toml."""
    task = str(settings.get("task", Config().task))
    return configuration(task, without_foreign(settings, _algorithm(settings)))


def _algorithm(settings: Mapping[str, Any]) -> str:
    return str(settings.get("algorithm", algorithm_of(None)))


def _owners(key: str) -> list[str]:
    """The algorithms that have this setting as their own; empty if it is common to all or unknown."""
    if key in shared_keys() or key.startswith(("data", "select", "server.settings")):
        return []
    return [name for name, entry in all_algorithms().items() if key in entry.own]
