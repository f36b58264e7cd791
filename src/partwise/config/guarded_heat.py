"""Heat that clients are promised something about (`privacy.heat`)."""

from __future__ import annotations

import numpy as np

from partwise.config.protection import Protection
from partwise.config.settings import Config
from partwise.data.heat import Heat
from partwise.data.heat_gaussian import count_limited, gaussian_heats
from partwise.data.heat_private import private_heat, randomized_counts
from partwise.data.store import ClientStore
from partwise.model.partition import Partition
from partwise.privacy.secret_draws import Seed, draws_of
from partwise.selection.key_heat import count_heats, held_pairs
from partwise.types import UserError

STREAM = 0x48454154  # the randomness of heat, apart from that of cohorts


def guarded_heats(
    partition: Partition,
    config: Config,
    store: ClientStore,
    weights: np.ndarray,
    promised: Protection,
    seed: Seed,
) -> dict[str, Heat]:
    """The heat of every key space, with the noise that the configuration names. It depends on the seed alone, so a
    simulation that goes on has the same; over a network, the seed is secret bytes. Clients of weight 0 are not
    counted; how many they are is not told (`Heat.total` is that of the store if the counts have noise)."""
    if promised.heat is None:
        raise UserError(
            "server.mean = heat counts the holders of rows: with privacy.clip, count them privately "
            "(privacy.heat=gaussian), or set server.mean=cohort"
        )
    rng = draws_of(seed, STREAM)
    part = config.privacy
    if part.heat == "gaussian":
        keys = {space: partition.num_keys(space) for space in partition.spaces}
        able = store.take(weights > 0)
        counted = count_limited(held_pairs(able, partition), keys, able.num_clients, part.heat_keys, rng)
        counted = counted._replace(total=store.num_clients)
        return gaussian_heats(counted, promised.heat.noise, part.heat_keys, rng)
    heats = count_heats(store, partition, weights=weights)
    sent = {space: randomized_counts(heat, part.heat_epsilon, rng) for space, heat in heats.items()}
    return {
        space: private_heat(counts, int(heats[space].total), part.heat_epsilon, space)
        for space, counts in sent.items()
    }
