"""Heat without knowing which client holds what: randomised response (Warner, 1965; FedSubAvg, appendix F).

Every client has K bits, one for each key: whether it holds the key. It flips each bit with probability q = 1
/ (1 + e^epsilon) and sends the result. The sum of the sent bits has a known bias, which the server removes.

The meaning of epsilon: it is **per bit**. Any sent result is at most e^epsilon times as likely for one client
as for another client that differs in one key, and e^(d epsilon) times if they differ in d keys. So per
client, if its whole set of keys must be hidden, the budget is K * epsilon. If every client holds at most k
keys, it is 2k * epsilon. For a given budget per client, use that budget divided by K or by 2k. Counting again
with new flips uses the budget again. Flips that a client draws once and keeps do not.

A secure sum of the bits can replace `randomize`. Then counts are exact, and only the sum is seen.
"""

from __future__ import annotations

import numpy as np

from partwise.data.heat import Heat
from partwise.types import UserError


def flip_probability(epsilon: float) -> float:
    """q = 1 / (1 + e^epsilon), below one half."""
    if not epsilon > 0:
        raise UserError(
            f"epsilon is {epsilon}: give more than 0 (at 0 a bit says nothing, and no count can be told)"
        )
    return float(1 / (1 + np.exp(epsilon)))


def randomize(held: np.ndarray, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """Clients' bits as the clients send them.

    Args:
        held: [C, K] bool, whether each client holds each key.
        epsilon: The privacy parameter, per bit. Each bit is flipped with probability q.
        rng: The random generator.

    Returns:
        [C, K] bool.
    """
    flips = rng.random(np.shape(held)) < flip_probability(epsilon)
    return np.asarray(held, bool) ^ flips


def randomized_counts(heat: Heat, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """The sum of what clients send, [K], drawn from its distribution without using the bits: some of the n_m
    ones stay, and some of the N - n_m zeros flip."""
    if heat.by != "clients":
        raise UserError(f"bits say which clients hold a key: count heat by clients, not by {heat.by}")
    q = flip_probability(epsilon)
    return rng.binomial(heat.counts, 1 - q) + rng.binomial(int(heat.total) - heat.counts, q)


def debias(sent: np.ndarray, num_clients: int, epsilon: float) -> np.ndarray:
    """An unbiased estimate of n_m from the sum of the sent bits, (sum - N q) / (1 - 2q), [K]. It may be
    negative or above N."""
    q = flip_probability(epsilon)
    return (np.asarray(sent) - num_clients * q) / (1 - 2 * q)


def debias_variance(num_clients: int, epsilon: float) -> float:
    """The variance of `debias`: N q (1 - q) / (1 - 2q)^2 = N e^epsilon / (e^epsilon - 1)^2, the same for
    every key."""
    q = flip_probability(epsilon)
    return num_clients * q * (1 - q) / (1 - 2 * q) ** 2


def private_heat(sent: np.ndarray, num_clients: int, epsilon: float, space: str) -> Heat:
    """Heat from the sum of the sent bits.

    The counts are debiased, rounded, and limited to the range from one standard deviation of the noise (at
    least 1) to N. A count below the noise cannot be distinguished from zero, and N / n_m of it would be
    noise.

    Args:
        sent: [K], the sum of the bits that clients sent.
        num_clients: N.
        epsilon: The privacy parameter, per bit.
        space: The name of the key space.
    """
    lowest = min(max(1.0, debias_variance(num_clients, epsilon) ** 0.5), num_clients)
    held = np.clip(debias(sent, num_clients, epsilon), lowest, num_clients)
    return Heat(space, np.rint(held).astype(np.int64), num_clients)
