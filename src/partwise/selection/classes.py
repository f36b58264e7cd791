"""Device classes: devices differ, so clients may have different numbers of keys (Federated Select, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from partwise.data.ragged import mix
from partwise.types import UserError


class Classes(NamedTuple):
    """Device classes: a client has `sizes[i]` keys with probability `shares[i]`. Its class is the same in all
    rounds."""

    sizes: tuple[int, ...]
    shares: tuple[float, ...]

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """How many keys each client has, from its number."""
        edges = np.cumsum(self.shares)
        lot = mix(numbers) / 2.0**64
        at = np.searchsorted(edges, lot, side="right")
        return np.array(self.sizes)[np.minimum(at, len(self.sizes) - 1)]

    def __str__(self) -> str:
        return ",".join(f"{size}@{share:g}" for size, share in zip(self.sizes, self.shares, strict=True))


def classes(shares: Mapping[int, float]) -> Classes:
    """Make device classes from {number of keys: share}, such as `{1000: 0.8, 100: 0.2}`. The shares must add
    up to 1."""
    if not shares or min(shares) < 1 or not all(0 < share < np.inf for share in shares.values()):
        raise UserError(
            "device classes are numbers of keys of at least 1 with shares above 0, {1000: 0.8, 100: 0.2}, "
            f"not {dict(shares)}"
        )
    total = sum(shares.values())
    if abs(total - 1) > 1e-6:
        raise UserError(
            f"the shares of device classes add up to {total:g} ({dict(shares)}): give shares of all clients that "
            f"add up to 1, as in 1000@0.8,100@0.2"
        )
    return Classes(tuple(shares), tuple(shares.values()))


def parse_classes(text: str) -> Classes:
    """Read `1000@0.8,100@0.2`: a thousand keys for 80 % of the clients, a hundred for the others."""
    pairs = [each.partition("@") for each in text.split(",")]
    try:
        parts = [(int(size), float(share)) for size, _, share in pairs]
    except ValueError:
        raise UserError(
            f"device classes are numbers of keys with their shares, as in 1000@0.8,100@0.2, not '{text}'"
        ) from None
    if len(dict(parts)) < len(parts):
        raise UserError(f"device classes with one number of keys twice: '{text}'; add up their shares")
    return classes(dict(parts))
