"""Random Harary graphs, and the degrees and thresholds with which they are safe."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import hypergeom

from partwise.privacy.graphs import degree_and_threshold, harary_graph, mask_settings, thresholds
from partwise.types import UserError

# number of clients -> degree, smallest and largest threshold; a fifth corrupt, a fifth dropped
FIFTHS = {100: (54, 21, 34), 200: (68, 36, 36), 500: (96, 50, 50), 1000: (112, 58, 59), 10_000: (134, 70, 70)}
OTHERS = {
    (100, 0.1, 0.1): (32, 11, 22),
    (100, 0.33, 0.33): (99, 34, 66),
    (200, 0.05, 0.1): (32, 11, 16),
    (500, 0.1, 0.3): (88, 33, 33),
    (1000, 0.33, 0.33): (310, 159, 159),
}


@pytest.mark.parametrize("number", FIFTHS)
def test_the_table(number):
    degree, least, most = FIFTHS[number]
    assert thresholds(number, degree, 0.2, 0.2) == list(range(least, most + 1))
    assert thresholds(number, degree - 2, 0.2, 0.2) == []
    if number > 100:
        assert degree_and_threshold(number) == (degree, least)


@pytest.mark.parametrize("case", OTHERS)
def test_other_columns_of_the_table(case):
    degree, least, most = OTHERS[case]
    number, corrupt, dropped = case
    assert thresholds(number, degree, corrupt, dropped) == list(range(least, most + 1))


@pytest.mark.parametrize("number", [101, 237, 1000, 4000])
def test_the_conditions_hold_by_another_program(number):
    degree, threshold = degree_and_threshold(number)
    fifth = number // 5
    corrupt = hypergeom(number - 1, fifth, degree)
    staying = hypergeom(number - 1, number - 1 - fifth, degree)
    assert number * corrupt.pmf(range(threshold, degree + 1)).sum() <= 2**-40
    assert number * staying.pmf(range(threshold)).sum() <= 2**-30
    row = math.prod((2 * fifth - i) / (number - i) for i in range(degree // 2))
    assert number * row <= 2**-40
    assert degree / 2 < threshold <= degree


@given(st.integers(2, 100))
def test_few_clients_have_all_pairs(number):
    degree, threshold = degree_and_threshold(number)
    assert (degree, threshold) == (number - 1, math.ceil(2 * number / 3))
    assert 2 * threshold > number
    assert mask_settings(number, b"seed") == (b"seed", degree, threshold, threshold)


def test_no_more_than_was_allowed_may_be_missing():
    """Above 100 clients, the chances count on no more than a fifth dropping out."""
    assert mask_settings(1000, b"").least == 800


def test_what_no_graph_can_do():
    with pytest.raises(UserError, match="at least 2 clients, not of 1"):
        degree_and_threshold(1)
    with pytest.raises(UserError, match="assume fewer of both"):
        degree_and_threshold(200, 0.5, 0.5)


@given(st.binary(max_size=8), st.integers(2, 40), st.integers(1, 20))
def test_a_graph_is_regular_and_mutual(seed, number, half):
    graph = harary_graph(seed, number, 2 * half)
    for at, neighbours in enumerate(graph):
        assert len(neighbours) == min(2 * half, number - 1)
        assert list(neighbours) == sorted(set(neighbours) - {at})
        assert all(at in graph[other] for other in neighbours)


def test_the_same_graph_everywhere():
    assert harary_graph(b"seed", 9, 4)[:3] == ((1, 4, 6, 8), (0, 2, 7, 8), (1, 3, 7, 8))
    assert harary_graph(b"seed", 9, 4) != harary_graph(b"seeds", 9, 4)


def test_every_pair_is_as_likely():
    """Over 2,000 graphs of 8 clients with 2 neighbours, every pair meets in 2 of 7."""
    met = np.zeros((8, 8))
    for seed in range(2000):
        for at, neighbours in enumerate(harary_graph(seed.to_bytes(4, "little"), 8, 2)):
            met[at, list(neighbours)] += 1
    share = met[~np.eye(8, dtype=bool)] / 2000
    assert abs(share - 2 / 7).max() < 5 * math.sqrt(2 / 7 * 5 / 7 / 2000)


def test_odd_degrees_are_refused():
    with pytest.raises(UserError, match="an even number of neighbours"):
        harary_graph(b"", 9, 3)
