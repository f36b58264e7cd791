"""Algorithms by name: from a task and a configuration to what runs.

The library's own are below; a package of your own adds one by an entry point of the group `partwise.algorithms`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from partwise.algorithm import Algorithm, Build
from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.fed_per import fed_per
from partwise.algorithms.fed_prox import fed_prox
from partwise.algorithms.fed_select import fed_select
from partwise.algorithms.scaffold import historical, scaffold
from partwise.client import reconstruct
from partwise.client.state import Client
from partwise.config.evaluation import (
    averaged_evaluation,
    check_judged,
    check_rebuilt,
    evaluation_build,
    recon_build,
    stateful,
)
from partwise.config.parts import (
    make_aggregator,
    make_choices,
    make_client_optimizer,
    make_reconstruct,
    make_recruiting,
    make_schedule,
    make_server_optimizer,
    make_update,
    one_of,
    rates_of,
)
from partwise.config.settings import Config
from partwise.data.store import ClientStore
from partwise.plugins import find, find_all
from partwise.server.cohort import Recruiting
from partwise.tasks.base import Setting, Task, defaults_for
from partwise.types import UserError

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
            f"none: use fed_avg, fed_per or central, or a task of unseen clients"
        )
    check_rebuilt(config)
    store = task.train.select(task.personal.columns)
    build = recon_build(task.personal, config, store)
    return Prepared(build, rates_of(config), store, make_recruiting(config), build, task.personal)


def _prepare_fed_avg(task: Task, config: Config) -> Prepared:
    return _prepare_averaging(task, _unselected(task, config), fed_avg)


def _unselected(task: Task, config: Config) -> Config:
    """Without the task's choice of keys, of an algorithm whose clients have all that could matter to them."""
    usual = settings_for(task.defaults, config.algorithm)
    for space, text in config.select.items():
        if text != usual.get(f"select.{space}"):
            raise UserError(
                f"select.{space} = {text} chooses keys, and clients of {config.algorithm} have all that could "
                f"matter to them: leave it out, or use fed_select"
            )
    return dataclasses.replace(config, select={})


def _prepare_fed_select(task: Task, config: Config) -> Prepared:
    return _prepare_averaging(task, config, fed_select)


def _prepare_averaging(task: Task, config: Config, make: Callable[..., Algorithm]) -> Prepared:
    build = lambda setting, store: _averaging_build(setting, config, make, store)
    return _prepare_stateful(task, config, build)


def _prepare_stateful(
    task: Task, config: Config, make_build: Callable[[Setting, ClientStore], Build]
) -> Prepared:
    """An algorithm whose parameters are all the server's."""
    setting = stateful(task)
    store = task.train.select(setting.columns)
    build = make_build(setting, store)
    return Prepared(
        build, rates_of(config), store, make_recruiting(config), *averaged_evaluation(task, config, build)
    )


def _prepare_fed_prox(task: Task, config: Config) -> Prepared:
    """FedAvg whose clients are held to what they received, by update.proximal."""
    one_of("update.method", config.update.method, ("steps",))
    bare = _unselected(task, config)

    def make_build(setting: Setting, store: ClientStore) -> Build:
        aggregator = make_aggregator(setting, bare, store)
        return lambda rates: fed_prox(
            setting.model,
            setting.partition,
            mu=config.update.proximal,
            schedule=make_schedule(config),
            client_optimizer=make_client_optimizer(config.update.optimizer, rates["update"]),
            optimizer=make_server_optimizer(config, rates),
            aggregator=aggregator,
            choose=make_choices(setting, bare),
        )

    return _prepare_stateful(task, config, make_build)


def _prepare_scaffold(task: Task, config: Config) -> Prepared:
    """Control variates: those of the clients, which are plain SGD, or of the server alone."""
    one_of("scaffold.control", config.scaffold.control, ("clients", "server"))
    config = _unselected(task, config)
    if config.scaffold.control == "server":
        return _prepare_averaging(task, config, _historical(config, task))
    one_of("update.method", config.update.method, ("steps",))
    one_of("update.optimizer", config.update.optimizer, ("sgd",))
    one_of("server.mean", config.server.mean, ("cohort",))
    one_of("server.weighting", config.server.weighting, ("uniform",))
    return _prepare_stateful(
        task,
        config,
        lambda setting, store: (
            lambda rates: scaffold(
                setting.model,
                setting.partition,
                schedule=make_schedule(config),
                rate=rates["update"],
                num_clients=store.num_clients,
                optimizer=make_server_optimizer(config, rates),
            )
        ),
    )


def _prepare_fed_per(task: Task, config: Config) -> Prepared:
    """FedPer and LG-FedAvg: the local part is trained along with the rest."""
    one_of("update.method", config.update.method, ("steps",))
    if not config.update.joint:
        raise UserError(
            f"{config.algorithm} trains local and shared parts together: leave update.joint = true, or use fed_rep"
        )
    return _prepare_keeping(task, config, lambda rates: None)


def _prepare_fed_rep(task: Task, config: Config) -> Prepared:
    """FedRep: first the local part, as reconstruct.* says, then the rest, as update.* says."""
    one_of("reconstruct.method", config.reconstruct.method, ("steps", "solve"))
    if config.update.joint:
        raise UserError(
            "fed_rep trains the local part before the shared ones: leave update.joint = false, or use fed_per"
        )
    make_reconstruct(config, rates_of(config))  # mistakes are told here, not when it is compiled
    check = reconstruct.check_solvable if config.reconstruct.method == "solve" else None
    return _prepare_keeping(task, config, lambda rates: make_reconstruct(config, rates), check)


def _prepare_keeping(
    task: Task,
    config: Config,
    make_local: Callable[[Mapping[str, Any]], reconstruct.Reconstruct | None],
    check: Callable[[Client], None] | None = None,
) -> Prepared:
    """An algorithm whose clients keep their local part. Seen clients are judged with it; unseen ones, who have
    none, rebuild theirs: RECONEVAL."""
    check_rebuilt(config)
    check_judged(task, config)
    setting = task.personal
    if not setting.partition.local_paths:
        raise UserError(
            f"clients of {config.algorithm} keep a local part, and task '{task.name}' has none: use fed_avg, or a "
            f"task with one"
        )
    store = task.train.select(setting.columns)
    choose, aggregator = make_choices(setting, config), make_aggregator(setting, config, store)
    build: Build = lambda rates: fed_per(
        setting.model,
        setting.partition,
        update=make_update(config, rates),
        optimizer=make_server_optimizer(config, rates),
        local=make_local(rates),
        aggregator=aggregator,
        choose=choose,
        check=check,
    )
    evaluation = build if task.seen else evaluation_build(setting, config)[0]
    return Prepared(build, rates_of(config), store, make_recruiting(config), evaluation, setting)


def _historical(config: Config, task: Task) -> Callable[..., Algorithm]:
    size, everyone = config.cohort.size, task.train.num_clients
    return lambda *given, optimizer, **more: fed_avg(
        *given, optimizer=historical(optimizer, size, everyone), **more
    )


def _prepare_central(task: Task, config: Config) -> Prepared:
    """All examples in one place, as plain SGD: a round is an epoch, or update.max_steps batches of examples drawn
    from all (FedSubAvg's CentralSGD, with a batch of what its cohort's would be together)."""
    setting, part = stateful(task), config.update
    whole = _unselected(task, config).changed(
        {"server.optimizer": "sgd", "server.rate": 1.0, "server.settings": {}, "server.mean": "cohort"}
    )
    build = _averaging_build(setting, whole, fed_avg)
    pooled = task.train.select(setting.columns).pool().reorder(seed=config.seed)
    if part.max_steps is not None:
        pooled = pooled.pool(part.max_steps * part.batch_size)
    return Prepared(build, rates_of(whole), pooled, Recruiting(1), *averaged_evaluation(task, config, build))


def _averaging_build(
    setting: Setting, config: Config, make: Callable[..., Algorithm], store: ClientStore | None = None
) -> Build:
    choose = make_choices(setting, config)
    aggregator = make_aggregator(setting, config, store)
    return lambda rates: make(
        setting.model,
        setting.partition,
        update=make_update(config, rates),
        optimizer=make_server_optimizer(config, rates),
        aggregator=aggregator,
        choose=choose,
    )


class AlgorithmEntry(NamedTuple):
    """An algorithm by name; `defaults` are settings that it wants otherwise than a task has them for all."""

    summary: str
    prepare: Callable[[Task, Config], Prepared]
    defaults: Mapping[str, Any] = {}


ALGORITHMS: dict[str, AlgorithmEntry] = {
    "fed_recon": AlgorithmEntry("Federated Reconstruction (Singhal et al., 2021)", _prepare_fed_recon),
    "fed_select": AlgorithmEntry("Federated Select (Charles et al., 2022)", _prepare_fed_select),
    "fed_sub_avg": AlgorithmEntry(
        "Federated Submodel Averaging: FedAvg with server.mean = heat (Ding et al., 2022)",
        _prepare_fed_avg,
        {"server.mean": "heat"},
    ),
    "fed_avg": AlgorithmEntry("Federated Averaging, any server optimizer", _prepare_fed_avg),
    "fed_prox": AlgorithmEntry(
        "FedProx: FedAvg whose clients stay near what they received (Li et al., 2020)",
        _prepare_fed_prox,
        {"update.proximal": 0.01},
    ),
    "scaffold": AlgorithmEntry(
        "SCAFFOLD: control variates against client drift (Karimireddy et al., 2020)",
        _prepare_scaffold,
        {"server.weighting": "uniform"},
    ),
    "fed_per": AlgorithmEntry(
        "FedPer: clients keep and train their local part, the head (Arivazhagan et al., 2019)",
        _prepare_fed_per,
        {"update.joint": True},
    ),
    "lg_fed_avg": AlgorithmEntry(
        "LG-FedAvg: the same, made for a local representation (Liang et al., 2020)",
        _prepare_fed_per,
        {"update.joint": True},
    ),
    "fed_rep": AlgorithmEntry(
        "FedRep: clients keep their local part and train it before the shared one (Collins et al., 2021)",
        _prepare_fed_rep,
    ),
    "fed_adagrad": AlgorithmEntry(
        "FedAdagrad: FedAvg with server.optimizer = adagrad (Reddi et al., 2021)",
        _prepare_fed_avg,
        {"server.optimizer": "adagrad", "server.rate": 0.1},
    ),
    "fed_adam": AlgorithmEntry(
        "FedAdam: FedAvg with server.optimizer = adam (Reddi et al., 2021)",
        _prepare_fed_avg,
        {"server.optimizer": "adam", "server.rate": 0.01},
    ),
    "fed_yogi": AlgorithmEntry(
        "FedYogi: FedAvg with server.optimizer = yogi (Reddi et al., 2021)",
        _prepare_fed_avg,
        {"server.optimizer": "yogi", "server.rate": 0.01},
    ),
    "central": AlgorithmEntry(
        "centralised SGD on pooled data; a round is an epoch, or update.max_steps batches",
        _prepare_central,
        {"update.max_steps": None},
    ),
}


def settings_for(defaults: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """A task's settings (its `defaults`) for an algorithm."""
    return defaults_for(defaults, algorithm, find_algorithm(algorithm).defaults)


def find_algorithm(name: str) -> AlgorithmEntry:
    """An algorithm by name, the library's own or an installed package's."""
    return find(ALGORITHMS, GROUP, "algorithm", name)


def all_algorithms() -> dict[str, AlgorithmEntry]:
    """Every named algorithm, those of installed packages too."""
    return find_all(ALGORITHMS, GROUP, "algorithm")
