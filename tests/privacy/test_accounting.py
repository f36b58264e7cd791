"""Epsilon: published values, the trap of replaced clients, and what an epsilon must always be."""

from __future__ import annotations

import math

import pytest

from partwise.privacy.accounting import Rounds, default_delta, epsilon, most_rounds, noise_for
from partwise.types import UserError

dp = pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")

CLIENTS = 6040
DELTA = CLIENTS**-1.1
# rounds, cohort -> z for epsilon 1, 4 and 8, with Poisson sampling
PUBLISHED = {
    (100, 100): (0.978, 0.611, 0.481),
    (500, 100): (1.454, 0.745, 0.586),
    (1000, 100): (1.896, 0.844, 0.651),
    (500, 50): (0.957, 0.607, 0.491),
}
# the same with cohorts of one size: z in units of what replacing a client changes, twice the clip
WITHOUT_REPLACEMENT = {
    (100, 100): (1.478, 0.724, 0.586),
    (500, 100): (2.820, 0.981, 0.700),
    (1000, 100): (3.893, 1.324, 0.812),
    (500, 50): (1.552, 0.708, 0.580),
}


@pytest.mark.parametrize(("number", "cohort"), PUBLISHED)
def test_the_published_table(number, cohort):
    for target, z in zip((1.0, 4.0, 8.0), PUBLISHED[number, cohort], strict=True):
        assert epsilon(Rounds(z, cohort, CLIENTS, "poisson"), number, DELTA) == pytest.approx(
            target, rel=0.01
        )


@pytest.mark.parametrize(("number", "cohort"), WITHOUT_REPLACEMENT)
def test_cohorts_of_one_size(number, cohort):
    for target, z in zip((1.0, 4.0, 8.0), WITHOUT_REPLACEMENT[number, cohort], strict=True):
        found = epsilon(Rounds(2 * z, cohort, CLIENTS, "fixed"), number, DELTA)
        assert found == pytest.approx(target, rel=0.01)


def test_replacing_a_client_changes_the_sum_by_twice_the_clip():
    """The accountants disagree on who must say so: PLD doubles the sensitivity itself, RDP leaves it to us."""
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    replace = dp.NeighboringRelation.REPLACE_ONE
    pld, rdp = PLDAccountant(replace), RdpAccountant(neighboring_relation=replace)
    for accountant in (pld, rdp):
        accountant.compose(dp.GaussianDpEvent(1.0))
    assert pld.get_epsilon(1e-5) == pytest.approx(9.997, abs=0.01)
    assert rdp.get_epsilon(1e-5) == pytest.approx(4.729, abs=0.01)
    # ours, with a cohort of everybody: noise 1 is half of what a replaced client changes
    ours = epsilon(Rounds(1.0, 1000, 1000, "fixed"), 1, 1e-5)
    doubled = RdpAccountant(neighboring_relation=replace)
    doubled.compose(dp.GaussianDpEvent(0.5))
    assert ours == pytest.approx(doubled.get_epsilon(1e-5), rel=1e-6)


def test_a_cap_on_cohorts_costs_a_little():
    capped = epsilon(Rounds(0.586, 100, CLIENTS, "poisson", 140), 500, DELTA)
    assert capped == pytest.approx(8.31, rel=0.01)
    assert capped > epsilon(Rounds(0.586, 100, CLIENTS, "poisson"), 500, DELTA)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_more_rounds_cost_more_and_more_noise_less(sampling):
    rounds = Rounds(1.0, 50, 1000, sampling)
    costs = [epsilon(rounds, number, 1e-4) for number in (0, 1, 10, 100)]
    assert costs[0] == 0
    assert costs == sorted(costs)
    assert epsilon(rounds._replace(noise=2.0), 10, 1e-4) < costs[2]
    assert epsilon(rounds._replace(noise=0.0), 10, 1e-4) == math.inf


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_the_noise_that_is_found_keeps_the_budget(sampling):
    rounds = Rounds(0.0, 50, 1000, sampling)
    z = noise_for(rounds, 40, 4.0, 1e-4)
    assert 3.9 < epsilon(rounds._replace(noise=z), 40, 1e-4) <= 4.0
    assert most_rounds(rounds._replace(noise=z), 4.0, 1e-4, 1000) in range(40, 43)
    assert most_rounds(rounds._replace(noise=z), 4.0, 1e-4, 10) == 10
    assert most_rounds(rounds._replace(noise=0.1), 0.5, 1e-4, 10) == 0


def test_the_usual_delta():
    assert default_delta(6040) == pytest.approx(6.93e-5, rel=0.01)


def test_a_budget_that_no_noise_keeps():
    with pytest.raises(UserError, match="larger epsilon"):
        noise_for(Rounds(0.0, 50, 1000, "poisson"), 1000, 1e-9, 1e-12)
