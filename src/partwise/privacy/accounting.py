"""How much privacy rounds cost: epsilon and delta of a client, by `dp-accounting`.

Every round releases one noisy sum of clipped updates (DP-FedAvg, McMahan et al. 2018, Algorithm 1): a Gaussian
mechanism whose noise has a standard deviation of z times the clip. What a client is promised depends on z, on how
cohorts are drawn, and on the number of rounds. Whatever else is released once (`once`: the noise of single Gaussian
mechanisms, in units of what a client adds to them) is composed with the rounds.

Where a client waits some rounds between two of its own (`apart`), nothing rests on how cohorts are drawn: all
rounds together are one Gaussian mechanism, and what counts is how much a client can add to all of them
(`sensitivity`; Choquette-Choo et al. 2023).

Rounds with Skellam noise (`grid`) are accounted for by Rényi divergences (`privacy.renyi`). If cohorts are cut to
`most`, the chance that one is cut is taken from delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from partwise.privacy.grid import Grid
from partwise.privacy.renyi import ORDERS, gaussian_divergences, skellam_divergences
from partwise.types import UserError

INTERVAL = 1e-3  # of the discretised privacy loss; smaller is tighter and slower
TOLERANCE = 1e-3  # of a calibrated z
LEAST_NOISE, MOST_NOISE = 0.05, 1e4  # with less, epsilon is in the hundreds, and slow to find


class Rounds(NamedTuple):
    """What a client's promise depends on, but for the number of rounds.

    noise:      z, the standard deviation of the noise in units of the clip
    cohort:     the size of a cohort; with Poisson sampling, the mean size
    population: how many clients there are
    sampling:   poisson: every client with the chance cohort / population, in every round; fixed: cohorts of one
                size, drawn without replacement; apart: a client waits `separation` rounds
    most:       with Poisson sampling, the largest cohort that is used; None: all that are drawn
    separation: with `apart`, how many rounds after a client's round it may be in another
    matrix:     with `apart`, the first column of the Toeplitz matrix of correlated noise; empty: independent noise
    trials:     how many runs there are with the same clients
    grid:       with Skellam noise, the whole numbers that sums are of; None: Gaussian noise
    """

    noise: float
    cohort: float
    population: int
    sampling: str
    most: int | None = None
    separation: int = 1
    matrix: tuple[float, ...] = ()
    trials: int = 1
    grid: Grid | None = None

    @property
    def chance(self) -> float:
        """That a client is in a cohort."""
        return min(1.0, self.cohort / self.population)

    @property
    def cut(self) -> float:
        """The chance that a Poisson cohort is cut to `most` if a client is in it."""
        if self.sampling != "poisson" or self.most is None:
            return 0.0
        from scipy.stats import binom  # late: it takes half a second, which every command would wait for

        return float(binom.sf(self.most - 1, self.population, self.chance))

    @property
    def relation(self) -> str:
        """Which two sets of clients cannot be told apart."""
        if self.sampling == "apart":
            return "one client's contributions left out"
        if self.sampling == "fixed":
            return "one client's data replaced by another's"
        return "one client added or removed"


def default_delta(population: int) -> float:
    """The usual choice: population ** -1.1, below the chance to reveal a client outright."""
    return population**-1.1


@lru_cache(4096)
def epsilon(rounds: Rounds, number: int, delta: float, once: tuple[float, ...] = ()) -> float:
    """Epsilon after so many rounds, and what was released once. It is infinite without noise."""
    if number == 0 and not once:
        return 0.0
    if (number and rounds.noise <= 0) or min(once, default=1.0) <= 0:
        return math.inf
    if rounds.grid is not None:
        return _skellam_epsilon(rounds, number, delta, once)
    accountant = _accountant(rounds)
    accountant.compose(_events(rounds, number, once))
    return float(accountant.get_epsilon(delta))


@lru_cache(64)
def noise_for(
    rounds: Rounds, number: int, target: float, delta: float, once: tuple[float, ...] = ()
) -> float:
    """The smallest z (to a thousandth) with which so many rounds, and what is released once, stay within `target`.
    `rounds.noise` is not read."""
    from scipy.optimize import brentq

    before = epsilon(rounds, 0, delta, once)
    if once and before >= target:
        raise UserError(
            f"what is released before the first round costs epsilon = {before:.3g}, and the budget is {target:g}: "
            f"give it less than the budget (privacy.heat_epsilon)"
        )
    cost = lambda noise: epsilon(rounds._replace(noise=noise), max(number, 1), delta, once)
    low, high = _bracket(cost, target)
    if cost(high) > target:
        raise UserError(
            f"no noise keeps {number:,} rounds within epsilon = {target:g} at delta = {delta:.3g}: allow a larger "
            f"epsilon, fewer rounds or a smaller cohort"
        )
    over = lambda noise: math.log(cost(noise) / target)
    found = brentq(over, low, high, xtol=TOLERANCE / 2) if cost(low) > target else low
    steps = math.ceil(float(found) / TOLERANCE)  # pyright: ignore[reportArgumentType]
    while cost(steps * TOLERANCE) > target:
        steps += 1
    return steps * TOLERANCE


def _bracket(cost: Callable[[float], float], target: float) -> tuple[float, float]:
    """Two noises, the second twice the first, between which the cost reaches the target. Little noise takes a long
    time to account for, so it is tried last."""
    high = 1.0
    while cost(high) > target and high < MOST_NOISE:
        high *= 2
    while high > LEAST_NOISE and cost(high / 2) <= target:
        high /= 2
    return high / 2, high


def most_rounds(rounds: Rounds, target: float, delta: float, limit: int, once: tuple[float, ...] = ()) -> int:
    """The largest number of rounds, up to `limit`, that stays within `target`."""
    if epsilon(rounds, limit, delta, once) <= target:
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if epsilon(rounds, middle, delta, once) <= target else (low, middle)
    return low


def gaussian_noise(target: float, delta: float, relation: str = "added") -> float:
    """The noise of one Gaussian mechanism that costs `target`, in units of what a client adds to its sum. If
    clients are `replaced`, the sum is of numbers that are not negative: two clients differ by sqrt(2) of what one
    adds."""
    return _library().get_sigma_gaussian(target, delta) * (math.sqrt(2) if relation == "replaced" else 1)


def sensitivity(rounds: Rounds, number: int) -> float:
    """How much a client can add to the first so many rounds together, in units of the clip: with independent noise
    the root of how often it takes part; with correlated noise the norm of its columns of the matrix."""
    if not rounds.matrix:
        return math.sqrt(-(-number // rounds.separation))
    column = np.asarray(rounds.matrix[:number])
    moved = np.zeros(number)
    for first in range(0, number, rounds.separation):
        reach = min(len(column), number - first)
        moved[first : first + reach] += column[:reach]
    return float(np.linalg.norm(moved))


def _shrunk(rounds: Rounds) -> float:
    """What the noise of something released once is divided by: see `gaussian_noise`."""
    return math.sqrt(2) if rounds.sampling == "fixed" else 1.0


def _events(rounds: Rounds, number: int, once: tuple[float, ...]) -> Any:
    """So many rounds and what was released once, for the accountant."""
    dp = _library()
    events: list[Any] = [dp.GaussianDpEvent(noise / _shrunk(rounds)) for noise in once]
    if number and rounds.sampling == "apart":
        whole = dp.GaussianDpEvent(rounds.noise / sensitivity(rounds, number))
        events.append(dp.SelfComposedDpEvent(whole, rounds.trials))
    elif number:
        events.append(dp.SelfComposedDpEvent(_event(rounds), number * rounds.trials))
    return dp.ComposedDpEvent(events)


def _event(rounds: Rounds) -> Any:
    """One round, for the accountant."""
    dp = _library()
    if rounds.sampling == "fixed":
        # Replacing a client moves the sum by twice the clip, and this accountant leaves that to its caller.
        size = round(rounds.cohort)
        return dp.SampledWithoutReplacementDpEvent(
            rounds.population, size, dp.GaussianDpEvent(rounds.noise / 2)
        )
    if rounds.most is None or rounds.most >= rounds.population:
        return dp.PoissonSampledDpEvent(rounds.chance, dp.GaussianDpEvent(rounds.noise))
    return dp.TruncatedSubsampledGaussianDpEvent(rounds.population, rounds.chance, rounds.most, rounds.noise)


def _skellam_epsilon(rounds: Rounds, number: int, delta: float, once: tuple[float, ...]) -> float:
    assert rounds.grid is not None
    number *= rounds.trials
    costs = np.zeros(len(ORDERS))
    for noise in once:
        costs += gaussian_divergences(noise / _shrunk(rounds))
    if number:
        step = rounds.grid.step(rounds.noise)
        costs += number * skellam_divergences(rounds.noise, step, rounds.sampling, rounds.chance)
    left = delta - number * rounds.cut
    return float(_library().rdp.compute_epsilon(ORDERS, costs, left)[0]) if left > 0 else math.inf


def _accountant(rounds: Rounds) -> Any:
    dp = _library()
    if rounds.sampling == "fixed":
        return dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    from dp_accounting.pld import PLDAccountant

    return PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=INTERVAL)


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError:
        raise UserError(
            "differential privacy needs a package that is not installed: pip install 'partwise[privacy]'"
        ) from None
    return dp_accounting
