"""A run that is deployed: its folder, what its server needs, and what its devices need.

The folder of a deployed run is that of any run (`runs.folder`), with versions and a journal beside. Its server
needs no examples. What it must know of them (the ids of keys, how many clients hold each) is written when the
run is founded.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from partwise.algorithm import Algorithm, check_keys_stay, init_params, init_server
from partwise.algorithms.registry import find_algorithm, prepare
from partwise.checkpoint import load_tree, save_tree
from partwise.config.parts import HEATS, one_of
from partwise.config.protection import protection
from partwise.config.sections import KeepConfig, StopConfig
from partwise.config.settings import Config
from partwise.config.sum_sizes import least_of
from partwise.data.heat import Heat
from partwise.data.store import ClientStore
from partwise.deployment.coordinator import Coordinator
from partwise.deployment.files import open_place
from partwise.deployment.helper_link import HelperLink
from partwise.deployment.hub import Hub, Publisher
from partwise.deployment.journal_place import VERSIONS, begin_journal, journal_of
from partwise.deployment.link import Offer
from partwise.deployment.memory import check_memory
from partwise.deployment.offered import algorithm_of as algorithm_of
from partwise.deployment.offered import algorithm_with
from partwise.deployment.promise import (
    check_promise,
    cohort_seed,
    drawn_from,
    keep_cohort_seed,
    known_heats,
    make_masked,
    make_noise,
    make_pair,
    promised_config,
)
from partwise.deployment.publisher import PagePublisher, WholePublisher
from partwise.deployment.rules import check_hold, make_rules
from partwise.model.partition import Partition
from partwise.randomness import INIT_ROUND, round_rng
from partwise.runs.client_file import Source, source_of
from partwise.runs.fingerprint import fingerprint
from partwise.runs.folder import Folder
from partwise.runs.run_view import HEAT_FILE, START_FILE
from partwise.runs.sanity import examples_used, tell_unused
from partwise.selection.key_heat import load_heats, save_heats
from partwise.server.round import Server
from partwise.tasks import Task
from partwise.types import RunWarning, UserError

FILES = "files"  # the folder of what devices may read


def found_run(task: Task, config: Config, out: str | Path, journal: str | None = None) -> Folder:
    """Begin a deployed run in a folder, with a journal and an identity of its own. Of the task's data, only ids and
    heat are kept.

    Args:
        task: The task.
        config: All settings, with those of `deploy`.
        out: The folder.
        journal: The URL of an empty database for the journal (default: SQLite in the folder).
    """
    make_rules(config)
    check_hold(config)
    _check_deployable(task, config)
    # The heat is written below. Devices are told all settings, and a place on this machine is not their business.
    config = promised_config(config, map(str, task.train.client_ids.tolist())).changed({"server.counts": ""})
    prepared, folder = prepare(task, config), Folder(out)
    unused = tell_unused(examples_used(task, prepared, config))
    if unused:
        warnings.warn(f"of clients as in the data at hand, {unused}", RunWarning, stacklevel=2)
    algorithm = prepared.build(prepared.rates)
    check_keys_stay(algorithm)
    heats = known_heats(config, algorithm, prepared.store)
    folder.path.mkdir(parents=True, exist_ok=True)
    with folder.held():
        folder.check_free()
        run = secrets.token_hex(16)  # no part of any randomness of the training
        begin_journal(folder.path, run, journal)
        save_heats(folder.path / HEAT_FILE, heats)
        # What the server will have: no examples, and the heat that was just counted, which may have secret noise.
        known = only_known(source_of(task.train), prepared.store.num_clients, {HEATS: heats})
        serving = algorithm_with(config, task.options, known)
        rng = round_rng(config.seed, INIT_ROUND)
        # The first values are those of the task's own model, which may have constants of the data (genres).
        start = init_server(serving, rng)._replace(params=init_params(algorithm, rng))
        serving.partition.check_there(start.params)
        save_tree(folder.path / START_FILE, start, {"round": 0})
        keep_cohort_seed(folder.path, config)
        # States may have buffers of secret noise. If the beginning was killed before, the folder may be there.
        (folder.path / VERSIONS).mkdir(mode=0o700, exist_ok=True)
        folder.start(
            config,
            task.options,
            source_of(task.train),
            {"data": fingerprint(task), "lanes": 0, "clients": prepared.store.num_clients},
            run,
        )
    return folder


def _check_deployable(task: Task, config: Config) -> None:
    """Raise `UserError` if the algorithm needs what devices do not know: the number of a client among all."""
    check_promise(config)
    if config.stop != StopConfig() or config.keep != KeepConfig():
        raise UserError(
            "stop.* and keep.* are read by `partwise train` alone: a deployed run ends after its rounds (--rounds) "
            "and keeps its versions (deploy.keep). Leave them out"
        )
    trains = find_algorithm(config.algorithm).trains
    setting = task.stateful if trains == "stateful" else task.personal
    if setting is not None and setting.own_spaces:
        raise UserError(
            f"{config.algorithm} keeps rows of every client of '{task.name}' on the server, by the client's number "
            f"among all, which a device does not know: deploy fed_recon, or another algorithm with local parts"
        )


class Opened(NamedTuple):
    """The server's side of a run, what devices are told of it, and the folder of files that the server hands
    out."""

    hub: Hub
    offer: Offer
    files: Path | None


def open_run(
    path: str | Path,
    journal: str | None = None,
    files: str = "",
    place: str = "",
    clock: Callable[[], float] = time.time,
    helper: HelperLink | None = None,
    **changes: Any,
) -> Opened:
    """The server's side of a run, from its folder.

    Args:
        path: The folder, which `found_run` made.
        journal: The URL of the journal's database, if it has a password (default: where the run was begun with it).
        files: The URL at which devices find the files of slices (default: the server itself).
        place: Where files of slices are written, a folder or an s3:// URL (default: in the folder).
        clock: Seconds since some moment, the same for all servers of a run.
        helper: The way to the second server, if the run has two.
        **changes: Other values of `deployment.rules.Rules` than the configuration says.
    """
    folder = Folder(path)
    config, source, options = folder.config(), folder.source(), folder.model_options()
    heats = load_heats(folder.path / HEAT_FILE)
    algorithm = algorithm_with(config, options, only_known(source, folder.begun()["clients"], {HEATS: heats}))
    rules = make_rules(config, drawing=cohort_seed(folder.path, config), **changes)
    rules = rules._replace(least=least_of(config, rules.quorum), drawn_from=drawn_from(config))
    pair = make_pair(algorithm, config, folder.run, rules.least, helper)
    masked = make_masked(algorithm, config)
    sealed = pair.form if pair else masked.form if masked else None
    promised = protection(config, config.deploy.population)
    server = Server(algorithm, folder.run, config.deploy.precision, sealed, make_noise(promised))
    rows = journal_of(folder, journal)
    like = jax.eval_shape(lambda: init_server(algorithm, round_rng(config.seed, INIT_ROUND)))
    check_memory(server, like, rules)
    start = load_tree(folder.path / START_FILE, like)[0]
    publisher, own = _publisher(folder, config, algorithm.partition, heats, place)
    if place and not files:
        raise UserError(f"devices must be told where to find what is written to '{place}': give --files URL")
    hub = Hub(
        Coordinator(server, rules),
        rows,
        folder.path / VERSIONS,
        start,
        clock,
        publisher=publisher,
        at_end=lambda hub: _finish(folder, hub),
        pair=pair,
        spent=promised.spent if promised else None,
        masked=masked,
    )
    offer = _offer(folder.run, config, algorithm, source, options, files)
    return Opened(hub, offer._replace(helper=pair.helper_key.hex() if pair else ""), own)


def _publisher(
    folder: Folder, config: Config, partition: Partition, heats: Mapping[str, Heat], place: str
) -> tuple[Publisher | None, Path | None]:
    """What writes slices as files, if `serving.way` says so, and the folder that the server hands out itself."""
    way, own = config.serving.way, folder.path / FILES
    one_of("serving.way", way, ("broadcast", "on_demand", "pregenerated", "private"))
    if way in ("on_demand", "private"):
        return None, None
    where = open_place(place or own)
    served = None if place else own
    if way == "broadcast":
        return WholePublisher(where, partition, folder.run), served
    return PagePublisher(where, partition, folder.run, config.deploy.page_rows, heats), served


def _offer(
    run: str,
    config: Config,
    algorithm: Algorithm,
    source: Source,
    options: Mapping[str, Any],
    files: str,
) -> Offer:
    return Offer(
        run=run,
        model=algorithm.partition.digest,
        config=config.to_toml(),
        settings=config.flat(),
        leaves=describe_leaves(algorithm.partition),
        options=options,
        shapes={name: list(shape) for name, shape in source.shapes.items()},
        types=source.types,
        vocabularies={name: values.tolist() for name, values in source.vocabularies.items()},
        client=source.client,
        files=files,
    )


def _finish(folder: Folder, hub: Hub) -> None:
    """Write what all rounds were like, and the model, as in the folder of any run."""
    folder.replace_records(hub.records())
    number = hub.round().number
    folder.save_model(hub.state(number).params, {"round": number})


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
            "trained": role.trained if role and role.space else None,
        } | ({"there": True} if role and role.there else {})
    return told


def only_known(source: Source, num_clients: int = 1, info: Mapping[str, Any] | None = None) -> ClientStore:
    """A store of so many clients and the same form, without their examples."""
    columns = {name: np.zeros((0, *shape), np.int32) for name, shape in source.shapes.items()}
    none = np.zeros(num_clients, np.int64)
    return ClientStore(columns, none, none, np.arange(num_clients), dict(source.vocabularies), info or {})
