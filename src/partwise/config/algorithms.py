"""Algorithms by name: from a task and a configuration to what runs.

The library's own are below; a package of your own adds one by an entry point of the group `partwise.algorithms`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optax

from partwise.aggregation import mean
from partwise.algorithms.base import Algorithm, Build, whole_model
from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.fed_recon import fed_recon
from partwise.algorithms.fed_select import fed_select
from partwise.client import reconstruct, split, update
from partwise.client.batches import Schedule
from partwise.config.settings import Config, SplitConfig
from partwise.data.cohort import Recruiting
from partwise.data.store import ClientStore
from partwise.plugins import find, find_all
from partwise.selection.choose import Choice, parse_choice
from partwise.server import OPTIMIZERS, Optimizer, make_optimizer
from partwise.tasks.base import Setting, Task
from partwise.types import UserError, unknown

GROUP = "partwise.algorithms"  # of entry points


class Prepared(NamedTuple):
    """A task and a configuration, ready to run."""

    build: Build
    rates: Mapping[str, float]
    store: ClientStore  # training clients
    recruiting: Recruiting
    evaluation: Build  # for validation and test clients
    evaluated: Setting


def prepare(task: Task, config: Config) -> Prepared:
    """Choose the algorithm by name and give it the task."""
    return find_algorithm(config.algorithm).prepare(task, config)


def _prepare_fed_recon(task: Task, config: Config) -> Prepared:
    if task.seen:
        raise UserError(
            f"task '{task.name}' judges clients by parameters that the server keeps for them, and fed_recon keeps "
            f"none: use fed_avg or central, or a task of unseen clients"
        )
    build = _recon_build(task.personal, config)
    store = task.train.select(task.personal.columns)
    return Prepared(build, _rates(config), store, _recruiting(config), build, task.personal)


def _prepare_fed_avg(task: Task, config: Config) -> Prepared:
    return _prepare_averaging(task, dataclasses.replace(config, select={}), fed_avg)


def _prepare_fed_select(task: Task, config: Config) -> Prepared:
    return _prepare_averaging(task, config, fed_select)


def _prepare_averaging(task: Task, config: Config, make: Callable[..., Algorithm]) -> Prepared:
    setting = _stateful(task)
    build = _averaging_build(setting, config, make)
    store = task.train.select(setting.columns)
    return Prepared(build, _rates(config), store, _recruiting(config), *_evaluation(task, config, build))


def _prepare_central(task: Task, config: Config) -> Prepared:
    """All examples in one place: one client who has everything, one epoch a round, as plain SGD."""
    setting = _stateful(task)
    whole = config.changed(
        {"server.optimizer": "sgd", "server.rate": 1.0, "server.settings": {}, "select": {}}
    )
    build = _averaging_build(setting, whole.changed({"update.max_steps": None}), fed_avg)
    pooled = task.train.select(setting.columns).pool().reorder(seed=config.seed)
    return Prepared(build, _rates(whole), pooled, Recruiting(1), *_evaluation(task, config, build))


def evaluation_build(setting: Setting, config: Config) -> tuple[Build, dict[str, float]]:
    """What a client that has the trained model does with it, and its rates."""
    return _recon_build(setting, config), _rates(config)


def _evaluation(task: Task, config: Config, build: Build) -> tuple[Build, Setting]:
    """Seen users have rows on the server: standard evaluation. Unseen ones rebuild their own: RECONEVAL."""
    if task.seen or not task.personal.partition.local_paths:
        return build, _stateful(task)
    return _recon_build(task.personal, config), task.personal


def _stateful(task: Task) -> Setting:
    if task.stateful is None:
        raise UserError(
            f"task '{task.name}' has no variant with all parameters on the server; use fed_recon "
            f"(or, for a table of ratings, an order other than 'as is')"
        )
    return task.stateful


def _recon_build(setting: Setting, config: Config) -> Build:
    part, here = config.reconstruct, make_split(config.split)
    _one_of("reconstruct.method", part.method, ("steps", "solve", "skip"))
    _client_optimizer(part.optimizer, part.rate)
    choose = _choose(setting, config)

    def build(rates: Mapping[str, Any]):
        if part.method == "solve":
            rebuild = reconstruct.by_solving(rates["pull"])
        elif part.method == "skip":
            rebuild = reconstruct.skip()
        else:
            schedule = Schedule(part.batch_size, part.epochs, part.max_steps)
            optimizer = _client_optimizer(part.optimizer, rates["reconstruct"])
            rebuild = reconstruct.by_steps(schedule, optimizer, rates.get("pull", 0.0))
        return fed_recon(
            setting.model,
            setting.partition,
            split=here,
            reconstruct=rebuild,
            update=_update(config, rates),
            optimizer=_server_optimizer(config, rates),
            aggregator=_aggregator(setting, config),
            choose=choose,
            passes=config.update.passes,
            evaluation_split=_evaluation_split(config),
            check=reconstruct.check_solvable if part.method == "solve" else None,
        )

    return build


def _averaging_build(setting: Setting, config: Config, make: Callable[..., Algorithm]) -> Build:
    choose = _choose(setting, config)
    return lambda rates: make(
        setting.model,
        setting.partition,
        update=_update(config, rates),
        optimizer=_server_optimizer(config, rates),
        aggregator=_aggregator(setting, config),
        choose=choose,
    )


def _choose(setting: Setting, config: Config) -> dict[str, Choice]:
    """Which keys clients ask for: as the configuration says; else all that could matter."""
    known = {space: text for space, text in config.select.items() if space in setting.partition.spaces}
    if len(known) < len(config.select):
        name = next(space for space in config.select if space not in known)
        raise unknown("key space of select", name, setting.partition.spaces)
    return whole_model(setting.partition) | {space: parse_choice(text) for space, text in known.items()}


def _update(config: Config, rates: Mapping[str, Any]) -> update.Update:
    part = config.update
    _one_of("update.method", part.method, ("steps", "solve"))
    if part.method == "solve":
        return update.by_solving(part.pull)
    schedule = Schedule(part.batch_size, part.epochs, part.max_steps)
    return update.by_steps(schedule, _client_optimizer(part.optimizer, rates["update"]), part.joint)


def make_split(part: SplitConfig, section: str = "split") -> split.Split:
    """A split function by name."""
    _one_of(f"{section}.kind", part.kind, ("alternate", "halves", "none"))
    if part.kind == "alternate":
        return split.alternate(part.batch_size)
    return split.halves(part.percent) if part.kind == "halves" else split.none()


def _evaluation_split(config: Config) -> split.Split:
    if config.evaluation_split.kind != "same":
        return make_split(config.evaluation_split, "evaluation_split")
    none = config.split.kind == "none"
    return make_split(dataclasses.replace(config.split, kind="alternate") if none else config.split)


def _client_optimizer(name: str, rate: Any) -> Any:
    """SGD is just its rate; anything else by name."""
    if name not in OPTIMIZERS:
        raise unknown("client optimizer", name, OPTIMIZERS)
    optimizer = make_optimizer(name, rate)
    if optimizer.rows == "asked":
        raise UserError(
            f"'{name}' is an optimizer of the server, which knows the rows that its clients asked for; "
            f"on a client use {name.removeprefix('lazy_')}"
        )
    return rate if name == "sgd" else optimizer.transform


def _server_optimizer(config: Config, rates: Mapping[str, Any]) -> Optimizer:
    _one_of("server.schedule", config.server.schedule, ("constant", "cosine"))
    rate = rates["server"]
    if config.server.schedule == "cosine":
        rate = optax.cosine_decay_schedule(rate, max(config.rounds, 1))
    return make_optimizer(config.server.optimizer, rate, **config.server.settings)


def _aggregator(setting: Setting, config: Config) -> mean.Aggregator:
    _one_of("server.weighting", config.server.weighting, ("examples", "uniform"))
    _one_of("server.mean", config.server.mean, ("cohort", "holders"))
    weigh = mean.by_examples if config.server.weighting == "examples" else mean.uniform
    everywhere = tuple(setting.partition.spaces) if config.server.mean == "holders" else setting.own_spaces
    return mean.mean(weigh, everywhere)


def _recruiting(config: Config) -> Recruiting:
    return Recruiting(**dataclasses.asdict(config.cohort))


def _rates(config: Config) -> dict[str, float]:
    rates = {
        "reconstruct": config.reconstruct.rate,
        "update": config.update.rate,
        "server": config.server.rate,
    }
    if config.reconstruct.pull > 0 or config.reconstruct.method == "solve":
        rates["pull"] = config.reconstruct.pull
    return rates


def _one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise unknown(f"value of {key}", value, known)


class AlgorithmEntry(NamedTuple):
    """An algorithm by name."""

    summary: str
    prepare: Callable[[Task, Config], Prepared]


ALGORITHMS: dict[str, AlgorithmEntry] = {
    "fed_recon": AlgorithmEntry("Federated Reconstruction (Singhal et al., 2021)", _prepare_fed_recon),
    "fed_select": AlgorithmEntry("Federated Select (Charles et al., 2022)", _prepare_fed_select),
    "fed_avg": AlgorithmEntry("Federated Averaging, any server optimizer", _prepare_fed_avg),
    "central": AlgorithmEntry("centralised SGD on pooled data; a round is an epoch", _prepare_central),
}


def find_algorithm(name: str) -> AlgorithmEntry:
    """An algorithm by name, the library's own or an installed package's."""
    return find(ALGORITHMS, GROUP, "algorithm", name)


def all_algorithms() -> dict[str, AlgorithmEntry]:
    """Every named algorithm, those of installed packages too."""
    return find_all(ALGORITHMS, GROUP, "algorithm")
