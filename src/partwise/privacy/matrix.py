"""Correlated noise: what later rounds add takes back some of the noise of earlier ones (matrix mechanisms).

A run releases sums x_t with noise C^-1 xi, where xi is independent and C is a lower-triangular Toeplitz matrix. For
a given promise, the noise of *prefix sums*, which is what a model is, is far smaller than with C = 1. Nothing rests
on how cohorts are drawn, only on a client waiting some rounds between two of its own (Kairouz et al. 2021,
Choquette-Choo et al. 2023). Two forms of C need little memory:

* blt: column 1, s.1, s.d, s.d^2, ... for a few buffers (McMahan, Pillutla et al. 2024, BLT-DP-FTRL);
* banded: a few numbers, then zeros.

Their numbers are those with the least noise in prefix sums for a given promise. The promise itself rests on the
matrix alone, however it was found (`accounting.sensitivity`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from partwise.privacy.accounting import Rounds, sensitivity

BUFFERS = {"blt": 2, "banded": 7}  # unless another number is asked for


class Matrix(NamedTuple):
    """A lower-triangular Toeplitz matrix with a unit diagonal, and one buffer for each of its numbers.

    weights: blt: what is read from each buffer; banded: the numbers of the column after the first
    decays:  blt: what remains of each buffer after a round; banded: empty
    """

    weights: tuple[float, ...]
    decays: tuple[float, ...] = ()

    def column(self, rounds: int) -> tuple[float, ...]:
        """The first column for so many rounds."""
        if not self.decays:
            return (1.0, *self.weights)[:rounds]
        powers = np.asarray(self.decays)[None] ** np.arange(max(rounds - 1, 0))[:, None]
        return (1.0, *(powers @ np.asarray(self.weights)).tolist())[:rounds]

    def noise(self, fresh: Any, buffers: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The noise of the next round, C^-1 times all fresh noise so far, and the next buffers. It works for any
        arrays."""
        noise = fresh
        for weight, buffer in zip(self.weights, buffers, strict=True):
            noise = noise - np.float32(weight) * buffer
        if not self.decays:
            return noise, [noise, *buffers[:-1]]
        return noise, [
            np.float32(decay) * buffer + noise for decay, buffer in zip(self.decays, buffers, strict=True)
        ]


@lru_cache(16)
def make_matrix(name: str, rounds: int, separation: int, buffers: int = 0) -> Matrix:
    """The matrix with little noise in prefix sums of so many rounds.

    Args:
        name: blt or banded.
        rounds: How many rounds there are.
        separation: How many rounds after a client's round it may be in another.
        buffers: How many numbers C has; 0 for the usual number.
    """
    from scipy.optimize import minimize

    number = min(buffers or BUFFERS[name], max(rounds - 1, 1))
    if name == "banded" and number >= separation:
        number = max(separation - 1, 1)
    shape = _banded if name == "banded" else _blt
    loss = lambda free: np.log(prefix_noise(shape(free), rounds, separation))
    begin = (
        np.zeros(number) if name == "banded" else np.append(np.linspace(4, 0, number), np.full(number, -1.5))
    )
    found = shape(minimize(loss, begin, method="L-BFGS-B", bounds=[(-12, 12)] * len(begin)).x)
    return Matrix(_rounded(found.weights), _rounded(found.decays))


def prefix_noise(matrix: Matrix, rounds: int, separation: int) -> float:
    """The root mean square of the noise of prefix sums, for a client that adds at most 1 to all rounds together."""
    from scipy.signal import lfilter

    column = matrix.column(rounds)
    top, below = _fraction(matrix)
    sums = lfilter(below, top, np.ones(rounds))  # the first column of (matrix of prefix sums) C^-1
    added = sensitivity(Rounds(1.0, 1, 1, "apart", separation=separation, matrix=column), rounds)
    return float(added * np.sqrt(np.mean(np.cumsum(np.asarray(sums) ** 2))))


def _fraction(matrix: Matrix) -> tuple[np.ndarray, np.ndarray]:
    """The generating function of the first column, as two polynomials: numerator, denominator."""
    if not matrix.decays:
        return np.array([1.0, *matrix.weights]), np.ones(1)
    below = np.poly(matrix.decays)
    top = below.copy()
    for i, weight in enumerate(matrix.weights):
        top[1:] += weight * np.poly(np.delete(matrix.decays, i))
    return top, below


def _blt(free: np.ndarray) -> Matrix:
    """Numbers without bounds -> a column that never rises: weights that add up to at most 1, decays below 1."""
    decays, shares = np.split(free, 2)
    weights = np.exp(shares) / (1 + np.exp(shares).sum())
    return Matrix(tuple(weights), tuple(expit(decays)))


def _banded(free: np.ndarray) -> Matrix:
    """Numbers without bounds -> a column that never rises."""
    return Matrix(tuple(np.cumprod(expit(free))))


def _rounded(values: tuple[float, ...]) -> tuple[float, ...]:
    """Numbers of 32 bits, as the noise is computed with, so that the promise is about the same matrix."""
    return tuple(np.asarray(values, np.float32).astype(float).tolist())
