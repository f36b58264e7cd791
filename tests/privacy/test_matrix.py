"""Correlated noise: the noise is that of the matrix, its sensitivity is right, and prefix sums have less of it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partwise.privacy.accounting import Rounds, sensitivity
from partwise.privacy.matrix import Matrix, make_matrix, prefix_noise

MATRICES = [make_matrix("blt", 30, 5), make_matrix("banded", 30, 5), make_matrix("blt", 30, 5, 3)]


def dense(matrix, rounds):
    column = np.zeros(rounds)
    column[: len(matrix.column(rounds))] = matrix.column(rounds)
    return np.array([[column[i - j] if i >= j else 0 for j in range(rounds)] for i in range(rounds)])


@pytest.mark.parametrize("matrix", MATRICES)
def test_noise_comes_from_the_inverse(matrix):
    fresh = np.random.default_rng(0).normal(size=(30, 4))
    buffers, found = [np.zeros(4)] * len(matrix.weights), []
    for each in fresh:
        noise, buffers = matrix.noise(each, buffers)
        found.append(noise)
    np.testing.assert_allclose(dense(matrix, 30) @ np.stack(found), fresh, atol=1e-5)


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("rounds", [4, 12])
def test_no_client_adds_more_to_the_rounds_than_the_sensitivity(matrix, rounds):
    """Over all ways to take part at least five rounds apart."""
    stated = sensitivity(Rounds(1.0, 1, 10, "apart", separation=5, matrix=matrix.column(rounds)), rounds)
    whole, worst = dense(matrix, rounds), 0.0
    for number in range(1, 4):
        for rows in itertools.combinations(range(rounds), number):
            if all(b - a >= 5 for a, b in itertools.pairwise(rows)):
                worst = max(worst, float(np.linalg.norm(whole[:, list(rows)].sum(1))))
    assert worst == pytest.approx(stated, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=12, max_size=12), st.integers(0, 4))
def test_directions_of_updates_cannot_add_more(signs, first):
    """Updates of a norm of at most 1 in rounds that are five apart, of any sign."""
    matrix = MATRICES[0]
    stated = sensitivity(Rounds(1.0, 1, 10, "apart", separation=5, matrix=matrix.column(12)), 12)
    given_updates = np.zeros(12)
    given_updates[first::5] = np.asarray(signs)[first::5]
    assert np.linalg.norm(dense(matrix, 12) @ given_updates) <= stated * (1 + 1e-6)


def test_prefix_sums_have_the_stated_noise():
    for matrix in MATRICES:
        sums = np.tril(np.ones((30, 30))) @ np.linalg.inv(dense(matrix, 30))
        expected = math.sqrt((sums**2).sum() / 30)
        added = sensitivity(Rounds(1.0, 1, 10, "apart", separation=5, matrix=matrix.column(30)), 30)
        assert prefix_noise(matrix, 30, 5) == pytest.approx(expected * added, rel=1e-5)


def test_correlated_noise_is_far_smaller_in_prefix_sums():
    independent = prefix_noise(Matrix((0.0,), (0.5,)), 500, 60)
    blt = prefix_noise(make_matrix("blt", 500, 60), 500, 60)
    banded = prefix_noise(make_matrix("banded", 500, 60), 500, 60)
    assert blt < 0.25 * independent
    assert blt < banded < 0.5 * independent


def test_columns_never_rise():
    for matrix in MATRICES:
        column = np.asarray(matrix.column(30))
        assert column[0] == 1
        assert np.all(np.diff(column) <= 0)
        assert np.all(column >= 0)


def test_the_sensitivity_is_that_of_jax_privacy():
    toeplitz = pytest.importorskip("jax_privacy.matrix_factorization").toeplitz
    column = np.asarray(make_matrix("blt", 500, 60).column(500), np.float32)
    theirs = float(toeplitz.minsep_sensitivity_squared(column, 60, 9, skip_checks=True)) ** 0.5
    ours = sensitivity(Rounds(1.0, 1, 10, "apart", separation=60, matrix=tuple(column.tolist())), 500)
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_the_noise_is_as_small_as_that_of_jax_privacy():
    blt = pytest.importorskip("jax_privacy.matrix_factorization").buffered_toeplitz
    found = blt.optimize(n=200, min_sep=20, max_participations=10, error="mean", min_buffers=2, max_buffers=2)
    theirs = Matrix(
        tuple(np.asarray(found.output_scale).tolist()), tuple(np.asarray(found.buf_decay).tolist())
    )
    assert prefix_noise(make_matrix("blt", 200, 20), 200, 20) <= 1.01 * prefix_noise(theirs, 200, 20)
