"""The one door through which anything about clients leaves a round, if they are promised differential privacy.

A client's whole update (shared and keyed parts together) is clipped to an L2 norm C, its weight is 1, and the sum
over the cohort gets Gaussian noise in **every** coordinate, rows that nobody touched included: noise on touched
rows alone would show which they are. The sum is divided by a number that does not depend on who came (DP-FedAvg,
McMahan et al. 2018, Algorithm 1, with the estimator f_f: fixed denominator).

Whatever else is told leaves by the same door, as more coordinates of the sum, scaled so that each adds little to a
client's norm: a share s of the clip. They are the number of clients, their loss, and if these are asked for:

* whether the update was within the clip, for a clip that follows a quantile of the norms (Andrew et al. 2021).
  That paper's sigma_b is z / (2 s) times the norm of all that a client adds, its z_delta is z times that norm;
* how many clients hold each row, each client with 1 / sqrt(its rows), for a filter of rows (DP-AdaFEST, Ghazi et
  al. 2023). Rows whose noisy count is small are left as they are; only then need a row not have noise.

All coordinates have the same noise, z times the norm of all that a client adds, so one round is one Gaussian
mechanism. With a matrix (`privacy.matrix`) the noise of a round takes back some of the noise before.

A simulation's noise is JAX's, which can be computed anew from the seed. A server of a network calls `noisy` with
numbers that nobody can compute anew (`deployment.server_noise`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partwise.metrics import Sums
from partwise.model.partition import Partition
from partwise.privacy.matrix import Matrix
from partwise.randomness import child, normals
from partwise.server.encoding import cut_to
from partwise.server.step import trainable
from partwise.server.total import NOTHING, PUBLIC, Aggregator, Carried, Contribution, Known, Report, Total
from partwise.types import UserError

CLIENTS, LOSS, WITHIN, HELD = "#clients", "#loss", "#within", "#held "  # coordinates that are no leaves
BUFFER = "noise buffer "
Normal = Callable[[str, tuple[int, ...]], Any]  # name of a coordinate, shape -> standard normal numbers


class Door(NamedTuple):
    """What is done to a cohort's sum before anybody sees it.

    clip:       C, the largest L2 norm of a client's update; with a quantile, that of the first round
    noise:      z, the standard deviation of the noise in units of what a client can add to the sum
    cohort:     the fixed number by which sums are divided: the mean size of a cohort
    share:      s, how much of the clip each single number is given
    loss_bound: a client's mean loss counts up to this
    quantile:   the share of updates that should be within the clip, which follows it; 0: the clip stays
    clip_rate:  how fast the clip follows
    rows_share: how much of the clip the counts of rows are given; 0: every row gets noise
    rows_above: how many standard deviations of its noise a row's count must have to be kept
    matrix:     how the noise of rounds is correlated; None: not at all
    """

    clip: float
    noise: float
    cohort: float
    share: float = 0.1
    loss_bound: float = 10.0
    quantile: float = 0.0
    clip_rate: float = 0.2
    rows_share: float = 0.0
    rows_above: float = 0.0
    matrix: Matrix | None = None

    @property
    def spread(self) -> float:
        """The largest norm of all that a client adds, in units of the clip."""
        numbers = 3 if self.quantile else 2
        return math.sqrt(1 + numbers * self.share**2 + self.rows_share**2)

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise in every coordinate of the sum, with the first clip."""
        return self.noise * self.clip * self.spread

    @property
    def count_deviation(self) -> float:
        """The same, for the number of clients."""
        return self.noise * self.spread / self.share


def private(aggregator: Aggregator, door: Door) -> Aggregator:
    """The aggregator with sums that leave by this door only. Its clients must all weigh the same."""
    if aggregator.held:
        raise UserError(
            f"the weights of the holders of rows ({', '.join(aggregator.held)}) have no noise: with privacy, use "
            f"server.mean = cohort or heat"
        )
    if door.matrix and (door.quantile or door.rows_share):
        raise UserError(
            "correlated noise takes back noise of earlier rounds, so its size and its rows must stay: leave out "
            "privacy.clip_quantile and privacy.rows, or use privacy.mechanism = independent"
        )

    def encode(report: Report, rng: jax.Array, known: Known = NOTHING) -> Contribution:
        clip = _told_clip(known) if door.quantile else door.clip
        update, norm = cut_to(report.update, clip)
        # An update that is not finite is an empty one: which client it was is nobody's business. Its norm tells it,
        # in the one pass over the update that clipping needs.
        finite = jnp.isfinite(norm)
        update = {path: jnp.where(finite, leaf, 0) for path, leaf in update.items()}
        weight = jnp.where(finite, report.weight, 0)
        sent = aggregator.encode(report._replace(update=update, weight=weight), rng)
        loss = sent.clients * _bounded(report.loss, door.loss_bound) / door.loss_bound
        within = sent.clients * jnp.where(norm <= clip, 0.5, -0.5)
        return sent._replace(
            weight=sent.clients * _row_weight(known) if door.rows_share else sent.weight,
            loss=Sums(loss, within if door.quantile else sent.clients),
            valid=jnp.ones((), bool),
        )

    def reveal(total: Total, carried: Carried, rng: jax.Array | None) -> tuple[Total, Carried]:
        total, carried = aggregator.reveal(total, carried, None if rng is None else child(rng, "inner"))
        if rng is not None:
            total, carried = noisy(door, total, carried, _simulated(rng))
        if door.quantile:
            clip = _next_clip(door, carried[PUBLIC]["clip"], total.loss.weight)
            carried = {**carried, PUBLIC: {**carried[PUBLIC], "clip": clip}}
        sd = door.noise * door.spread / max(door.rows_share, 1e-30)
        held = {space: counts > door.rows_above * sd for space, counts in total.held.items()}
        loss = Sums(total.loss.value * door.loss_bound, jnp.maximum(total.clients, 1))
        weight = jnp.full_like(total.weight, door.cohort)
        return Total(total.update, held, weight, total.clients, loss), carried

    def decode(
        partition: Partition, total: Total, carried: Carried, rng: jax.Array
    ) -> tuple[Mapping[str, jax.Array], Carried]:
        update = _kept_rows(partition, total)
        mean, now = aggregator.decode(partition, total._replace(update=update, held={}), carried, rng)
        return mean, {**carried, **now}

    def init(partition: Partition) -> Carried:
        begun = dict(aggregator.init(partition))
        if door.quantile:
            begun[PUBLIC] = {"clip": jnp.asarray(door.clip, jnp.float32)}
        return begun | _buffers(door, partition)

    return aggregator._replace(
        encode=encode,
        reveal=reveal,
        decode=decode,
        init=init,
        all_rows=True,
        private=True,
        informed=bool(door.quantile or door.rows_share),
    )


def filtered(aggregator: Aggregator, spaces: tuple[str, ...]) -> Aggregator:
    """The private aggregator with counts of the holders of rows in these key spaces, for a filter of rows."""
    return aggregator._replace(held=spaces)


def noisy(door: Door, total: Total, carried: Carried, normal: Normal) -> tuple[Total, Carried]:
    """The sum with noise in every coordinate, and the carried values with the next buffers of correlated noise."""
    values = _coordinates(total)
    units = _units(door, total, carried[PUBLIC]["clip"] if door.quantile else door.clip)
    sd = door.noise * door.spread
    fresh = {name: sd * normal(name, value.shape) for name, value in values.items()}
    noise, carried = _correlated(door, carried, fresh)
    told = {name: value + noise[name] * units[name] for name, value in values.items()}
    update = {path: told[path] for path in total.update}
    held = {space: told[HELD + space] for space in total.held}
    return Total(update, held, total.weight, told[CLIENTS], Sums(told[LOSS], told[WITHIN])), carried


def _simulated(rng: jax.Array) -> Normal:
    """Normal numbers that follow from the seed."""
    return lambda name, shape: normals(child(rng, name), shape)


def _bounded(loss: Sums, bound: float) -> jax.Array:
    mean = loss.value / jnp.where(loss.weight > 0, loss.weight, 1)
    return jnp.clip(jnp.where(jnp.isfinite(mean), mean, bound), 0, bound)


def _told_clip(known: Known) -> Any:
    if "clip" not in known.public:
        raise UserError(
            "the clip follows the norms (privacy.clip_quantile), and the slices do not say that of this round: the "
            "server is not of this version of partwise"
        )
    return known.public["clip"]


def _row_weight(known: Known) -> jax.Array:
    """What a client adds to the count of each of its rows: these numbers together have a norm of 1."""
    return 1 / jnp.sqrt(jnp.maximum(jnp.asarray(sum(known.keys.values()), jnp.float32), 1))


def _coordinates(total: Total) -> dict[str, jax.Array]:
    """Everything in a sum that gets noise. (`loss.weight` has what `encode` put there: who was within the clip.)"""
    held = {HELD + space: counts for space, counts in total.held.items()}
    numbers = {CLIENTS: total.clients, LOSS: total.loss.value, WITHIN: total.loss.weight}
    return {**total.update, **held, **numbers}


def _units(door: Door, total: Total, clip: Any) -> dict[str, Any]:
    """What each coordinate is divided by, so that the noise fits them all. A client adds up to 1 to the number of
    clients and to the loss, up to 1/2 to those within the clip, and counts of rows with a norm of 1."""
    held = {HELD + space: 1 / door.rows_share for space in total.held}
    numbers = {CLIENTS: 1 / door.share, LOSS: 1 / door.share, WITHIN: 0.5 / door.share}
    return dict.fromkeys(total.update, clip) | held | numbers


def _correlated(door: Door, carried: Carried, fresh: Mapping[str, Any]) -> tuple[Mapping[str, Any], Carried]:
    """The noise of every coordinate, in units of the clip: fresh noise less some of that before. And the carried
    values with the next buffers."""
    if not door.matrix:
        return fresh, carried
    noise, carried = {}, {name: dict(by_word) for name, by_word in carried.items()}
    names = [f"{BUFFER}{i}" for i in range(len(door.matrix.weights))]
    for word, each in fresh.items():
        noise[word], after = door.matrix.noise(each, [carried[name][word] for name in names])
        for name, buffer in zip(names, after, strict=True):
            carried[name][word] = buffer
    return noise, carried


def _buffers(door: Door, partition: Partition) -> dict[str, dict[str, jax.Array]]:
    """Empty buffers of correlated noise."""
    shapes: Mapping[str, Any] = partition.server_shapes
    words = {path: shapes[path].shape for path in trainable(partition, shapes)}
    words |= dict.fromkeys((CLIENTS, LOSS, WITHIN), ())
    number = len(door.matrix.weights) if door.matrix else 0
    return {f"{BUFFER}{i}": {word: jnp.zeros(shape) for word, shape in words.items()} for i in range(number)}


def _next_clip(door: Door, clip: Any, within: jax.Array) -> jax.Array:
    """The clip of the next round: smaller if more updates than the quantile were within it (geometric update)."""
    share = within / door.cohort + 0.5
    return clip * jnp.exp(-door.clip_rate * (share - door.quantile))


def _kept_rows(partition: Partition, total: Total) -> dict[str, jax.Array]:
    """The update without rows that the filter leaves out."""
    space_of = lambda path: partition.roles[path].space if path in partition.roles else ""
    over = lambda path: total.held[space_of(path)].reshape(-1, *[1] * (total.update[path].ndim - 1))
    return {
        path: jnp.where(over(path), leaf, 0) if space_of(path) in total.held else leaf
        for path, leaf in total.update.items()
    }
