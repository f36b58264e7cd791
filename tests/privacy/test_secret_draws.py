"""Secret draws: the same for the same secret, apart for each use, and distributed as NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from partwise.privacy.secret_draws import SecretDraws, draws_of
from partwise.server.cohort import Recruiting, apart, fixed, poisson, recruit

SECRET, SURE = bytes(range(32)), 1e-6


def cohorts(sampling, count: int, secret: bytes = SECRET, population: int = 40) -> list[np.ndarray]:
    wanted = Recruiting(8, sampling=sampling).check(population)
    return [recruit(wanted, np.ones(population), secret, number).clients for number in range(count)]


def test_numbers_give_the_generator_of_simulations():
    assert (draws_of(7, 3).random(5) == np.random.default_rng([7, 3]).random(5)).all()


def test_draws_follow_from_the_secret_and_the_names():
    drawn = lambda secret, *names: tuple(draws_of(secret, *names).random(4))
    assert drawn(SECRET, 1) == drawn(SECRET, 1)
    others = {
        drawn(SECRET, 1),
        drawn(SECRET, 2),
        drawn(SECRET, 1, 0),
        drawn(SECRET, 1 << 64),
        drawn(bytes(32), 1),
    }
    assert len(others) == 5


def test_no_two_calls_have_the_same_stream():
    draws = SecretDraws(SECRET)
    calls = [draws.random(100) for _ in range(10)] + [draws.normal(100) for _ in range(10)]
    assert len({tuple(each) for each in calls}) == 20


@pytest.mark.parametrize("sampling", [fixed(), poisson(), poisson(10), apart(4)], ids=lambda each: each.name)
def test_secret_cohorts_use_nothing_of_numpys_generators(sampling, monkeypatch):
    monkeypatch.setattr(np.random, "default_rng", None)
    assert all(len(set(each)) == len(each) for each in cohorts(sampling, 5))


def test_cohorts_are_the_same_for_the_same_secret():
    one, again, other = cohorts(fixed(), 20), cohorts(fixed(), 20), cohorts(fixed(), 20, bytes(32))
    np.testing.assert_array_equal(one, again)
    assert all((first != second).any() for first, second in zip(one, other, strict=True))
    assert len({tuple(sorted(each)) for each in one}) == 20


@pytest.mark.parametrize("sampling", [fixed(), poisson()], ids=lambda each: each.name)
def test_every_client_and_every_pair_is_equally_likely(sampling):
    rounds = 3000
    drawn = np.zeros((rounds, 40), int)
    for number, clients in enumerate(cohorts(sampling, rounds)):
        drawn[number, clients] = 1
    times = drawn.sum(0)
    chance = 8 / 40
    scores = (times - rounds * chance) / np.sqrt(rounds * chance * (1 - chance))
    assert np.abs(scores).max() < stats.norm.isf(SURE / 80)
    both = (drawn.T @ drawn)[np.triu_indices(40, 1)]
    pair = chance**2 if sampling.name == "poisson" else chance * 7 / 39
    assert abs(both.mean() / rounds - pair) < 0.002
    assert np.abs((both - rounds * pair) / np.sqrt(rounds * pair * (1 - pair))).max() < 6


def test_poisson_cohorts_have_binomial_sizes():
    sizes = np.bincount([len(each) for each in cohorts(poisson(), 3000)], minlength=41)
    expected = 3000 * stats.binom.pmf(np.arange(41), 40, 0.2)
    some = expected > 5
    assert (
        stats.chisquare(sizes[some], expected[some] * sizes[some].sum() / expected[some].sum()).pvalue > SURE
    )


def test_draws_have_their_distributions():
    draws, count = SecretDraws(SECRET), 20_000
    assert stats.kstest(draws.random(count), "uniform").pvalue > SURE
    assert stats.kstest(draws.normal(count), "norm").pvalue > SURE
    tries = np.array([0, 10, 1000])
    many = np.stack([draws.binomial(tries, 0.3) for _ in range(2000)])
    assert (many[:, 0] == 0).all()
    np.testing.assert_allclose(many.mean(0), 0.3 * tries, atol=6 * np.sqrt(0.21 * 1000 / 2000))
    np.testing.assert_allclose(many.var(0)[1:], 0.21 * tries[1:], rtol=0.2)


def test_shapes_are_those_of_numpy():
    draws, numpys = SecretDraws(SECRET), np.random.default_rng(0)
    for one in (draws, numpys):
        assert np.shape(one.random((2, 3))) == (2, 3)
        assert np.shape(one.normal()) == ()
        assert np.shape(one.normal(size=4)) == (4,)
        assert np.shape(one.binomial(10, 0.5)) == ()
        assert sorted(one.permutation(5)) == [0, 1, 2, 3, 4]
        assert set(one.choice(np.array([3, 5, 8]), 2, replace=False)) < {3, 5, 8}
        assert len(one.choice(5, 0, replace=False)) == 0
