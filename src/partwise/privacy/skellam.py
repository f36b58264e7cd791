"""Skellam noise that nobody can compute anew: the difference of two Poisson numbers, from AES in counter mode.

Sums of Skellam numbers are Skellam numbers, and their variances add up (Agarwal, Kairouz and Liu 2021). So clients
can each add a share of the noise of a sum, and nobody sees the sum without it.

Poisson numbers are drawn by transformed rejection (Hörmann 1993, PTRS). Rates may be as large as 2^50. Therefore
all numbers are differences from the rate, and the logarithm of a chance is computed from them: it would be lost in
the rounding of k log(rate) - rate - log(k!).
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import numpy as np
from scipy.special import pdtr

from partwise.privacy.secret_noise import CHUNK, Random, secret_uniforms

SMALL = 100.0  # below this rate, Poisson numbers are drawn by a table of their chances


class NoiseShare(NamedTuple):
    """The noise that each client of a sum adds.

    update:  variance of that of a word of its update, in squared steps of the grid
    numbers: the same for its single numbers
    most:    how many such shares all noise of a sum has: the most clients that a sum can be of
    """

    update: float
    numbers: float
    most: int


def skellam_words(count: int, variance: float, random: Random = os.urandom) -> np.ndarray:
    """So many words of noise, to be added to words modulo 2^32."""
    words = np.zeros(count, np.uint32)
    for begin in range(0, count if variance > 0 else 0, CHUNK):
        part = words[begin : begin + CHUNK]
        part[:] = secret_skellam(len(part), variance, random).astype(np.uint32)
    return words


def secret_skellam(count: int, variance: float, random: Random = os.urandom) -> np.ndarray:
    """So many whole numbers around zero."""
    draw = _from_table if variance / 2 < SMALL else _by_rejection
    return (draw(count, variance / 2, random) - draw(count, variance / 2, random)).astype(np.int64)


def _from_table(count: int, rate: float, random: Random) -> np.ndarray:
    chances = pdtr(np.arange(math.ceil(rate + 15 * math.sqrt(rate) + 30)), rate)  # up to each number
    return np.searchsorted(chances, secret_uniforms(count, random))


def _by_rejection(count: int, rate: float, random: Random) -> np.ndarray:
    """Poisson numbers, less the whole part of the rate. The letters are those of the paper."""
    b = 0.931 + 2.53 * math.sqrt(rate)
    a = -0.059 + 0.02483 * b
    per_alpha, v_r = 1.1239 + 1.1328 / (b - 3.4), 0.9277 - 3.6224 / (b - 2)
    whole = math.floor(rate)
    numbers, left = np.empty(count), np.arange(count)
    while len(left):
        u, v = secret_uniforms(2 * len(left), random).reshape(2, -1)
        u_s = 0.5 - np.abs(u - 0.5)
        k = np.floor((2 * a / u_s + b) * (u - 0.5) + (rate - whole) + 0.43)
        good = (u_s >= 0.07) & (v <= v_r)
        look = np.flatnonzero(~good & (k > -whole) & ((u_s >= 0.013) | (v <= u_s)))
        height = v[look] * per_alpha / (a / u_s[look] ** 2 + b)
        good[look] = np.log(height) <= _log_chance(k[look], rate)
        numbers[left[good]], left = k[good], left[~good]
    return numbers


def _log_chance(numbers: np.ndarray, rate: float) -> np.ndarray:
    """Logarithm of the chance of a Poisson number k > 0, given less the whole part of the rate; k! by Stirling's
    series."""
    k, beyond = numbers + math.floor(rate), (numbers - rate % 1) / rate
    far = rate * ((1 + beyond) * np.log1p(beyond) - beyond)
    return -far - np.log(2 * np.pi * k) / 2 - 1 / (12 * k) + 1 / (360 * k**3)
