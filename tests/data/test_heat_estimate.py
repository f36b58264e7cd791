"""Heat estimated from cohorts, and heat by randomised response."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.data.heat import Heat, coefficients
from partwise.data.heat_estimate import JEFFREYS, LAPLACE, Seen
from partwise.data.heat_private import (
    debias,
    debias_variance,
    flip_probability,
    private_heat,
    randomize,
    randomized_counts,
)
from partwise.types import UserError

NUM_CLIENTS, COHORT = 4000, 50
SHARES = np.array([0.9, 0.5, 0.1, 0.02, 0.0])


@pytest.fixture(scope="module")
def held():
    """Bits of 4,000 clients: key m is held by exactly a share SHARES[m] of them."""
    rng = np.random.default_rng(0)
    ordered = np.arange(NUM_CLIENTS)[:, None] < SHARES * NUM_CLIENTS
    return rng.permuted(ordered, axis=0)


def see(held, rounds, seed):
    rng = np.random.default_rng(seed)
    seen = Seen(np.zeros(len(SHARES)), 0)
    for _ in range(rounds):
        cohort = rng.choice(NUM_CLIENTS, COHORT, replace=False)
        seen = seen.add(held[cohort].sum(axis=0), COHORT)
    return seen


def test_the_estimate_closes_in_as_one_over_the_root_of_the_clients_seen(held):
    errors, told = {}, {}
    for rounds in (4, 64):
        all_seen = [see(held, rounds, seed) for seed in range(100)]
        errors[rounds] = np.sqrt(np.mean([(seen.share() - SHARES) ** 2 for seen in all_seen], axis=0))[:4]
        told[rounds] = np.mean([seen.standard_error() for seen in all_seen], axis=0)[:4]
    np.testing.assert_allclose(errors[4] / errors[64], 4, rtol=0.35)  # 16 times the clients
    np.testing.assert_allclose(told[4] / told[64], 4, rtol=0.1)
    np.testing.assert_allclose(errors[64], told[64], rtol=0.25)


@given(st.integers(0, 10**6), st.sampled_from([JEFFREYS, LAPLACE]))
def test_a_key_never_seen_has_a_finite_factor(clients, prior):
    seen = Seen(np.array([0, clients]), clients)
    assert (seen.share(prior) > 0).all()
    assert (seen.share(prior) < 1).all()
    assert seen.coefficients(prior)[0] == pytest.approx((clients + 2 * prior) / prior)
    assert seen.coefficients(prior, cap=5).max() <= 5
    assert np.isfinite(seen.standard_error(prior)).all()


def test_jax_arrays_work_inside_a_compiled_round(held):
    import jax
    import jax.numpy as jnp

    @jax.jit
    def round_of(seen, bits):
        seen = seen.add(bits.sum(axis=0), bits.shape[0])
        return seen, seen.standard_error(), seen.coefficients(cap=20.0)

    begin = Seen(jnp.zeros(len(SHARES)), jnp.zeros(()))
    seen, error, factors = round_of(begin, jnp.asarray(held[:COHORT]))
    expected = Seen(np.zeros(len(SHARES)), 0).add(held[:COHORT].sum(axis=0), COHORT)
    np.testing.assert_allclose(seen.holders, expected.holders)
    np.testing.assert_allclose(error, expected.standard_error(), rtol=1e-6)
    np.testing.assert_allclose(factors, expected.coefficients(cap=20.0), rtol=1e-6)


def test_a_bit_is_epsilon_private():
    for epsilon in (0.1, 1.0, 4.0):
        q = flip_probability(epsilon)
        assert (1 - q) / q == pytest.approx(np.exp(epsilon))


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_debiased_counts_are_unbiased_and_vary_as_told(held, epsilon):
    """From the bits of every client, and from the law of their sum alone."""
    rng = np.random.default_rng(1)
    heat = Heat("item", held.sum(axis=0), NUM_CLIENTS)
    from_bits = [randomize(held[:400], epsilon, rng).sum(axis=0) for _ in range(300)]
    from_law = [randomized_counts(heat, epsilon, rng) for _ in range(3000)]
    for sent, truth, clients in (
        (from_bits, held[:400].sum(axis=0), 400),
        (from_law, heat.counts, NUM_CLIENTS),
    ):
        few = len(sent) == 300
        found, variance = debias(np.array(sent), clients, epsilon), debias_variance(clients, epsilon)
        np.testing.assert_allclose(found.mean(axis=0), truth, atol=4 * (variance / len(sent)) ** 0.5)
        np.testing.assert_allclose(found.var(axis=0), variance, rtol=0.35 if few else 0.12)
        assert found.var(axis=0).mean() == pytest.approx(variance, rel=0.15 if few else 0.05)
    assert debias_variance(100, epsilon) == pytest.approx(100 * np.exp(epsilon) / np.expm1(epsilon) ** 2)


def test_private_counts_are_held_between_the_noise_and_the_population():
    epsilon, clients = 1.0, 1000
    noise = round(debias_variance(clients, epsilon) ** 0.5)
    q = flip_probability(epsilon)
    sent = np.array([0, clients, round(clients * (q + 0.5 * (1 - 2 * q)))])
    heat = private_heat(sent, clients, epsilon, "item")
    assert debias(sent, clients, epsilon)[0] < 0
    assert heat.counts.tolist() == [noise, clients, pytest.approx(500, abs=2)]
    assert coefficients(heat).max() == pytest.approx(clients / noise)
    assert private_heat(np.array([1]), 2, 0.01, "item").counts.tolist() == [
        2
    ]  # nothing can be told of two clients


def test_mistakes():
    with pytest.raises(UserError, match="epsilon is 0: give more than 0"):
        flip_probability(0)
    with pytest.raises(UserError, match="count heat by clients, not by samples"):
        randomized_counts(Heat("item", np.array([3]), 9, "samples"), 1.0, np.random.default_rng(0))
    with pytest.raises(UserError, match="prior is 0"):
        Seen(np.zeros(2), 3).share(0)
    with pytest.raises(UserError, match="cap is 0"):
        Seen(np.zeros(2), 3).coefficients(cap=0)
