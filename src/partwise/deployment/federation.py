"""A run that is deployed: its folder, what its server needs, and what its devices need.

The folder of a deployed run is that of any run (`runs.folder`), with versions and a journal beside. Its server
needs no examples. What it must know of them (the ids of keys, how many clients hold each) is written when the
run is founded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from partwise.algorithm import Algorithm, init_server
from partwise.algorithms.registry import find_algorithm, prepare, recorded
from partwise.checkpoint import load_tree, save_tree
from partwise.config.parts import HEATS
from partwise.config.settings import Config, parse_toml
from partwise.data.store import ClientStore
from partwise.deployment.coordinator import Coordinator
from partwise.deployment.hub import Hub
from partwise.deployment.journal import Journal
from partwise.deployment.link import Offer
from partwise.deployment.rules import make_rules
from partwise.model.partition import Partition
from partwise.randomness import INIT_ROUND, round_rng
from partwise.runs.client_file import Source, source_of
from partwise.runs.folder import Folder
from partwise.runs.resolve import entry_of
from partwise.selection.key_heat import count_heats, load_heats, save_heats
from partwise.server.round import Server
from partwise.tasks import Task
from partwise.types import UserError

HEAT_FILE, START_FILE, JOURNAL_FILE, VERSIONS = (
    "heat.safetensors",
    "first.safetensors",
    "journal.db",
    "versions",
)


def found_run(task: Task, config: Config, out: str | Path) -> Folder:
    """Begin a deployed run in a folder. Of the task's data, only ids and heat are kept.

    Args:
        task: The task.
        config: All settings, with those of `deploy`.
        out: The folder.
    """
    make_rules(config)
    _check_deployable(task, config)
    prepared, folder = prepare(task, config), Folder(out)
    algorithm = prepared.build(prepared.rates)
    by = "samples" if config.server.weighting == "examples" else "clients"
    heats = count_heats(prepared.store, algorithm.partition, by)
    folder.path.mkdir(parents=True, exist_ok=True)
    with folder.held():
        folder.check_free()
        save_heats(folder.path / HEAT_FILE, heats)
        start = init_server(algorithm, round_rng(config.seed, INIT_ROUND))
        save_tree(folder.path / START_FILE, start, {"round": 0})
        folder.start(config, task.options, source_of(task.train), {"data": "on the devices"})
    return folder


def _check_deployable(task: Task, config: Config) -> None:
    """Raise `UserError` if the algorithm needs what devices do not know: the number of a client among all."""
    trains = find_algorithm(config.algorithm).trains
    setting = task.stateful if trains == "stateful" else task.personal
    if setting is not None and setting.own_spaces:
        raise UserError(
            f"{config.algorithm} keeps rows of every client of '{task.name}' on the server, by the client's number "
            f"among all, which a device does not know: deploy fed_recon, or another algorithm with local parts"
        )


def open_hub(
    path: str | Path, journal: str | None = None, files: str = "", **rules: Any
) -> tuple[Hub, Offer]:
    """The server's side of a run, from its folder.

    Args:
        path: The folder, which `found_run` made.
        journal: The URL of the journal's database (default: SQLite in the folder).
        files: The URL at which devices find the files of slices, if not at the server itself.
        **rules: Other values of `deployment.rules.Rules` than the configuration says.
    """
    folder = Folder(path)
    config, source, options = folder.config(), folder.source(), folder.model_options()
    store = _only_known(source)
    if (folder.path / HEAT_FILE).exists():
        store = dataclasses.replace(store, info={**store.info, HEATS: load_heats(folder.path / HEAT_FILE)})
    algorithm = algorithm_with(config, options, store)
    offer = Offer(
        run=folder.run,
        model=algorithm.partition.digest,
        config=config.to_toml(),
        settings=config.flat(),
        leaves=describe_leaves(algorithm.partition),
        options=options,
        shapes={name: list(shape) for name, shape in source.shapes.items()},
        vocabularies={name: values.tolist() for name, values in source.vocabularies.items()},
        client=source.client,
        files=files,
    )
    server = Server(algorithm, folder.run, config.deploy.precision)
    rows = Journal(journal or f"sqlite:///{folder.path / JOURNAL_FILE}", folder.run)
    like = jax.eval_shape(lambda: init_server(algorithm, round_rng(config.seed, INIT_ROUND)))
    start = load_tree(folder.path / START_FILE, like)[0]
    hub = Hub(Coordinator(server, make_rules(config, **rules)), rows, folder.path / VERSIONS, start)
    return hub, offer


def algorithm_of(offer: Offer, store: ClientStore) -> Algorithm:
    """The run's algorithm on a device with these clients."""
    algorithm = algorithm_with(recorded(parse_toml(offer.config)), offer.options, store)
    if algorithm.partition.digest != offer.model:
        raise UserError(
            "the server's model is not the one that its settings make here: this device has another version of "
            "partwise, or of the package that the task comes from. Install the server's"
        )
    return algorithm


def algorithm_with(config: Config, options: Mapping[str, Any], store: ClientStore) -> Algorithm:
    """The algorithm of a configuration; `store` has the training clients, as far as they are known here."""
    personal, stateful = entry_of(config.task).settings(**options)
    own = Task(config.task, store, store, store, personal, stateful, options=options)
    prepared = prepare(own, config)
    return prepared.build(prepared.rates)


def describe_leaves(partition: Partition) -> dict[str, Any]:
    """The leaves of the server and of the client, for those who write a client in another language."""
    told = {}
    for path, shape in partition.shapes.items():
        role = partition.roles.get(path)
        told[path] = {
            "role": role.kind if role else "shared",
            "shape": list(shape.shape),
            "dtype": shape.dtype.name,
            "space": role.space if role else None,
            "psi": role.psi.name if role and role.space else None,
        }
    return told


def _only_known(source: Source) -> ClientStore:
    """A store without clients, of the same form."""
    columns = {name: np.zeros((0, *shape), np.int32) for name, shape in source.shapes.items()}
    none = np.zeros(0, np.int64)
    return ClientStore(columns, none, none, none, dict(source.vocabularies), {})
