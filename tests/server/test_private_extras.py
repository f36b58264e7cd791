"""What else leaves by the door: a clip that follows a quantile, correlated noise, filtered rows, and heat."""

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
from partwise.data.heat import Heat
from partwise.metrics import Sums
from partwise.model.partition import keyed, partition
from partwise.privacy.matrix import Matrix
from partwise.server.cohort import Recruiting, apart, poisson
from partwise.server.heat_mean import sub_mean
from partwise.server.mean import mean, uniform
from partwise.server.private_sum import Door, filtered, private
from partwise.server.total import Known, Report, add, zero_total
from partwise.simulation.loop import Simulation
from partwise.simulation.plain import PlainSimulation
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.types import UserError

ITEMS, DIM = 30, 3
DOOR = Door(clip=0.5, noise=0.7, cohort=4.0, loss_bound=4.0)
FOLLOWING = DOOR._replace(quantile=0.5, clip_rate=0.3)
ROWS = DOOR._replace(rows_share=0.5, rows_above=1.0)
BLT = DOOR._replace(matrix=Matrix((0.3, 0.2), (0.9, 0.4)))
BANDED = DOOR._replace(matrix=Matrix((0.6, 0.5, 0.4)))
HEATS = {"item": Heat("item", np.arange(1, ITEMS + 1), 60)}


@pytest.fixture(scope="module")
def model():
    return matrix_factorization(ITEMS, DIM, num_users=8, scale=0.5)


@pytest.fixture(scope="module")
def parts(model):
    return partition(model, {"user": keyed("user"), "item": keyed("item")})


def report(rng, scale, loss=1.5):
    change = {"user": scale * rng.normal(size=(1, DIM)), "item": scale * rng.normal(size=(4, DIM))}
    leaves = {path: jnp.asarray(leaf, jnp.float32) for path, leaf in change.items()}
    return Report(leaves, jnp.asarray(2.0), Sums(jnp.asarray(2.0 * loss), jnp.asarray(2.0)))


def known(clip, keys=5):
    return Known({"clip": jnp.asarray(clip)}, {"item": keys - 1, "user": 1})


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-6, 1e6), st.floats(0.01, 10), st.floats(0.01, 3), st.booleans())
def test_no_client_adds_more_than_the_noise_is_made_for(seed, scale, clip, share, rows):
    """All coordinates together, in the units of the noise, whatever the clip is by now."""
    door = FOLLOWING._replace(share=share, rows_share=2 * share if rows else 0.0)
    sent = private(mean(uniform), door).encode(
        report(np.random.default_rng(seed), scale), jax.random.key(0), known(clip)
    )
    leaves = np.concatenate([np.ravel(leaf) for leaf in sent.update.values()]) / clip
    numbers = share * np.array([sent.clients, sent.loss.value, 2 * sent.loss.weight], float)
    held = door.rows_share * float(sent.weight) * np.ones(5 if rows else 0)
    added = np.linalg.norm(np.concatenate([leaves, numbers, held]))
    assert added <= door.spread * (1 + 1e-5)


def test_the_split_of_the_noise_is_the_published_one():
    """Andrew et al.: z_delta = (z^-2 - (2 sigma_b)^-2)^-1/2; Ghazi et al.: z = (z1^-2 + z2^-2)^-1/2."""
    share = 0.2
    door = Door(clip=2.0, noise=1.0, cohort=10.0, share=share, quantile=0.5)
    bits = (
        door.noise * door.spread / share
    )  # of clients, of the loss, and 2 sigma_b of who was within the clip
    alone = 1 / math.sqrt(door.noise**-2 - 3 * bits**-2)
    assert door.noise * door.spread == pytest.approx(alone)
    rows = Door(clip=2.0, noise=1.0, cohort=10.0, share=1e-9, rows_share=0.5)
    first, second = rows.noise * rows.spread / 0.5, rows.noise * rows.spread
    assert (first**-2 + second**-2) ** -0.5 == pytest.approx(rows.noise)


def summed(parts, aggregator, reports, more):
    total = zero_total(aggregator, parts, {"user": jnp.zeros((8, DIM)), "item": jnp.zeros((ITEMS, DIM))})
    for number, each in enumerate(reports):
        sent = aggregator.encode(each, jax.random.key(number), more)
        total = add(parts, total, sent, {"user": jnp.array([number]), "item": jnp.arange(4)})
    return total


def test_the_clip_follows_the_quantile(parts):
    """Norms are 1 to 5; half of them are within a clip of about 3."""
    door = FOLLOWING._replace(noise=0.0, cohort=5.0, clip=40.0, clip_rate=0.5)
    aggregator = private(mean(uniform), door)
    zero = zero_total(aggregator, parts, {"user": jnp.zeros((8, DIM)), "item": jnp.zeros((ITEMS, DIM))})
    reveal, carried = jax.jit(aggregator.reveal), aggregator.init(parts)
    for _ in range(60):
        clip = carried["public"]["clip"]
        within = sum(0.5 if norm <= clip else -0.5 for norm in (1, 2, 3, 4, 5))
        total = zero._replace(loss=Sums(jnp.zeros(()), jnp.asarray(within)))
        _, carried = reveal(total, carried, jax.random.key(0))
    assert 2 < float(carried["public"]["clip"]) < 4


def test_a_client_says_whether_its_update_was_within_the_clip():
    given_report = report(np.random.default_rng(0), 1.0)
    norm = math.sqrt(sum(float((leaf**2).sum()) for leaf in given_report.update.values()))
    encode = private(mean(uniform), FOLLOWING).encode
    assert float(encode(given_report, jax.random.key(0), known(1.1 * norm)).loss.weight) == 0.5
    assert float(encode(given_report, jax.random.key(0), known(0.9 * norm)).loss.weight) == -0.5


@pytest.mark.parametrize("door", [BLT, BANDED])
def test_correlated_noise_is_the_inverse_of_the_matrix_times_fresh_noise(parts, door):
    """Undone by the matrix, the noise is independent and of the stated size, in every coordinate of every round."""
    aggregator = private(mean(uniform), door)
    total = zero_total(aggregator, parts, {"user": jnp.zeros((8, DIM)), "item": jnp.zeros((ITEMS, DIM))})
    reveal = jax.jit(aggregator.reveal)
    carried, found = aggregator.init(parts), []
    for number in range(40):
        told, carried = reveal(total, carried, jax.random.key(number))
        found.append(np.asarray(told.update["item"]).ravel())
    column = np.zeros(40)
    column[: len(door.matrix.column(40))] = door.matrix.column(40)
    whole = np.array([[column[i - j] if i >= j else 0 for j in range(40)] for i in range(40)])
    fresh = whole @ np.stack(found) / door.deviation
    squares = (fresh**2).sum(0)
    assert squares.min() > 40 - 5.5 * math.sqrt(80)
    assert squares.max() < 40 + 7 * math.sqrt(80)
    assert fresh.var() == pytest.approx(1, rel=0.1)
    lagged = (fresh[1:] * fresh[:-1]).mean()
    assert abs(lagged) < 5 / math.sqrt(fresh[1:].size)


def test_rows_with_small_counts_are_left_as_they_are(parts):
    door = ROWS._replace(noise=0.01, rows_above=3.0)
    aggregator = filtered(private(mean(uniform), door), ("item",))
    reports = [report(np.random.default_rng(seed), 1.0) for seed in range(5)]
    total = summed(parts, aggregator, reports, known(0.5))
    np.testing.assert_allclose(total.held["item"][:4], 5 / math.sqrt(5), rtol=1e-5)
    told, carried = aggregator.reveal(total, {}, jax.random.key(0))
    found, _ = aggregator.decode(parts, told, carried, jax.random.key(0))
    moved = np.any(np.asarray(found["item"]) != 0, axis=1)
    assert moved[:4].all()
    assert moved[4:].sum() <= 1  # a row that nobody holds passes three deviations once in 740
    assert np.all(np.any(np.asarray(found["user"]) != 0, axis=1))  # a space that is not filtered


def test_rows_are_kept_by_their_noisy_counts_alone(parts):
    """Of rows that nobody holds, as many pass as noise does: otherwise it would show that nobody holds them."""
    aggregator = filtered(private(mean(uniform), ROWS), ("item",))
    total = zero_total(aggregator, parts, {"user": jnp.zeros((8, DIM)), "item": jnp.zeros((ITEMS, DIM))})
    reveal = jax.jit(lambda rng: aggregator.reveal(total, {}, rng)[0].held["item"])
    kept = np.stack([np.asarray(reveal(jax.random.key(seed))) for seed in range(200)])
    assert kept.mean() == pytest.approx(0.1587, abs=0.02)


def test_factors_of_heat_multiply_the_noise_too(parts):
    """They are applied after the noise, so they cost nothing more."""
    plain, heated = private(mean(uniform), DOOR), private(sub_mean(HEATS), DOOR)
    total = zero_total(plain, parts, {"user": jnp.zeros((8, DIM)), "item": jnp.zeros((ITEMS, DIM))})
    found = []
    for aggregator in (plain, heated):
        told, carried = aggregator.reveal(total, aggregator.init(parts), jax.random.key(0))
        found.append(aggregator.decode(parts, told, carried, jax.random.key(0))[0]["item"])
    factors = 60 / np.arange(1, ITEMS + 1)
    np.testing.assert_allclose(found[1], found[0] * factors[:, None], rtol=1e-5)


def test_noise_that_is_taken_back_must_keep_its_size_and_rows():
    for door in (BLT._replace(quantile=0.5), BLT._replace(rows_share=0.5)):
        with pytest.raises(UserError, match=r"privacy.mechanism = independent"):
            private(mean(uniform), door)


AGGREGATORS = {
    "following": private(mean(uniform), FOLLOWING),
    "blt": private(mean(uniform), BLT),
    "banded": private(mean(uniform), BANDED),
    "rows": filtered(private(mean(uniform), ROWS), ("user", "item")),
    "heat": private(sub_mean(HEATS), DOOR),
    "everything": filtered(private(sub_mean(HEATS), FOLLOWING._replace(rows_share=0.5)), ("item",)),
}


@pytest.mark.parametrize(
    "name",
    [
        "blt",
        "everything",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("following", "banded", "rows", "heat")),
    ],
)
def test_the_compiled_cohort_equals_the_plain_loop(model, parts, make_ratings, name):
    store = make_ratings([5, 3, 0, 6, 4, 7, 2, 5], ITEMS, seed=4, distinct=4)
    build = lambda rates: fed_avg(
        model,
        parts,
        update=update.by_steps(Batches(4), rates["update"]),
        optimizer=optimizers.Sgd(rates["server"]).on_server(),
        aggregator=AGGREGATORS[name],
    )
    recruiting = Recruiting(2, sampling=apart(4) if name in ("blt", "banded") else poisson())
    rates = {"update": 0.2, "server": 1.0}
    compiled = Simulation(build, rates, store, recruiting, seed=3, lanes=2, rounds_per_call=4)
    plain = PlainSimulation(build, rates, store, recruiting, seed=3)
    records = [record for call in compiled.run(6) for record in call]
    expected = [record for call in plain.run(6) for record in call]
    for path, leaf in plain.state.params.items():
        np.testing.assert_allclose(compiled.state.params[path], leaf, rtol=2e-5, atol=2e-6)
    jax.tree_util.tree_map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
        dict(compiled.state.aggregator),
        dict(plain.state.aggregator),
    )
    assert [each.clients for each in records] == [each.clients for each in expected]
