"""The secret noise that a server adds to its own sums: its size, its correlation, and all of its bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from partwise.deployment.server_noise import own_noise
from partwise.metrics import Sums
from partwise.privacy.matrix import Matrix
from partwise.server.private_sum import BUFFER, Door
from partwise.server.total import PUBLIC, Total

ROWS, ROUNDS, BITS = 300, 20, 12
BLT = Matrix((0.3, 0.2), (0.95, 0.5))
BANDED = Matrix((0.7, 0.5, 0.2))
SURE = 1e-6  # the chance that a right program fails, for each test


def sums(door, words=False):
    """A known sum, and the carried values before the first round."""
    make = (lambda *shape: jnp.zeros(shape, jnp.uint32)) if words else (lambda *shape: jnp.zeros(shape))
    held = {"item": make(ROWS)} if door.rows_share else {}
    total = Total({"item": make(ROWS, 4)}, held, make(), make(), Sums(make(), make()))
    names = ("item", "#clients", "#loss", "#within")
    shapes = dict(zip(names, ((ROWS, 4), (), (), ()), strict=True))
    buffers = range(len(door.matrix.weights) if door.matrix else 0)
    carried = {f"{BUFFER}{i}": {name: jnp.zeros(shape) for name, shape in shapes.items()} for i in buffers}
    return total, carried | ({PUBLIC: {"clip": jnp.asarray(0.5)}} if door.quantile else {})


def drawn(door, words=False, rounds=ROUNDS):
    """The noise of some rounds, by coordinate, in units of its deviation with independent noise."""
    noise, (total, carried) = own_noise(door, BITS if words else None), sums(door, words)
    told = []
    for _ in range(rounds):
        now, carried = noise(total, carried)
        assert jax.tree_util.tree_structure(carried) == jax.tree_util.tree_structure(sums(door)[1])
        number = lambda leaf: np.asarray(leaf).view(np.int32) / 2**BITS if words else np.asarray(leaf)
        now = jax.tree_util.tree_map(number, now)
        counts = np.stack([now.clients, now.loss.value, now.loss.weight * 2]) / door.count_deviation
        told.append({"item": now.update["item"] / door.deviation, "counts": counts})
        if door.rows_share:
            told[-1]["held"] = now.held["item"] * door.rows_share / door.noise / door.spread
    return {name: np.stack([each[name] for each in told]).reshape(rounds, -1) for name in told[0]}


def check_white(noise):
    """Standard normal numbers, of which none says anything about another."""
    assert stats.kstest(noise.ravel(), "norm").pvalue > SURE
    rounds, number = noise.shape
    correlations = np.corrcoef(noise)[np.triu_indices(rounds, 1)] * np.sqrt(number)
    assert np.abs(correlations).max() < stats.norm.isf(SURE / 2 / len(correlations)) * 1.1


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("matrix", [None, BLT, BANDED])
def test_the_noise_times_the_matrix_is_white(matrix, words):
    """All noise is C^-1 times independent noise of the promised size."""
    door = Door(clip=0.5, noise=3.0, cohort=4.0, matrix=matrix)
    noise = drawn(door, words)["item"]
    column = np.asarray(matrix.column(ROUNDS) if matrix else (1.0,))
    full = np.pad(column, (0, ROUNDS - len(column)))
    times = np.array([[full[i - j] if i >= j else 0 for j in range(ROUNDS)] for i in range(ROUNDS)])
    check_white(times @ noise)
    if matrix:
        prefix = np.cumsum(noise, axis=0)[-1].std()
        assert prefix < 0.6 * np.sqrt(ROUNDS)  # which is what it is for


def test_counts_have_noise_of_their_own_size():
    for matrix in (None, BLT):
        noise = drawn(Door(clip=0.5, noise=3.0, cohort=4.0, matrix=matrix), rounds=400)["counts"]
        column = matrix.column(400) if matrix else (1.0,)
        fresh = [np.convolve(each, column)[:400] for each in noise.T]
        assert stats.kstest(np.concatenate(fresh), "norm").pvalue > SURE


def test_noise_follows_the_clip():
    """Rows have that of the round's clip, counts always the same."""
    door = Door(clip=2.0, noise=3.0, cohort=4.0, quantile=0.5)  # the clip of `sums` is a quarter of that
    noise = drawn(door)
    check_white(noise["item"] * 4)
    assert stats.kstest(drawn(door, rounds=400)["counts"].ravel(), "norm").pvalue > SURE


def test_counts_of_rows_have_noise_of_their_own():
    """Rows that nobody holds as well."""
    check_white(drawn(Door(clip=2.0, noise=3.0, cohort=4.0, rows_share=0.5))["held"])


def test_noise_covers_all_bits():
    """The lowest bits of a word are as likely 0 as 1, whatever the sum is: noise in 32 bits would leave them as
    they are, and they would tell of it."""
    door = Door(clip=0.5, noise=2.0**21, cohort=4.0)
    noise, (total, carried) = own_noise(door, 7), sums(door, words=True)
    low = np.asarray(noise(total, carried)[0].update["item"]).ravel() & 7
    assert stats.chisquare(np.bincount(low, minlength=8)).pvalue > SURE


def test_without_noise_nothing_changes():
    door = Door(clip=0.5, noise=0.0, cohort=4.0, matrix=BLT)
    given = sums(door)
    assert own_noise(door)(*given) == given
