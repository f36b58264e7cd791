from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.server.cohort import FIXED, Recruiting, parse_sampling, poisson, recruit
from partwise.types import UserError

COUNTS = np.array([0, 5, 3, 9, 1, 12, 7, 2, 8, 4])
ROUNDS = 2000

recruitings = st.builds(
    Recruiting,
    st.integers(1, 5),
    over_selection=st.sampled_from([1.0, 1.2, 1.5, 2.0]),
    dropout=st.sampled_from([0.0, 0.3, 0.9]),
    min_examples=st.sampled_from([0, 3, 100]),
    sampling=st.just(FIXED),
)


@given(recruitings, st.integers(0, 2**31), st.integers(0, 10_000))
def test_a_cohort_is_drawn_without_replacement_and_everyone_is_accounted_for(recruiting, seed, number):
    cohort = recruit(recruiting.check(len(COUNTS)), COUNTS, seed, number)
    assert len(set(cohort.clients.tolist())) == len(cohort.clients) <= recruiting.size
    assert (COUNTS[cohort.clients] >= recruiting.min_examples).all()
    assert len(cohort.clients) + cohort.dropped + cohort.too_small + cohort.spare == recruiting.asked
    assert cohort.spare == 0 or len(cohort.clients) == recruiting.size


@given(recruitings, st.integers(0, 2**31), st.integers(0, 10_000))
def test_a_cohort_hangs_on_seed_and_round_alone(recruiting, seed, number):
    first, again = (recruit(recruiting, COUNTS, seed, number) for _ in range(2))
    np.testing.assert_array_equal(first.clients, again.clients)
    assert first[1:] == again[1:]


def test_rounds_and_seeds_differ_and_everyone_has_a_turn():
    cohorts = [tuple(recruit(Recruiting(3), COUNTS, 0, t).clients) for t in range(60)]
    assert len(set(cohorts)) > 50
    assert {k for cohort in cohorts for k in cohort} == set(range(len(COUNTS)))
    assert tuple(recruit(Recruiting(3), COUNTS, 1, 0).clients) != cohorts[0]


def test_asked_is_what_was_meant():
    """A tenth more of a hundred is a hundred and ten, whatever binary fractions say."""
    assert Recruiting(100, over_selection=1.1).asked == 110
    assert Recruiting(10, over_selection=1.3).asked == 13
    assert Recruiting(3, over_selection=1.5).asked == 5


@pytest.mark.parametrize(
    ("recruiting", "message"),
    [
        (Recruiting(0), "at least 1 client, not 0"),
        (Recruiting(2, over_selection=0.5), "over.selection must be at least 1"),
        (Recruiting(2, dropout=1.0), "dropout in 0..1"),
        (Recruiting(2, dropout=-0.1), "dropout in 0..1"),
        (
            Recruiting(11),
            "11 clients are to be asked every round, but the population has only 10.*--cohort 10",
        ),
        (
            Recruiting(2, over_selection=1.5, sampling=poisson()),
            "cohort.sampling = poisson .*cohort.over_selection must be 1, not 1.5: .*cohort.sampling=fixed",
        ),
        (
            Recruiting(4, sampling=poisson(3)),
            "cohort.sampling = poisson:3 cuts cohorts below cohort.size = 4.*use poisson:8",
        ),
    ],
)
def test_impossible_cohorts_are_refused(recruiting, message):
    with pytest.raises(UserError, match=message):
        recruiting.check(len(COUNTS))


def test_fixed_cohorts_stay_those_that_they_were():
    """Of runs that were made before there was another way to draw them."""
    assert [recruit(Recruiting(3), COUNTS, 0, t).clients.tolist() for t in range(3)] == [
        [5, 9, 6],
        [9, 4, 8],
        [2, 7, 0],
    ]
    cohort = recruit(Recruiting(4, over_selection=1.5, dropout=0.3, min_examples=2), COUNTS, 7, 0)
    assert (cohort.clients.tolist(), *cohort[1:]) == ([6, 7, 3], 2, 1, 0)


def taking_part(recruiting: Recruiting) -> np.ndarray:
    """Who takes part [rounds, clients], as zeros and ones."""
    return np.array(
        [np.isin(np.arange(len(COUNTS)), recruit(recruiting, COUNTS, 0, t).clients) for t in range(ROUNDS)]
    )


def test_with_poisson_sampling_every_client_takes_part_for_itself():
    """Sizes, clients and pairs of clients within four standard errors."""
    there, chance = taking_part(Recruiting(3, sampling=poisson())), 0.3
    sizes, variance = there.sum(axis=1), chance * (1 - chance)
    assert abs(sizes.mean() - 3) < 4 * np.sqrt(10 * variance / ROUNDS)
    assert abs(sizes.var() - 10 * variance) < 4 * 10 * variance * np.sqrt(2 / ROUNDS)
    np.testing.assert_allclose(there.mean(axis=0), chance, atol=4 * np.sqrt(variance / ROUNDS))
    pairs = np.cov(there.T)[np.triu_indices(10, 1)]
    np.testing.assert_allclose(pairs, 0, atol=4 * variance / np.sqrt(ROUNDS))


def test_truncated_poisson_cuts_larger_cohorts_at_random_and_counts_the_rest():
    whole, cut = Recruiting(3, sampling=poisson()), Recruiting(3, sampling=poisson(4))
    for t in range(200):
        drawn, kept = recruit(whole, COUNTS, 0, t), recruit(cut, COUNTS, 0, t)
        assert set(kept.clients) <= set(drawn.clients)
        assert len(kept.clients) == min(len(drawn.clients), 4)
        assert (kept.spare, drawn.spare) == (len(drawn.clients) - len(kept.clients), 0)
    there = taking_part(cut)
    chance = there.sum(axis=1).mean() / 10
    assert 0.25 < chance < 0.3
    np.testing.assert_allclose(there.mean(axis=0), chance, atol=4 * np.sqrt(chance * (1 - chance) / ROUNDS))


def test_drop_out_and_small_clients_with_poisson_sampling():
    recruiting = Recruiting(5, dropout=0.3, min_examples=3, sampling=poisson(6)).check(len(COUNTS))
    cohorts = [recruit(recruiting, COUNTS, 1, t) for t in range(ROUNDS)]
    everyone = [len(cohort.clients) + sum(cohort[1:]) for cohort in cohorts]
    assert abs(np.mean(everyone) - 5) < 0.15
    assert abs(sum(cohort.dropped for cohort in cohorts) / sum(everyone) - 0.3) < 0.02
    assert all((COUNTS[cohort.clients] >= 3).all() for cohort in cohorts)
    assert max(len(cohort.clients) for cohort in cohorts) == 6


def test_everyone_takes_part_where_all_are_asked():
    cohort = recruit(Recruiting(10, sampling=poisson()).check(10), COUNTS, 0, 0)
    assert sorted(cohort.clients) == list(range(10))


@pytest.mark.parametrize(
    ("recruiting", "room"),
    [
        (Recruiting(3), 3),
        (Recruiting(3, over_selection=1.5), 3),
        (Recruiting(100, sampling=poisson()), 139),
        (Recruiting(100, sampling=poisson(120)), 120),
        (Recruiting(100, sampling=poisson(5000)), 139),
        (Recruiting(2000, sampling=poisson()), 2000),
    ],
)
def test_the_largest_cohort_to_expect(recruiting, room):
    assert recruiting.room(2000) == room


def test_ways_of_sampling_by_name():
    assert [parse_sampling(text).name for text in ("fixed", "poisson", "poisson:7")] == [
        "fixed",
        "poisson",
        "poisson:7",
    ]
    assert parse_sampling("poisson:7").most(3) == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poison", r"unknown value of cohort.sampling 'poison' \(nearest: poisson\)"),
        ("", "unknown value of cohort.sampling ''"),
        ("fixed:3", "fixed takes no number of clients .*'fixed:3'"),
        ("poisson:", "as in poisson:100, not 'poisson:'"),
        ("poisson:0", "at least 1"),
        ("poisson:-3", "at least 1"),
        ("poisson:2.5", "at least 1"),
        ("poisson:" + "9" * 5000, "at least 1"),
    ],
)
def test_ways_of_sampling_that_are_none_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_sampling(text)


@pytest.mark.parametrize("clients", [40, 43])
def test_clients_wait_between_their_rounds(clients):
    """Never twice within ten rounds, everybody in a group, and every client sooner or later."""
    counts, recruiting = (
        np.ones(clients, int),
        Recruiting(3, sampling=parse_sampling("apart:10")).check(clients),
    )
    last, seen = {}, set()
    for number in range(120):
        cohort = recruit(recruiting, counts, 7, number).clients
        assert len(np.unique(cohort)) == 3
        for client in cohort.tolist():
            assert number - last.get(client, -100) >= 10
            last[client] = number
        seen |= set(cohort.tolist())
        np.testing.assert_array_equal(cohort, recruit(recruiting, counts, 7, number).clients)
    assert seen == set(range(clients))
    assert not np.array_equal(
        recruit(recruiting, counts, 8, 0).clients, recruit(recruiting, counts, 7, 0).clients
    )


def test_groups_must_be_as_large_as_a_cohort():
    with pytest.raises(UserError, match="a group of 4 clients"):
        Recruiting(5, sampling=parse_sampling("apart:10")).check(40)
    with pytest.raises(UserError, match="apart:ROUNDS"):
        parse_sampling("apart:x")
