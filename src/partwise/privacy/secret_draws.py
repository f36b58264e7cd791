"""Random draws that nobody can foresee who has seen others: from AES in counter mode.

A seed is either a number, which all may know, or 32 secret bytes. Numbers give NumPy's generator, whose later draws
can be computed from earlier ones: good for simulations. Secret bytes give `SecretDraws`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from partwise.privacy.aes import BLOCK, derived, framed, keystream
from partwise.privacy.secret_noise import secret_normals

Seed = int | bytes


def draws_of(seed: Seed, *names: int) -> Any:
    """What draws: a `numpy.random.Generator`, or for a secret seed `SecretDraws`, which has some of its methods.
    Each list of names has its own."""
    if isinstance(seed, bytes):
        return SecretDraws(framed(seed, *(name.to_bytes(16, "little") for name in names)))
    return np.random.default_rng([seed, *names])


class SecretDraws:
    """The methods of `numpy.random.Generator` that cohorts and heat need. Each call has a key stream of its own.

    Args:
        secret: What all draws follow from.
    """

    def __init__(self, secret: bytes):
        self._secret, self._calls = secret, 0

    def _key(self, length: int = BLOCK) -> bytes:
        self._calls += 1
        return derived(self._secret, b"partwise secret draws %d" % self._calls, length)

    def _numbers(self, count: int) -> np.ndarray:
        return keystream(self._key(), 8 * count).view("<u8")

    def random(self, size: Any) -> np.ndarray:
        """Numbers from 0 to 1, of 53 bits."""
        count = int(np.prod(size, dtype=int))
        return ((self._numbers(count) >> np.uint64(11)) * 2.0**-53).reshape(size)

    def normal(self, size: Any = ()) -> np.ndarray:
        """Standard normal numbers."""
        return secret_normals(int(np.prod(size, dtype=int)), self._key).reshape(size)

    def binomial(self, n: Any, p: float) -> np.ndarray:
        """How many of n tries succeed, by the inverse of the distribution."""
        from scipy.stats import binom  # it takes long to import

        return binom.ppf(self.random(np.shape(n)), n, p).astype(np.int64)

    def permutation(self, count: int) -> np.ndarray:
        """The numbers below `count` in random order: that of 64 random bits each."""
        return np.argsort(self._numbers(count), kind="stable")

    def choice(self, among: Any, size: int, replace: bool) -> np.ndarray:
        """Some of the numbers below `among`, or of its values, in random order, each once."""
        assert not replace
        values = np.arange(among) if np.ndim(among) == 0 else among
        return values[self.permutation(len(values))[:size]]
