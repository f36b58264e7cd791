"""A run that is deployed: what its server needs, and what its devices need, from a task and a configuration."""

from __future__ import annotations

from pathlib import Path

from partwise.algorithm import Algorithm, init_server
from partwise.algorithms.registry import prepare, recorded
from partwise.config.settings import Config, parse_toml
from partwise.data.store import ClientStore
from partwise.deployment.coordinator import Coordinator, Rules
from partwise.deployment.hub import Hub
from partwise.deployment.journal import Journal
from partwise.deployment.link import Offer
from partwise.randomness import INIT_ROUND, round_rng
from partwise.runs.client_file import source_of
from partwise.runs.document import to_plain
from partwise.runs.folder import identity
from partwise.runs.resolve import entry_of
from partwise.server.round import Server
from partwise.tasks import Task


def open_hub(
    task: Task, config: Config, rules: Rules, folder: str | Path, journal: str | None = None
) -> tuple[Hub, Offer]:
    """The server's side of a run, in a folder.

    Args:
        task: The task. Of its data only what the algorithm counts (heat) and the source ids of keys are used.
        config: All settings.
        rules: How rounds are run.
        folder: Where the versions of the model are, and the journal, unless it is elsewhere.
        journal: The URL of the journal's database.
    """
    prepared, folder = prepare(task, config), Path(folder)
    algorithm, run = prepared.build(prepared.rates), identity(config, {})
    source = source_of(task.train)
    offer = Offer(
        run=run,
        model=algorithm.partition.digest,
        config=config.to_toml(),
        options=to_plain(dict(task.options)),
        shapes=to_plain(source.shapes),
        vocabularies={name: values.tolist() for name, values in source.vocabularies.items()},
        client=source.client,
    )
    folder.mkdir(parents=True, exist_ok=True)
    rows = Journal(journal or f"sqlite:///{folder / 'journal.db'}", run)
    start = init_server(algorithm, round_rng(config.seed, INIT_ROUND))
    return Hub(Coordinator(Server(algorithm, run), rules), rows, folder / "versions", start), offer


def algorithm_of(offer: Offer, store: ClientStore) -> Algorithm:
    """The run's algorithm on a device with these clients."""
    config = recorded(parse_toml(offer.config))
    personal, stateful = entry_of(config.task).settings(**offer.options)
    own = Task(config.task, store, store, store, personal, stateful, options=offer.options)
    prepared = prepare(own, config)
    return prepared.build(prepared.rates)
