"""The dataset split function S (FedRecon, Algorithm 1; patent claim 2): support and query sets of a client.

A subset of a client's n examples is two functions of whole numbers: how many examples it has, and which
example is the j-th. Nothing is copied or stored, and the same functions work on numpy and on traced values.
Examples are in the order of the client store: by time, or shuffled. So for "halves" by time, sort the store
by time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from partwise.types import UserError

Number = Any  # an int, a numpy or a jax integer array


class Subset(NamedTuple):
    """`count(n)` of n examples. `index(j, n)` is the number of the j-th of them. Counts grow with n."""

    count: Callable[[Number], Number]
    index: Callable[[Number, Number], Number]


class Split(NamedTuple):
    """Support set (for reconstruction) and query set (for the update, and for evaluation)."""

    support: Subset
    query: Subset


everything = Subset(lambda n: n, lambda j, n: j)


def none() -> Split:
    """Support = query = all data (FedRecon, appendix D: no split)."""
    return Split(everything, everything)


def alternate(batch_size: int) -> Split:
    """Alternating batches: 0, 2, 4, ... to support, 1, 3, 5, ... to query (the authors' MovieLens split)."""
    if batch_size < 1:
        raise UserError(f"alternate: the batch size must be at least 1, not {batch_size}")
    b = batch_size

    def full(n: Number) -> Number:
        return n // (2 * b) * b

    def clip(x: Number) -> Number:  # x limited to 0..b, in plain arithmetic
        return x * (x > 0) * (x < b) + b * (x >= b)

    return Split(
        Subset(lambda n: full(n) + clip(n % (2 * b)), lambda j, n: j // b * 2 * b + j % b),
        Subset(lambda n: full(n) + clip(n % (2 * b) - b), lambda j, n: j // b * 2 * b + b + j % b),
    )


def halves(percent: int = 50) -> Split:
    """The first `percent` of the examples (rounded up) go to support, the rest to query."""
    if not 0 < percent < 100:
        raise UserError(f"halves: the support share must be between 1 and 99 percent, not {percent}")

    def first(n: Number) -> Number:
        return (n * percent + 99) // 100

    return Split(
        Subset(first, lambda j, n: j),
        Subset(lambda n: n - first(n), lambda j, n: first(n) + j),
    )


STRIDES = (
    10007,
    10009,
    10037,
    10039,
    10061,
    10067,
    10069,
    10079,
)  # primes: they visit each of n examples once

MOST_REORDERED = 46_341  # examples whose number squared is below 2^31


def in_other_order(split: Split, stride: Number, first: Number) -> Split:
    """The same split of a client's examples in another order: from the `first` on, `stride` apart, around their
    end. If the stride divides their number, or there are too many, it is 1."""

    def moved(subset: Subset) -> Subset:
        def index(j: Number, n: Number) -> Number:
            some = n * (n > 0) + (n <= 0)
            step = stride % some * (n < MOST_REORDERED) * (n % stride != 0)
            return (first + subset.index(j, n) * (step + (step == 0))) % some

        return Subset(subset.count, index)

    return Split(moved(split.support), moved(split.query))


def last(count: int) -> Split:
    """The last `count` examples go to query, all before them to support. A client with fewer has no support set."""
    if count < 1:
        raise UserError(f"last: at least 1 example must be query, not {count}")

    def first(n: Number) -> Number:
        return (n - count) * (n > count)

    return Split(
        Subset(first, lambda j, n: j),
        Subset(lambda n: n - first(n), lambda j, n: first(n) + j),
    )
