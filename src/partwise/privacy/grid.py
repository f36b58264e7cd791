"""The whole numbers that a sum is of: multiples of 2^-bits in words of 32 bits, with room for the noise."""

from __future__ import annotations

import math
from typing import NamedTuple

MOST_BITS = 24  # after the point: as many as a float32 has
ROOM = 10  # standard deviations of the noise that a sum has room for


class Grid(NamedTuple):
    """What the bits follow from.

    most:   the most clients of a sum
    clip:   the largest norm of a client's update
    share:  how much of the clip each single number of a client is given (its numbers are at most 1)
    spread: the largest norm of all that a client adds, in units of the clip
    """

    most: int
    clip: float
    share: float
    spread: float

    def bits(self, noise: float) -> int:
        """The bits after the point with which no sum leaves 32 bits, with noise of `noise` times what a client
        adds."""
        widest = noise * self.spread * max(self.clip, 1 / self.share)
        largest = self.most * max(self.clip, 1.0) + ROOM * widest
        return max(0, min(MOST_BITS, math.floor(31 - math.log2(largest))))

    def step(self, noise: float) -> float:
        """The step of the grid, in units of what a client adds."""
        return 2.0 ** -self.bits(noise) / (self.spread * min(self.clip, 1 / self.share))
