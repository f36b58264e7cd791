"""Gaussian noise that nobody can compute anew: from AES in counter mode, with a key that is used once.

Sums are whole numbers, and so is the noise: a normal number, rounded. To add a rounded number to a whole one is to
add the number itself and round the result, which takes nothing away from the promise of Gaussian noise.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from partwise.privacy.aes import BLOCK, keystream

CHUNK = 1 << 20  # numbers at a time
Random = Callable[[int], bytes]


def secret_uniforms(count: int, random: Random = os.urandom) -> np.ndarray:
    """So many numbers between 0 and 1, of 53 random bits each; never 0."""
    bits = keystream(random(BLOCK), 8 * count).view("<u8") >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def secret_normals(count: int, random: Random = os.urandom) -> np.ndarray:
    """So many standard normal numbers (Box and Muller, 1958), of 53 random bits each."""
    half = -(-count // 2)
    uniform = secret_uniforms(2 * half, random)
    radius, angle = np.sqrt(-2 * np.log(uniform[:half])), 2 * np.pi * uniform[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def noise_words(shape: tuple[int, ...], deviation: float, random: Random = os.urandom) -> np.ndarray:
    """Noise of this standard deviation as words, to be added to sums modulo 2^32."""
    words = np.zeros(int(np.prod(shape, dtype=int)), np.uint32)
    for begin in range(0, len(words) if deviation > 0 else 0, CHUNK):
        part = words[begin : begin + CHUNK]
        part[:] = np.rint(deviation * secret_normals(len(part), random)).astype(np.int64).astype(np.uint32)
    return words.reshape(shape)
