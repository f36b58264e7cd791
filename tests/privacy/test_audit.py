"""Canaries: an attacker who knows a client's update, and wants to know whether it took part, learns no more than is
claimed. The same attack finds out mechanisms that are broken (Jagielski et al., 2020; Nasr et al., 2021)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")

from partwise.metrics import Sums
from partwise.model.partition import keyed, partition
from partwise.privacy.accounting import Rounds, epsilon
from partwise.server.mean import mean, uniform
from partwise.server.private_sum import Door, private
from partwise.server.total import Report, add, zero_total
from partwise.tasks.matrix_factorization import matrix_factorization

ITEMS, DIM, ROWS = 12, 2, 4
DELTA = 0.01  # large, so that a hundred thousand trials see what it allows
SURE = 1e-6  # chance of a false alarm
DOOR = Door(clip=0.5, noise=1.0, cohort=4.0, share=0.1, loss_bound=4.0)
RELEASES = 120_000  # with the canary, and as many without it
# what a trial is: how strong the noise is, how often clients take part, and in how many rounds
ONE_ROUND = (Rounds(1.0, 100, 100, "poisson"), 1)
FOUR_ROUNDS = (Rounds(0.7, 30, 100, "poisson"), 4)


@pytest.fixture(scope="module")
def parts():
    return partition(matrix_factorization(ITEMS, DIM), {"item": keyed("item")})


def report(change, weight=1.0):
    """Of a client with these changes of its rows, and a loss above the bound."""
    leaves = {"user": jnp.zeros(DIM), "item": jnp.asarray(change, jnp.float32)}
    return Report(leaves, jnp.asarray(weight), Sums(jnp.asarray(100.0 * weight), jnp.asarray(weight)))


def canary():
    """The changes of the canary: a hundred times the clip, in a direction that the attacker knows."""
    direction = np.random.default_rng(0).normal(size=(ROWS, DIM))
    return 100 * DOOR.clip * direction / np.linalg.norm(direction)


@pytest.fixture(scope="module")
def sums_of(parts):
    """The sums of a cohort with the canary, and without it, by how clients encode their reports."""
    others = [report(np.random.default_rng(seed).normal(size=(ROWS, DIM))) for seed in (1, 2, 3)]
    start = zero_total(mean(uniform), parts, {"user": jnp.zeros(DIM), "item": jnp.zeros((ITEMS, DIM))})

    def summed(encode, first):
        total = start
        for number, each in enumerate([first, *others]):
            sent = encode(each, jax.random.key(number))
            total = add(parts, total, sent, {"item": jnp.arange(ROWS) + 2 * number})
        return total

    def both(encode):
        program = jax.jit(partial(summed, encode))
        return program(report(canary())), program(report(0 * canary(), weight=0.0))

    return {"clipped": both(private(mean(uniform), DOOR).encode), "as it is": both(mean(uniform).encode)}


def line(revealed):
    """Everything that is told of a sum, in the units of its noise."""
    counts = jnp.stack([revealed.clients, revealed.loss.value / DOOR.loss_bound]) * DOOR.clip * DOOR.share
    return jnp.concatenate([*(jnp.ravel(revealed.update[path]) for path in ("user", "item")), counts])


@jax.jit
def scores(believed, claimed, sums, noise, chance, keys):
    """Log-likelihood ratios of many releases, with the canary and without it, for an attacker who believes that
    there is the claimed noise: no score tells more. Keys are [world, release]. The canary comes by chance, and
    `sums` get `noise`."""
    door = lambda z: private(mean(uniform), DOOR._replace(noise=z))
    reveal = lambda total, z, rng: line(door(z).reveal(total, {}, rng)[0])
    deviation = DOOR._replace(noise=claimed).deviation
    there, absent = (reveal(each, claimed, None) for each in believed)
    shift = (there - absent) / deviation

    def release(inside, rng):
        secret, drawn = jax.random.split(rng)
        comes = inside & jax.random.bernoulli(drawn, chance)
        seen = reveal(jax.tree_util.tree_map(partial(jnp.where, comes), *sums), noise, secret)
        ratio = jnp.dot((seen - absent) / deviation - shift / 2, shift)
        return jnp.logaddexp(jnp.log1p(-chance), jnp.log(chance) + ratio)

    return jax.vmap(jax.vmap(release, (None, 0)))(jnp.array([True, False]), keys)


def audited(sums_of, released, sums="clipped", noise=1.0, always=False):
    """The claim, and the scores of an attack. The mechanism may be broken: in what is added up, by how much noise
    there is, or by who takes part."""
    rounds, steps = released
    chance = 1.0 if always else rounds.cohort / rounds.population
    keys = jax.random.split(jax.random.key(7), (2, RELEASES))
    found = scores(sums_of["clipped"], rounds.noise, sums_of[sums], noise * rounds.noise, chance, keys)
    return epsilon(rounds, steps, DELTA), np.asarray(found).reshape(2, -1, steps).sum(-1)


@pytest.mark.parametrize("released", [ONE_ROUND, FOUR_ROUNDS], ids=["one round", "four rounds"])
def test_the_canary_is_not_found_better_than_claimed(sums_of, released, epsilon_bound):
    claim, found = audited(sums_of, released)
    assert epsilon_bound(*found, DELTA, risk=SURE) <= claim
    assert epsilon_bound(*found, DELTA) > 0.6 * claim > 0.1  # the attack is a strong one


@pytest.mark.parametrize("broken", [{"noise": 0.5}, {"sums": "as it is"}], ids=["half the noise", "no clip"])
@pytest.mark.parametrize("released", [ONE_ROUND, FOUR_ROUNDS], ids=["one round", "four rounds"])
def test_a_broken_mechanism_is_found_out(sums_of, released, broken, epsilon_bound):
    claim, found = audited(sums_of, released, **broken)
    assert epsilon_bound(*found, DELTA, risk=SURE) > claim


def test_cohorts_that_are_not_drawn_are_found_out(sums_of, epsilon_bound):
    """The claim for four rounds rests on chance: a client who is in all of them has less privacy."""
    claim, found = audited(sums_of, FOUR_ROUNDS, always=True)
    assert epsilon_bound(*found, DELTA, risk=SURE) > claim


def test_the_bound_is_right_for_two_normal_numbers(epsilon_bound):
    """Without any mechanism: a shift of one standard deviation is a Gaussian release with noise 1."""
    rng, exact = np.random.default_rng(0), epsilon(ONE_ROUND[0], 1, DELTA)
    bound = epsilon_bound(rng.normal(1, 1, 10**6), rng.normal(0, 1, 10**6), DELTA, risk=SURE)
    assert 0.85 * exact < bound <= exact
    assert epsilon_bound(rng.normal(0, 1, 10**5), rng.normal(0, 1, 10**5), DELTA, risk=SURE) <= 0
