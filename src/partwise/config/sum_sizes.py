"""How many clients a sum is of: at least, and at most."""

from __future__ import annotations

import math

from partwise.config.settings import Config
from partwise.privacy.accounting import Rounds
from partwise.types import UserError

SELDOM = 0.01  # share of delta that cohorts which are cut may cost


def quorum_of(config: Config) -> int:
    """The reports that a round over a network needs."""
    return max(1, math.ceil(config.deploy.quorum * config.cohort.size))


def least_of(config: Config, quorum: int) -> int:
    """The fewest reports that a secure sum is of. Cohorts that Poisson draws vary in size: half the quorum."""
    if config.privacy.sums == "plain":
        return 1
    return math.ceil(quorum / 2) if config.cohort.sampling.startswith("poisson") else quorum


def most_of(rounds: Rounds) -> int:
    """The largest number of clients that can be in a sum."""
    return rounds.most or (rounds.population if rounds.sampling == "poisson" else round(rounds.cohort))


def check_shares(config: Config, rounds: Rounds, delta: float) -> None:
    """Raise `UserError` if clients cannot know how many share the noise of a sum, or if cohorts would be cut to
    that number so often that it costs much of delta."""
    from scipy.stats import binom

    number = max(1, config.rounds) * rounds.trials
    if rounds.sampling != "poisson" or (rounds.most and number * rounds.cut <= delta / 2):
        return
    enough = int(binom.isf(SELDOM * delta / number, rounds.population, rounds.chance)) + 1
    raise UserError(
        f"privacy.mechanism = skellam gives each client of a sum its share of the noise, so a sum must be of a "
        f"known number of clients at most, and cohorts must seldom be cut to it (delta is {delta:.2g}): set "
        f"cohort.sampling=poisson:{enough} or more instead of {config.cohort.sampling}, or cohort.sampling=fixed"
    )
