from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.server.cohort import Recruiting, recruit
from partwise.types import UserError

COUNTS = np.array([0, 5, 3, 9, 1, 12, 7, 2, 8, 4])

recruitings = st.builds(
    Recruiting,
    st.integers(1, 5),
    over_selection=st.sampled_from([1.0, 1.2, 1.5, 2.0]),
    dropout=st.sampled_from([0.0, 0.3, 0.9]),
    min_examples=st.sampled_from([0, 3, 100]),
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
    ],
)
def test_impossible_cohorts_are_refused(recruiting, message):
    with pytest.raises(UserError, match=message):
        recruiting.check(len(COUNTS))
