"""What the options of `partwise privacy` are computed from: a task's shapes, and how many keys its clients have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from partwise.algorithms.registry import prepare, training_split
from partwise.config.parts import round_weights
from partwise.config.settings import Config
from partwise.data.heat import Heat
from partwise.data.store import ClientStore
from partwise.model.partition import Partition
from partwise.privacy.two_servers import Agreement
from partwise.randomness import client_numbers
from partwise.runs.sanity import check_cohort
from partwise.selection.choose import Choice, choose_all, top
from partwise.selection.key_heat import count_heats
from partwise.selection.keys import own_keys
from partwise.selection.serving import Sizes, sizes_of
from partwise.server.agreed import agreement_of
from partwise.server.encoding import fixed_point
from partwise.server.mean import mean
from partwise.tasks import Task

LOOKED_AT = 10_000  # of more clients, so many are looked at


class PrivacyFacts(NamedTuple):
    """A task with its settings.

    choices:    which keys a client asks for, never more than a public number
    bounded_by: space -> what that number comes from
    counts:     space -> how many keys each client asks for
    sizes:      of the parts of a client's messages
    agreement:  what two servers would agree on
    heats:      space -> how many clients hold each key
    """

    config: Config
    partition: Partition
    population: int
    choices: Mapping[str, Choice]
    bounded_by: Mapping[str, str]
    counts: Mapping[str, np.ndarray]
    sizes: Sizes
    agreement: Agreement
    heats: Mapping[str, Heat]

    @property
    def cohort(self) -> int:
        return self.config.cohort.size

    @property
    def num_words(self) -> int:
        """Of the whole update: that of shared leaves, of all rows, and sums."""
        tables = self.agreement.tables.values()
        return self.agreement.num_dense + sum(each.num_keys * each.num_words for each in tables)

    def keys_told(self) -> dict[str, dict[str, Any]]:
        """For every space, its keys, the most that a client asks for, and how many clients do ask for."""
        return {
            space: {
                "keys": form.num_keys,
                "most": form.most,
                "bounded_by": self.bounded_by[space],
                "mean": float(self.counts[space].mean()),
                "median": float(np.median(self.counts[space])),
                "p95": float(np.percentile(self.counts[space], 95)),
                "row_bytes": form.row_bytes,
                "row_words": form.num_words,
            }
            for space, form in self.agreement.tables.items()
        }


def gather_facts(task: Task, config: Config) -> PrivacyFacts:
    """Look at a task and its training clients."""
    prepared = prepare(task, config)
    check_cohort(prepared)
    algorithm = prepared.build(prepared.rates)
    partition, store = algorithm.partition, prepared.store
    choices, bounded_by, counts = _bounded(_looked_at(store), partition, algorithm.choose, config)
    words = fixed_point(mean(), 0)  # the sizes of words do not depend on what is summed
    return PrivacyFacts(
        config=config,
        partition=partition,
        population=config.deploy.population or store.num_clients,
        choices=choices,
        bounded_by=bounded_by,
        counts=counts,
        sizes=sizes_of(partition, choices, algorithm.aggregator.zero),
        agreement=agreement_of(words, partition, choices, "measured"),
        heats=count_heats(
            store, partition, weights=round_weights(algorithm.model, config, store, training_split(config))
        ),
    )


def _looked_at(store: ClientStore) -> ClientStore:
    if store.num_clients <= LOOKED_AT:
        return store.gather()
    return store.gather(np.linspace(0, store.num_clients - 1, LOOKED_AT).astype(int))


def _bounded(
    store: ClientStore, partition: Partition, choices: Mapping[str, Choice], config: Config
) -> tuple[dict[str, Choice], dict[str, str], dict[str, np.ndarray]]:
    """The choices, with the most keys of any client as their bound where they have none."""
    own, numbers = own_keys(store, partition)[0], client_numbers(store.client_ids)
    bounded, why = {}, {}
    for space, choice in choices.items():
        bounded[space], why[space] = choice, f"select.{space} = {choice.name}"
        if config.privacy.keys:
            why[space] = "privacy.keys"
        elif choice.name == "own":
            bounded[space] = top(max(1, int(own[space].counts.max(initial=1))))
            why[space] = "the most that a training client has; set privacy.keys to it or to less"
    chosen = choose_all(own, partition.all_keys, bounded, numbers, config.seed)
    return bounded, why, {space: each.counts for space, each in chosen.items()}
