"""Sums that nobody sees the parts of (`privacy.sums`): contributions as whole numbers, which add up exactly.

A client's clipped numbers become multiples of 2^-bits in 32-bit words. Words are added modulo 2^32, so masks and
shares cancel to the last bit, and a simulation without any cryptography has the same sum. Rounding moves a client's
vector by at most sqrt(D) / 2^bits, D being its length. Updates are clipped by so much more, so that the rounded
vector is within the clip that the noise is made for.

With `privacy.mechanism = skellam`, clients add the noise themselves, each its share (`noise_share`); a simulation
adds it to the sum (`server.skellam_sum`).
"""

from __future__ import annotations

import math

from partwise.algorithm import Algorithm
from partwise.config.protection import Protection, grid_of, protection
from partwise.config.settings import Config
from partwise.config.sum_sizes import most_of
from partwise.privacy.skellam import NoiseShare
from partwise.selection.choose import Choice, top
from partwise.server.encoding import clipped, fixed_point
from partwise.server.skellam_sum import skellam_sum
from partwise.types import UserError, unknown

SUMS = ("plain", "masked", "two_servers")


def secured(algorithm: Algorithm, config: Config, num_clients: int) -> Algorithm:
    """The algorithm with the keys and sums that `privacy.keys` and `privacy.sums` say."""
    part = config.privacy
    if part.sums not in SUMS:
        raise unknown("value of privacy.sums", part.sums, SUMS)
    if part.keys:
        choose = {
            space: _at_most(choice, part.keys, space, algorithm.partition.num_keys(space))
            for space, choice in algorithm.choose.items()
        }
        algorithm = algorithm._replace(choose=choose)
    if part.sums == "plain":
        return algorithm
    promised = protection(config, num_clients)
    if promised is None:
        raise UserError(
            f"privacy.sums = {part.sums} adds up whole numbers, which need a known range: give privacy.clip, the "
            f"largest norm of a client's update, as in 1.0 (and privacy.noise=0 for no noise)"
        )
    if algorithm.aggregator.informed:
        raise UserError(
            f"privacy.sums = {part.sums} adds up numbers of one known range: leave out privacy.clip_quantile and "
            f"privacy.rows"
        )
    bits = bits_for(promised)
    slack = _slack(algorithm, bits) * promised.door.spread
    if slack >= promised.door.clip / 2:
        raise UserError(
            f"privacy.clip = {promised.door.clip:g} is too small for sums of {most_of(promised.rounds):,} clients "
            f"in 32 bits: raise it, or use smaller cohorts (cohort.sampling = poisson:MOST bounds them)"
        )
    aggregator = fixed_point(clipped(algorithm.aggregator, promised.door.clip - slack), bits)
    share = noise_share(promised)
    return algorithm._replace(aggregator=skellam_sum(aggregator, share) if share else aggregator)


def bits_for(promised: Protection) -> int:
    """The bits after the point with which no sum of a cohort, with its noise, leaves 32 bits."""
    return grid_of(promised.door, promised.rounds).bits(promised.door.noise)


def noise_share(promised: Protection) -> NoiseShare | None:
    """The noise that a client adds to its words; None if the noise is not the clients'."""
    if promised.rounds.grid is None:
        return None
    door, most = promised.door, promised.rounds.grid.most
    steps = 2.0 ** bits_for(promised)
    numbers = door.count_deviation if door.noise else 0.0
    return NoiseShare((door.deviation * steps) ** 2 / most, (numbers * steps) ** 2 / most, most)


def _slack(algorithm: Algorithm, bits: int) -> float:
    """How far rounding can move a client's vector."""
    shapes, partition = algorithm.partition.server_shapes, algorithm.partition
    size = 4 + sum(shapes[path].size for path in partition.trained_paths)
    return math.sqrt(size) / 2**bits


def _at_most(choice: Choice, most: int, space: str, num_keys: int) -> Choice:
    """The choice, with so many keys at most."""
    if choice.most(num_keys, num_keys) <= min(most, num_keys):
        return choice
    if choice.name == "own":
        return top(most)
    raise UserError(
        f"privacy.keys = {most:,}, and clients ask for more keys of '{space}' (select.{space} = {choice.name}): "
        f"give as many, or choose fewer, as in select.{space}=top:{most}"
    )
