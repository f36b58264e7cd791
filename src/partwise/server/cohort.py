"""Which clients take part in a round. The choice depends only on the seed and the round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from partwise.privacy.secret_draws import Seed, draws_of
from partwise.types import UserError, unknown


class Sampling(NamedTuple):
    """How many clients are drawn, and how many of their reports are used. Drawing is always without
    replacement.

    draw: (random generator, clients to ask, population) -> number of clients to draw
    most: size of a cohort -> the largest number of reports that are used; None means all
    wait: a client that was asked is not asked again before so many rounds
    """

    name: str
    draw: Callable[[Any, int, int], int]
    most: Callable[[int], int | None]
    wait: int = 1


def fixed() -> Sampling:
    """Always draw exactly the number of clients to ask. The first `size` reports are used."""
    return Sampling("fixed", lambda rng, asked, population: asked, lambda size: size)


def poisson(most: int | None = None) -> Sampling:
    """Draw every client independently, with probability asked / population. The number of clients is then
    binomial.

    If more than `most` clients report, a random `most` of them are used (truncated Poisson).
    """
    name = "poisson" if most is None else f"poisson:{most}"
    draw = lambda rng, asked, population: int(rng.binomial(population, asked / population))
    return Sampling(name, draw, lambda size: most)


def apart(wait: int = 60) -> Sampling:
    """Let a client that was asked wait. In a simulation the population is split at random into `wait` groups of
    about the same size, and the rounds go through them in turn: exactly the number of clients to ask is drawn from
    the round's group. Over a network clients come and go, and it is noted who took part (`deployment.drawing`)."""
    return Sampling(f"apart:{wait}", lambda rng, asked, population: asked, lambda size: size, wait)


FIXED = fixed()
SAMPLINGS: Mapping[str, Callable[..., Sampling]] = {"fixed": fixed, "poisson": poisson, "apart": apart}
GROUPS = 0xFFFFFFFD  # the "round" whose randomness splits a population into groups
NUMBERS = {"poisson": "MOST", "apart": "ROUNDS"}  # what the number after the colon is


def parse_sampling(text: str) -> Sampling:
    """Read the setting: `fixed`, `poisson`, `poisson:100` for at most a hundred clients, or `apart:60` for clients
    that wait sixty rounds."""
    name, colon, number = str(text).partition(":")
    if name not in SAMPLINGS:
        raise unknown("value of cohort.sampling", name, SAMPLINGS)
    if not colon:
        return SAMPLINGS[name]()
    if name == "fixed":
        raise UserError(
            f"cohort.sampling = fixed takes no number of clients (cohort.size is it), not '{text}'"
        )
    if not number.isdecimal() or len(number) > 9 or int(number) < 1:
        raise UserError(
            f"cohort.sampling = {name}:{NUMBERS[name]} needs a number of at least 1, as in {name}:100, not '{text}'"
        )
    return SAMPLINGS[name](int(number))


class Recruiting(NamedTuple):
    """How a cohort is chosen.

    size:           number of reports that are wanted; with Poisson sampling, the mean number
    over_selection: this many times more clients are asked (FedRecon, section 7)
    dropout:        probability that an asked client never reports
    min_examples:   reports of clients with fewer examples are not used (patent claim 12)
    sampling:       how the clients are drawn
    """

    size: int
    over_selection: float = 1.0
    dropout: float = 0.0
    min_examples: int = 0
    sampling: Sampling = FIXED

    def check(self, num_clients: int) -> Recruiting:
        """Return itself. Raises `UserError` if the settings are invalid or the population is too small."""
        if self.size < 1:
            raise UserError(f"a cohort needs at least 1 client, not {self.size}")
        if self.over_selection < 1 or not 0 <= self.dropout < 1:
            raise UserError(
                f"over_selection must be at least 1 and dropout in 0..1, "
                f"not {self.over_selection} and {self.dropout}"
            )
        if self.asked > num_clients:
            fits = int(num_clients / self.over_selection)
            remedy = (
                f"--cohort {fits} or fewer" if fits else f"less over_selection than {self.over_selection:g}"
            )
            raise UserError(
                f"{self.asked} clients are to be asked every round, but the population has only {num_clients}. "
                f"Use {remedy}."
            )
        self._check_sampling(num_clients)
        return self

    def _check_sampling(self, num_clients: int) -> None:
        name, most = self.sampling.name, self.most
        if name != "fixed" and self.over_selection != 1:
            raise UserError(
                f"with cohort.sampling = {name} there is no cohort to fill up, so cohort.over_selection must be 1, "
                f"not {self.over_selection:g}: raise cohort.size, or use cohort.sampling=fixed"
            )
        if self.asked > num_clients // self.sampling.wait:
            raise UserError(
                f"with cohort.sampling = {name} a round has a group of {num_clients // self.sampling.wait} "
                f"clients, and {self.asked} are to be asked: use a smaller --cohort, or let clients wait for fewer "
                f"rounds"
            )
        if most is not None and most < self.size:
            raise UserError(
                f"cohort.sampling = {name} cuts cohorts below cohort.size = {self.size}, their mean: use "
                f"{name.partition(':')[0]}:{2 * self.size}, or a smaller --cohort"
            )

    @property
    def asked(self) -> int:
        """How many clients are asked in every round; with Poisson sampling, the mean number."""
        return int(np.ceil(round(self.size * self.over_selection, 6)))

    @property
    def most(self) -> int | None:
        """The largest number of reports that are used in a round; None means all."""
        return self.sampling.most(self.size)

    def room(self, num_clients: int) -> int:
        """The largest cohort to expect: four standard deviations above the mean, but never more than is
        possible."""
        spread = math.sqrt(self.size * (1 - self.size / num_clients))
        likely = min(math.ceil(self.size + 4 * spread), num_clients)
        return likely if self.most is None else min(likely, self.most)


class Cohort(NamedTuple):
    """Positions of the clients whose reports are used, and what happened to the other clients that were
    asked."""

    clients: np.ndarray
    dropped: int  # never reported
    too_small: int  # reported, but with too few examples
    spare: int  # reported after the cohort was full


def recruit(recruiting: Recruiting, counts: np.ndarray, seed: Seed, round_number: int) -> Cohort:
    """Choose the cohort of a round.

    Clients are sampled without replacement. Clients that drop out or have too few examples are removed. The
    first of the remaining clients form the cohort, up to the largest number that is used.
    """
    rng = draws_of(seed, round_number)
    asked = _asked(recruiting, len(counts), rng, seed, round_number)
    stayed = asked[rng.random(len(asked)) >= recruiting.dropout] if recruiting.dropout else asked
    useful = stayed[counts[stayed] >= recruiting.min_examples] if recruiting.min_examples else stayed
    clients = useful[: recruiting.most]
    return Cohort(clients, len(asked) - len(stayed), len(stayed) - len(useful), len(useful) - len(clients))


def _asked(recruiting: Recruiting, population: int, rng: Any, seed: Seed, round_number: int) -> np.ndarray:
    """The positions of the clients that are asked in a round, in random order."""
    sampling = recruiting.sampling
    if sampling.name.startswith("apart"):
        group = _shuffled(seed, population)[round_number % sampling.wait :: sampling.wait]
        return rng.choice(group, recruiting.asked, replace=False)
    return rng.choice(population, sampling.draw(rng, recruiting.asked, population), replace=False)


@lru_cache(8)
def _shuffled(seed: Seed, population: int) -> np.ndarray:
    """All clients in an order that is the same for a whole run."""
    return draws_of(seed, GROUPS, population).permutation(population)
