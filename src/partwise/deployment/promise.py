"""What a deployed run promises to its clients, and what its servers need to keep it.

Over a network, noise and cohorts come from secret randomness: that of a simulation follows from the seed, which all
devices are told.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from pathlib import Path

from partwise.algorithm import Algorithm
from partwise.algorithms.registry import training_split
from partwise.checkpoint import read_file, write_file
from partwise.config.guarded_heat import guarded_heats
from partwise.config.parts import HEATS, round_weights
from partwise.config.protection import Protection, protection
from partwise.config.secure_sums import bits_for, noise_share
from partwise.config.settings import Config
from partwise.data.heat import Heat
from partwise.data.store import ClientStore
from partwise.deployment.helper_link import HelperLink
from partwise.deployment.masked_sums import MaskedSums
from partwise.deployment.pair import Pair, make_agreement, with_promise
from partwise.deployment.rules import make_rules
from partwise.deployment.server_noise import AddNoise, own_noise
from partwise.deployment.stages import FEWEST
from partwise.privacy.secret_draws import Seed
from partwise.selection.key_heat import count_heats
from partwise.server.cohort import parse_sampling
from partwise.types import UserError

COHORTS_FILE = "cohorts.key"  # what cohorts are drawn by; who knows it knows who takes part


def promised_config(config: Config, clients: Iterable[str]) -> Config:
    """The configuration with all that devices must know to make the same numbers: the population, and the noise.
    The population are those of the clients that can be drawn. Held-out ones never train, and are promised
    nothing."""
    if config.privacy.clip is None:
        return config
    rules = make_rules(config)
    num_clients = sum(not rules.is_held_out(name) for name in clients)
    config = config.changed({"deploy.population": config.deploy.population or num_clients})
    promised = protection(config, num_clients)
    assert promised is not None
    if not math.isinf(promised.budget) and promised.most_rounds(config.rounds) < config.rounds:
        raise UserError(
            f"privacy.epsilon = {promised.budget:g} is spent after {promised.most_rounds(config.rounds):,} rounds: "
            f"give --rounds, or leave privacy.noise out, and it is found for all {config.rounds:,} rounds"
        )
    return config.changed({"privacy.noise": promised.ledger.rounds.noise})


def check_promise(config: Config) -> None:
    """Raise `UserError` if a configuration asks for something that a network cannot keep."""
    part, deploy, way = config.privacy, config.deploy, config.serving.way
    if way == "private" and part.sums != "two_servers":
        raise UserError("serving.way = private needs two servers: set privacy.sums=two_servers")
    if part.clip is None:
        return
    if part.noise_cohort:
        raise UserError("privacy.noise_cohort is for simulations: nobody would be protected. Leave it out")
    if part.mechanism != "independent" and part.sums == "two_servers":
        raise UserError(
            f"privacy.mechanism = {part.mechanism} takes back noise of earlier rounds, and of two servers each has "
            f"its own: set privacy.mechanism=independent, or privacy.sums to plain or masked"
        )
    if deploy.precision != "float32":
        raise UserError(
            f"deploy.precision = {deploy.precision} rounds updates after they were clipped, which can make them "
            f"longer than privacy.clip: set deploy.precision=float32"
        )
    if deploy.buffer:
        raise UserError("with privacy.clip, deploy.buffer must be 0: its chances are not accounted for")
    if part.sums != "plain":
        if deploy.held_out:
            raise UserError(
                f"with privacy.sums = {part.sums}, deploy.held_out must be 0: held-out clients would report their "
                f"metrics one by one, and the server would read them"
            )
        if deploy.reports == "sum":
            raise UserError(
                f"privacy.sums = {part.sums} takes a report of each client: set deploy.reports=clients"
            )
    if part.sums == "masked" and config.cohort.size < FEWEST:
        raise UserError(
            f"privacy.sums = masked hides a client among others: set cohort.size to at least {FEWEST}"
        )


def drawn_from(config: Config) -> int:
    """The fewest clients that a cohort may be drawn from. If clients wait, chances do not matter."""
    chances = config.privacy.clip is not None and parse_sampling(config.cohort.sampling).wait == 1
    return config.deploy.population if chances else 0


def make_pair(
    algorithm: Algorithm, config: Config, run: str, least: int, helper: HelperLink | None
) -> Pair | None:
    """This server and its helper, if the run has two servers."""
    if config.privacy.sums != "two_servers":
        if helper is not None:
            raise UserError("a helper was given, and this run has none (privacy.sums): leave --helper out")
        return None
    if helper is None:
        raise UserError(
            "this run has two servers (privacy.sums): give the second one with --helper URL and --helper-token "
            "FILE (`partwise helper` starts one)"
        )
    agreement = with_promise(make_agreement(algorithm, run), config, config.deploy.population, least)
    return Pair(agreement, algorithm, helper)


def make_masked(algorithm: Algorithm, config: Config) -> MaskedSums | None:
    """What adds up masked reports, if the run has them."""
    if config.privacy.sums != "masked":
        return None
    promised = protection(config, config.deploy.population)
    return MaskedSums(algorithm, noise_share(promised) if promised else None)


def make_noise(promised: Protection | None) -> AddNoise | None:
    """What adds this server's noise to its sums. Of two servers, each adds noise to its share instead; and where
    clients add it, `MaskedSums` adds what is missing."""
    if promised is None or promised.sums == "two_servers" or noise_share(promised):
        return None
    return own_noise(promised.door, bits_for(promised) if promised.sums == "masked" else None)


def known_heats(config: Config, algorithm: Algorithm, store: ClientStore) -> dict[str, Heat]:
    """The heat that a server may know: what a run has counted before (`server.counts`), or what the data here says
    of the clients that can take part. If clients are promised privacy, it is counted with noise, or not at all."""
    if HEATS in store.info:
        return store.info[HEATS]
    promised, partition, rules = (
        protection(config, store.num_clients),
        algorithm.partition,
        make_rules(config),
    )
    if promised is not None and config.server.mean != "heat":
        return {}
    weights = round_weights(algorithm.model, config, store, training_split(config))
    weights[[rules.is_held_out(str(name)) for name in store.client_ids.tolist()]] = 0
    if promised is not None:
        return guarded_heats(partition, config, store, weights, promised, secrets.token_bytes(32))
    by = "samples" if config.server.weighting == "examples" else "clients"
    return count_heats(store, partition, by, weights)


def keep_cohort_seed(folder: Path, config: Config) -> None:
    """Make what cohorts are drawn by, if it must be a secret."""
    if config.privacy.clip is not None:
        write_file(folder / COHORTS_FILE, secrets.token_hex(32).encode(), mode=0o600)


def cohort_seed(folder: Path, config: Config) -> Seed:
    """What cohorts are drawn by: the run's seed, or a secret if clients are promised privacy."""
    if config.privacy.clip is None:
        return config.seed
    return bytes.fromhex(read_file(folder / COHORTS_FILE).decode())
