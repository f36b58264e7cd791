"""The ledger: what is released together costs more than any part, less than their sum, and keeps the budget."""

from __future__ import annotations

import math

import pytest

from partwise.privacy.accounting import Rounds, epsilon, gaussian_noise, sensitivity
from partwise.privacy.ledger import Ledger, SingleRelease
from partwise.types import UserError

dp = pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")

DELTA = 1e-4
POISSON = Rounds(1.0, 50, 1000, "poisson")


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "apart"])
def test_together_costs_more_than_each_and_less_than_the_sum(sampling):
    rounds = Rounds(3.0, 20, 1000, sampling, separation=10 if sampling == "apart" else 1)
    relation = "replaced" if sampling == "fixed" else "added"
    heat = SingleRelease("heat", gaussian_noise(1.0, DELTA, relation))
    ledger = Ledger(rounds, DELTA, (heat,))
    updates, counted = ledger.entries(30)
    assert counted["epsilon_alone"] == pytest.approx(1.0, rel=0.02 if relation == "added" else 0.2)
    assert updates["epsilon_alone"] == epsilon(rounds, 30, DELTA)
    together = ledger.epsilon(30)
    assert max(updates["epsilon_alone"], 1.0) < together
    assert together < updates["epsilon_alone"] + counted["epsilon_alone"]
    assert ledger.epsilon(0) == counted["epsilon_alone"]


def test_the_budget_covers_everything():
    ledger = Ledger(POISSON, DELTA, (SingleRelease("heat", gaussian_noise(2.0, DELTA)),))
    found = ledger.calibrated(40, 4.0)
    assert 3.9 < found.epsilon(40) <= 4.0
    alone = Ledger(POISSON, DELTA).calibrated(40, 4.0)
    assert found.rounds.noise > alone.rounds.noise
    assert found.most_rounds(4.0, 400) in range(40, 43)


def test_heat_alone_may_not_cost_the_budget():
    ledger = Ledger(POISSON, DELTA, (SingleRelease("heat", gaussian_noise(2.0, DELTA)),))
    with pytest.raises(UserError, match=r"privacy.heat_epsilon"):
        ledger.calibrated(40, 1.9)


def test_without_noise_anything_costs_everything():
    assert Ledger(POISSON, DELTA, (SingleRelease("heat", 0.0),)).epsilon(1) == math.inf


def test_trials_are_as_so_many_times_the_rounds():
    assert epsilon(POISSON._replace(trials=4), 10, DELTA) == epsilon(POISSON, 40, DELTA)
    apart = Rounds(8.0, 50, 1000, "apart", separation=10)
    thrice = epsilon(apart._replace(trials=3), 30, DELTA)
    assert thrice == pytest.approx(epsilon(apart._replace(noise=8 / math.sqrt(3)), 30, DELTA), rel=0.01)


def test_rounds_apart_are_one_gaussian_mechanism():
    apart = Rounds(6.0, 50, 1000, "apart", separation=10)
    assert sensitivity(apart, 30) == pytest.approx(math.sqrt(3))
    assert sensitivity(apart, 31) == 2
    expected = dp.get_epsilon_gaussian(6 / math.sqrt(3), DELTA)
    assert epsilon(apart, 30, DELTA) == pytest.approx(expected, rel=0.01)
