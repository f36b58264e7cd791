"""The algorithm that a server offers, on a device. It loads nothing that only a server needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partwise.algorithm import Algorithm
from partwise.algorithms.registry import prepare, recorded
from partwise.config.settings import Config, parse_toml
from partwise.data.store import ClientStore
from partwise.deployment.link import Offer
from partwise.runs.resolve import entry_of
from partwise.tasks import Task
from partwise.types import UserError


def algorithm_of(offer: Offer, store: ClientStore) -> Algorithm:
    """The run's algorithm on a device with these clients."""
    algorithm = algorithm_with(recorded(parse_toml(offer.config)), offer.options, store)
    check_model(offer, algorithm)
    return algorithm


def check_model(offer: Offer, algorithm: Algorithm) -> None:
    """Raise `UserError` if the server has another model than this algorithm."""
    if algorithm.partition.digest != offer.model:
        raise UserError(
            "the server's model is not the one that its settings make here: this device has another version of "
            "partwise, or of the package that the task comes from. Install the server's"
        )


def least_examples(offer: Offer) -> int:
    """The examples that a client must have to take part (`cohort.min_examples`)."""
    return recorded(parse_toml(offer.config)).cohort.min_examples


def algorithm_with(config: Config, options: Mapping[str, Any], store: ClientStore) -> Algorithm:
    """The algorithm of a configuration; `store` has the training clients, as far as they are known here."""
    personal, stateful = entry_of(config.task).settings(**options)
    # It passed when the run was founded; whether the task or the user chose it, nobody knows here any more.
    chosen = {f"select.{space}": text for space, text in config.select.items()}
    own = Task(config.task, store, store, store, personal, stateful, options=options, defaults=chosen)
    prepared = prepare(own, config)
    return prepared.build(prepared.rates)
