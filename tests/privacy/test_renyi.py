"""Rényi divergences of Skellam noise: never below the exact ones, and for Gaussian noise the accountant's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from partwise.privacy.accounting import Rounds, epsilon, gaussian_noise, most_rounds, noise_for
from partwise.privacy.grid import Grid
from partwise.privacy.ledger import Ledger, SingleRelease
from partwise.privacy.renyi import (
    ORDERS,
    gaussian_divergences,
    poisson_sampled,
    skellam_divergences,
    skellam_moments,
    without_replacement,
)

dp = pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")

CLIENTS = 6040
DELTA = CLIENTS**-1.1
GRID = Grid(most=165, clip=1.0, share=0.1, spread=math.sqrt(1.02))
POISSON = Rounds(1.0, 100, CLIENTS, "poisson", 165, grid=GRID)
FIXED = Rounds(4.0, 100, CLIENTS, "fixed", grid=GRID)


def exact(order, over, under):
    """The divergence of two distributions on whole numbers, given by their log chances."""
    terms = order * over - (order - 1) * under
    return np.logaddexp.reduce(terms) / (order - 1)


@pytest.mark.parametrize(("variance", "moved"), [(2.0, 1), (20.0, 3), (50.0, 20), (400.0, 15)])
@pytest.mark.parametrize("chance", [0.02, 0.4, 1.0])
def test_the_exact_divergence_is_never_larger(variance, moved, chance):
    """Of one coordinate, in both directions: a client is added, and it is removed."""
    far = math.ceil(moved + 30 * math.sqrt(variance) + 30)
    numbers = np.arange(-far, far + 1)
    without = stats.skellam.logpmf(numbers, variance / 2, variance / 2)
    moved_by = stats.skellam.logpmf(numbers - moved, variance / 2, variance / 2)
    finite = np.isfinite(without) & np.isfinite(moved_by)
    without, moved_by = without[finite], moved_by[finite]
    drawn = moved_by
    if chance < 1:
        drawn = np.logaddexp(math.log1p(-chance) + without, math.log(chance) + moved_by)
    bound = skellam_divergences(math.sqrt(variance) / moved, 1 / moved, "poisson", chance)
    for order, most in zip(ORDERS[:12], bound, strict=False):
        added, removed = exact(order, drawn, without), exact(order, without, drawn)
        assert removed <= added * (1 + 1e-6) + 1e-12
        assert added <= most * (1 + 1e-6) + 1e-12
    if variance > 100 and chance == 1:
        assert exact(2, drawn, without) == pytest.approx(bound[0], rel=0.05)


@pytest.mark.parametrize(("noise", "chance"), [(0.6, 100 / 6040), (1.5, 100 / 6040), (3.0, 0.3)])
def test_gaussian_moments_give_what_the_accountant_gives(noise, chance):
    moments = skellam_moments(noise, step=0.0)
    accountant = dp.rdp.RdpAccountant(ORDERS)
    accountant.compose(dp.PoissonSampledDpEvent(chance, dp.GaussianDpEvent(noise)))
    ours = poisson_sampled(moments, chance) / (ORDERS - 1)
    np.testing.assert_allclose(ours, accountant._rdp, rtol=1e-6)


@pytest.mark.parametrize(("noise", "chance"), [(2.0, 100 / 6040), (6.0, 0.3)])
def test_cohorts_of_one_size_cost_no_less_than_the_accountant_says(noise, chance):
    """It knows more of Gaussian moments than what bounds them."""
    ours = without_replacement(skellam_moments(noise, 0.0, moved=2), chance) / (ORDERS - 1)
    accountant = dp.rdp.RdpAccountant(ORDERS, neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(10_000, round(1e4 * chance), dp.GaussianDpEvent(noise / 2))
    accountant.compose(event)
    theirs = np.asarray(accountant._rdp)
    assert (ours >= theirs * (1 - 0.02)).all()  # 10,000 chances are rounded
    assert ours[0] == pytest.approx(theirs[0], rel=0.02)
    assert (ours <= gaussian_divergences(noise / 2) * (1 + 1e-9)).all()


@pytest.mark.parametrize(("bits", "published"), [(14, 1.426), (18, 1.389), (40, 1.386)])
def test_the_published_price_of_one_release(bits, published):
    """185,300 numbers at z = 3, of a clip that is 2^bits steps; rounding moves a client by the root of their
    number."""
    moved = 1 + math.sqrt(185_300) / 2**bits
    costs = skellam_divergences(3 / moved, 2.0**-bits, "poisson", 1.0)
    assert dp.rdp.compute_epsilon(ORDERS, costs, 1e-5)[0] == pytest.approx(published, abs=5e-4)


def test_a_fine_grid_costs_nothing_and_a_coarse_one_more():
    """Clips of 2^23 steps, and of less than one."""
    fine, coarse = (POISSON._replace(most=None, grid=GRID._replace(clip=clip)) for clip in (1.0, 1e-7))
    gaussian = dp.rdp.RdpAccountant(ORDERS)
    gaussian.compose(dp.PoissonSampledDpEvent(POISSON.chance, dp.GaussianDpEvent(1.0)), 500)
    assert epsilon(fine, 500, DELTA) == pytest.approx(gaussian.get_epsilon(DELTA), rel=1e-9)
    assert epsilon(coarse, 500, DELTA) > 1.1 * epsilon(fine, 500, DELTA)


@pytest.mark.parametrize("rounds", [POISSON, FIXED])
def test_it_costs_more_than_what_is_known_of_gaussian_noise(rounds):
    """Fixed cohorts have Rényi divergences too; for Poisson ones, privacy loss distributions are tighter."""
    gaussian = rounds._replace(grid=None, most=None)
    assert 1 <= epsilon(rounds, 500, DELTA) / epsilon(gaussian, 500, DELTA) < 1.25


@pytest.mark.parametrize("rounds", [POISSON, FIXED])
def test_the_noise_that_is_found_keeps_the_budget_of_skellam_rounds(rounds):
    z = noise_for(rounds, 40, 2.0, DELTA)
    found = rounds._replace(noise=z)
    assert 1.95 < epsilon(found, 40, DELTA) <= 2.0
    assert 40 <= most_rounds(found, 2.0, DELTA, 1000) <= 43
    costs = [epsilon(found, number, DELTA) for number in (0, 1, 10, 100)]
    assert costs[0] == 0
    assert costs == sorted(costs)
    assert epsilon(found._replace(noise=0.0), 1, DELTA) == math.inf


def test_cohorts_that_are_cut_cost_delta():
    cut = POISSON._replace(most=150)
    assert cut.cut == stats.binom.sf(149, CLIENTS, 100 / CLIENTS) == pytest.approx(1.5e-6, rel=0.02)
    whole = POISSON._replace(most=None)
    assert whole.cut == 0
    assert epsilon(cut, 10, DELTA) == epsilon(whole, 10, DELTA - 10 * cut.cut)
    assert epsilon(cut, 100, DELTA) == math.inf  # nothing is left of delta


@pytest.mark.parametrize("rounds", [POISSON, FIXED])
def test_heat_and_rounds_together_cost_less_than_the_sum(rounds):
    relation = "replaced" if rounds.sampling == "fixed" else "added"
    ledger = Ledger(rounds, DELTA, (SingleRelease("heat", gaussian_noise(1.0, DELTA, relation)),))
    updates, heat = ledger.entries(30)
    assert "Skellam" in updates["mechanism"]
    assert heat["epsilon_alone"] == pytest.approx(1.0, rel=0.2)
    together = ledger.epsilon(30)
    assert max(updates["epsilon_alone"], heat["epsilon_alone"]) < together
    assert together < updates["epsilon_alone"] + heat["epsilon_alone"]
    assert ledger.epsilon(0) == heat["epsilon_alone"]


def test_trials_cost_as_so_many_times_the_rounds():
    assert epsilon(POISSON._replace(trials=4), 10, DELTA) == epsilon(POISSON, 40, DELTA)


def test_everybody_in_every_round():
    all_of_them = Rounds(3.0, 50, 50, "poisson", 50, grid=GRID)
    once = dp.rdp.compute_epsilon(ORDERS, gaussian_divergences(3.0), 1e-5)[0]
    assert epsilon(all_of_them._replace(most=None), 1, 1e-5) == pytest.approx(once, rel=1e-6)
    replaced = dp.rdp.compute_epsilon(ORDERS, gaussian_divergences(1.5), 1e-5)[0]
    assert epsilon(all_of_them._replace(sampling="fixed", most=None), 1, 1e-5) == pytest.approx(
        replaced, rel=1e-6
    )
