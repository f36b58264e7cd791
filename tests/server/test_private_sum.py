"""The door: what a client can add is bounded, every coordinate has noise, and nothing leaves around it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partwise import optimizers
from partwise.algorithms.fed_avg import fed_avg
from partwise.client import update
from partwise.client.batches import Batches
from partwise.metrics import Sums
from partwise.model.partition import keyed, partition
from partwise.server.cohort import Recruiting, poisson
from partwise.server.mean import mean, uniform
from partwise.server.private_sum import Door, private
from partwise.server.total import Report, add, zero_total
from partwise.simulation.loop import Simulation
from partwise.simulation.plain import PlainSimulation
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.types import UserError

ITEMS, DIM = 30, 3
DOOR = Door(clip=0.5, noise=1.0, cohort=3.0, share=0.1, loss_bound=4.0)
QUIET = DOOR._replace(noise=0.0)


@pytest.fixture(scope="module")
def model():
    return matrix_factorization(ITEMS, DIM, num_users=7, scale=0.5)


@pytest.fixture(scope="module")
def parts(model):
    return partition(model, {"user": keyed("user"), "item": keyed("item")})


def report(change, weight=2.0, loss=1.5):
    leaves = {path: jnp.asarray(leaf, jnp.float32) for path, leaf in change.items()}
    return Report(leaves, jnp.asarray(weight), Sums(jnp.asarray(loss * weight), jnp.asarray(weight)))


def changes(rng, scale):
    return {"user": scale * rng.normal(size=(1, DIM)), "item": scale * rng.normal(size=(4, DIM))}


def vector(sent, door):
    """All that a client adds to the sum, in the units of its noise."""
    parts = [np.ravel(leaf) for leaf in sent.update.values()]
    more = [door.clip * door.share * float(each) for each in (sent.clients, sent.loss.value)]
    return np.concatenate([*parts, more])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-6, 1e6), st.floats(0, 1e6), st.floats(0.001, 5.0))
def test_no_client_adds_more_than_the_noise_is_made_for(seed, scale, loss, share):
    door = DOOR._replace(share=share)
    given_report = report(changes(np.random.default_rng(seed), scale), loss=loss)
    sent = private(mean(uniform), door).encode(given_report, jax.random.key(0))
    assert np.linalg.norm(vector(sent, door)) <= door.clip * math.sqrt(1 + 2 * share**2) * (1 + 1e-5)
    assert door.deviation == pytest.approx(door.noise * door.clip * math.sqrt(1 + 2 * share**2))


def test_small_updates_are_not_changed_and_weights_are_equal():
    change = {"user": np.full((1, DIM), 0.01), "item": np.full((4, DIM), 0.02)}
    for weight in (1.0, 100.0):
        sent = private(mean(uniform), QUIET).encode(report(change, weight), jax.random.key(0))
        np.testing.assert_allclose(sent.update["item"], change["item"], rtol=1e-6)
        assert float(sent.weight) == float(sent.clients) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_that_is_not_finite_is_an_empty_one(bad):
    change = {"user": np.array([[bad, 0, 0]]), "item": np.ones((4, DIM))}
    sent = private(mean(uniform), DOOR).encode(report(change, loss=bad), jax.random.key(0))
    assert bool(sent.valid)
    assert not np.any(vector(sent, DOOR))


def summed(parts, aggregator, reports):
    total = zero_total(aggregator, parts, {"user": jnp.zeros((7, DIM)), "item": jnp.zeros((ITEMS, DIM))})
    for number, each in enumerate(reports):
        sent = aggregator.encode(each, jax.random.key(number))
        total = add(parts, total, sent, {"user": jnp.array([number]), "item": jnp.arange(4)})
    return total


def test_every_coordinate_has_noise_of_the_stated_size(parts):
    """Rows that nobody touched too: otherwise it would show which were touched."""
    aggregator = private(mean(uniform), DOOR)
    rng = np.random.default_rng(0)
    total = summed(parts, aggregator, [report(changes(rng, 1.0)) for _ in range(3)])
    found = [aggregator.reveal(total, {}, jax.random.key(seed))[0] for seed in range(400)]
    for path, leaf in total.update.items():
        noise = np.stack([np.asarray(each.update[path] - leaf) for each in found]) / DOOR.deviation
        squares = (noise**2).sum(0)
        # chi-square with 400 degrees of freedom, for each of up to 90 coordinates
        assert squares.min() > 400 - 5.5 * math.sqrt(800)
        assert squares.max() < 400 + 5.5 * math.sqrt(800)
        assert abs(noise.mean()) < 5 / math.sqrt(noise.size)
    counts = np.array([float(each.clients) for each in found])
    assert np.std(counts) == pytest.approx(DOOR.count_deviation, rel=0.15)
    assert np.mean(counts) == pytest.approx(3, abs=5 * DOOR.count_deviation / 20)


def test_sums_are_divided_by_a_number_that_does_not_depend_on_who_came(parts):
    aggregator = private(mean(uniform), QUIET)
    change = {"user": np.zeros((1, DIM)), "item": np.full((4, DIM), 0.1)}
    for clients in (1, 2, 5):
        total = summed(parts, aggregator, [report(change)] * clients)
        revealed, _ = aggregator.reveal(total, {}, jax.random.key(0))
        found, _ = aggregator.decode(parts, revealed, {}, jax.random.key(0))
        np.testing.assert_allclose(found["item"][:4], 0.1 * clients / QUIET.cohort, rtol=1e-5)
        assert float(revealed.clients) == clients
        assert float(revealed.loss.value / revealed.loss.weight) == pytest.approx(1.5)


def test_weights_of_holders_cannot_be_told(parts):
    with pytest.raises(UserError, match=r"server.mean = cohort"):
        private(mean(uniform, ("item",)), DOOR)


def builder(model, parts, aggregator):
    return lambda rates: fed_avg(
        model,
        parts,
        update=update.by_steps(Batches(4), rates["update"]),
        optimizer=optimizers.Sgd(rates["server"]).on_server(),
        aggregator=aggregator,
    )


@pytest.mark.parametrize("noise", [0.0, 0.7])
def test_the_compiled_cohort_equals_the_plain_loop(model, parts, make_ratings, noise):
    store = make_ratings([5, 3, 0, 6, 4, 7, 2], ITEMS, seed=4, distinct=4)
    aggregator = private(mean(uniform), DOOR._replace(noise=noise, cohort=4.0))
    build = builder(model, parts, aggregator)
    recruiting = Recruiting(4, sampling=poisson())
    rates = {"update": 0.2, "server": 1.0}
    compiled = Simulation(build, rates, store, recruiting, seed=3, lanes=2)
    plain = PlainSimulation(build, rates, store, recruiting, seed=3)
    records = [record for call in compiled.run(6) for record in call]
    expected = [record for call in plain.run(6) for record in call]
    for path, leaf in plain.state.params.items():
        np.testing.assert_allclose(compiled.state.params[path], leaf, rtol=2e-5, atol=2e-6)
    assert [each.clients for each in records] == [each.clients for each in expected]
    for each in (*records, *expected):
        assert each.broken == ()
        assert (each.examples, each.bytes_down, each.bytes_up, each.empty, each.missed) == (None,) * 5


def test_who_diverged_is_not_told(model, parts, make_ratings):
    store = make_ratings([5, 3], ITEMS, seed=4, distinct=4)
    aggregator = private(mean(uniform), Door(1e30, 1e30, 1.0))
    build = builder(model, parts, aggregator)
    for kind in (Simulation, PlainSimulation):
        with pytest.raises(UserError, match="no longer finite") as caught:
            for _ in kind(build, {"update": 0.1, "server": 1.0}, store, Recruiting(2)).run(2):
                pass
        assert "client" not in str(caught.value).split("All updates")[0]
