"""Rényi divergences of rounds with Skellam noise, for which `dp-accounting` has no event.

Skellam noise is on a grid. All that a client adds has a norm of 1 here, the noise a standard deviation z, and the
grid a step h. By Agarwal, Kairouz and Liu (2021), Theorem 3.5, the divergence of order a is at most

    a / (2 z^2) + min((2 a + 5) h^2 / (4 z^4), 3 / (2 z^2)),

as whole numbers have an L1 norm of at most their squared L2 norm. The first term is that of Gaussian noise. If the
parts of a sum have their own noise, h is that of the part in which it is largest.

Sampling makes divergences smaller. With Poisson cohorts the moments are those of Mironov, Talwar and Zhang (2019):
that the divergence the other way round is not larger needs of the noise only that it is symmetric. For cohorts of
one size there is the general bound of Wang, Balle and Kasiviswanathan (2019), Theorem 9.

A moment of order a is told by its logarithm, (a - 1) times the divergence. Orders are whole numbers.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln

ORDERS = np.array([*range(2, 65), *range(68, 128, 4), *range(128, 513, 32)])
_ALL = np.arange(ORDERS[-1] + 1)  # moments of these orders are needed for those of a sample
_REST = np.maximum(ORDERS[:, None] - _ALL, 0)  # [orders, all]
_CHOICES = gammaln(ORDERS[:, None] + 1) - gammaln(_ALL + 1) - gammaln(_REST + 1)
_CHOICES[ORDERS[:, None] < _ALL] = -np.inf


def gaussian_divergences(noise: float) -> np.ndarray:
    """Those of one Gaussian mechanism, by `ORDERS`."""
    return ORDERS / (2 * noise**2)


def skellam_divergences(noise: float, step: float, sampling: str, chance: float) -> np.ndarray:
    """Those of one round, by `ORDERS`.

    Args:
        noise: z, in units of what a client adds.
        step: That of the grid, in the same units.
        sampling: poisson: a client is added or removed; fixed: it is replaced.
        chance: That a client is in a cohort.
    """
    moved = 2 if sampling == "fixed" else 1  # how far the sum is moved, in units of what a client adds
    moments = skellam_moments(noise, step, moved)
    if chance >= 1:
        return moments[ORDERS] / (ORDERS - 1)
    sampled = (without_replacement if sampling == "fixed" else poisson_sampled)(moments, chance)
    return sampled / (ORDERS - 1)


def skellam_moments(noise: float, step: float, moved: float = 1.0) -> np.ndarray:
    """Moments of all orders from 0."""
    more = np.minimum((2 * _ALL + 5) * step**2 / (4 * noise**4), 3 / (2 * noise**2))
    return np.maximum(_ALL - 1, 0) * moved**2 * (_ALL / (2 * noise**2) + more)


def poisson_sampled(moments: np.ndarray, chance: float) -> np.ndarray:
    """Moments by `ORDERS`, if every client is drawn with this chance."""
    drawn = _ALL * math.log(chance) + _REST * math.log1p(-chance)
    return np.logaddexp.reduce(_CHOICES + drawn + moments, axis=1)


def without_replacement(moments: np.ndarray, chance: float) -> np.ndarray:
    """Moments by `ORDERS`, if a cohort is this share of all clients. Without sampling, none is smaller."""
    terms = moments + math.log(2)
    terms[2] = min(terms[2], math.log(4) + moments[2] + math.log(-math.expm1(-moments[2])))
    terms[:2] = 0, -np.inf
    summed = np.logaddexp.reduce(_CHOICES + _ALL * math.log(chance) + terms, axis=1)
    return np.minimum(summed, moments[ORDERS])
