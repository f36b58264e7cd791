"""What leaves a client: clipped, rounded, in integers; the sum is the same in lanes, on devices and one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithms.fed_avg import fed_avg
from partwise.client import update
from partwise.client.batches import Batches
from partwise.metrics import Sums
from partwise.model.partition import keyed, partition
from partwise.server.cohort import Recruiting
from partwise.server.encoding import clipped, fixed_point
from partwise.server.mean import by_examples, mean, uniform
from partwise.server.report_form import SUMS, ReportForm
from partwise.server.total import Report, add, zero_total
from partwise.simulation.loop import Simulation
from partwise.simulation.plain import PlainSimulation
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.testing import check_aggregator
from partwise.types import UserError

NUM_ITEMS, DIM, USERS = 30, 3, 7
RATES = {"update": 0.2, "server": 1.0}
BITS = 16


def report(update, weight=2.0):
    leaves = {path: jnp.asarray(leaf, jnp.float32) for path, leaf in update.items()}
    return Report(leaves, jnp.asarray(weight), Sums(jnp.asarray(1.5), jnp.asarray(weight)))


@pytest.fixture(scope="module")
def model():
    return matrix_factorization(NUM_ITEMS, DIM, num_users=USERS, scale=0.5)


@pytest.fixture(scope="module")
def parts(model):
    return partition(model, {"user": keyed("user"), "item": keyed("item")})


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings([5, 3, 0, 6, 4, 7, 2], NUM_ITEMS, seed=4, distinct=4)


@pytest.fixture(scope="module")
def build(model, parts):
    """Of an aggregator, rates -> algorithm."""
    return lambda aggregator, optimizer=optimizers.Sgd: (
        lambda rates: fed_avg(
            model,
            parts,
            update=update.by_steps(Batches(4), rates["update"]),
            optimizer=optimizer(rates["server"]).on_server(),
            aggregator=aggregator,
        )
    )


def after(simulation, rounds=2):
    records = [record for call in simulation.run(rounds) for record in call]
    return jax.tree_util.tree_map(np.array, simulation.state.params), records


def test_an_update_is_clipped_over_all_its_leaves_together():
    sent = clipped(mean(uniform), 2.0).encode(report({"a": [3.0, 0.0], "b": [4.0]}), jax.random.key(0))
    np.testing.assert_allclose(sent.update["a"], [1.2, 0], rtol=1e-6)
    np.testing.assert_allclose(sent.update["b"], [1.6], rtol=1e-6)
    short = clipped(mean(by_examples), 9.0).encode(report({"a": [3.0, 0.0]}), jax.random.key(0))
    np.testing.assert_allclose(short.update["a"], [6, 0], rtol=1e-6)
    check_aggregator(clipped(mean(uniform), 10.0))


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_what_is_not_finite_is_not_valid_and_adds_nothing_even_as_integers(broken):
    for aggregator in (mean(), clipped(mean(), 1.0), fixed_point(mean(), BITS)):
        sent = aggregator.encode(report({"a": [1.0, broken]}), jax.random.key(0))
        assert not sent.valid
    assert not np.any(sent.update["a"])
    assert sent.weight == 0


def test_rounding_is_right_on_average_and_off_by_less_than_a_step():
    aggregator = fixed_point(mean(uniform), 4)
    values = np.array([0.3, -0.3, 1.01, 0.0, -2.0], np.float32)
    draw = jax.vmap(lambda key: aggregator.encode(report({"a": values}), key).update["a"])
    words = np.asarray(draw(jax.random.split(jax.random.key(1), 4000)))
    assert words.dtype == np.uint32
    found = words.view(np.int32) / 16
    assert np.abs(found - values).max() < 1 / 16
    np.testing.assert_allclose(found.mean(axis=0), values, atol=3e-3)
    np.testing.assert_array_equal(found[:, 3:], np.broadcast_to(values[3:], (4000, 2)))


def test_integer_sums_are_the_same_in_any_order_and_wrap_around():
    aggregator = fixed_point(mean(uniform), 0)
    parts = partition(matrix_factorization(2, 1), {})
    params = {path: jnp.zeros(leaf.shape) for path, leaf in parts.server_shapes.items()}
    rng = np.random.default_rng(0)
    size = lambda: 1.5e9 * rng.uniform(-1, 1)
    sent = [
        aggregator.encode(report({p: np.full(x.shape, size()) for p, x in params.items()}), jax.random.key(i))
        for i in range(6)
    ]
    totals = []
    for order in (range(6), reversed(range(6)), (3, 1, 5, 0, 2, 4)):
        total = zero_total(aggregator, parts, params)
        for i in order:
            total = add(parts, total, sent[i], {})
        totals.append(total)
    exact = sum(np.asarray(each.update["item"]).view(np.int32).astype(int) for each in sent)
    assert np.abs(exact).max() >= 2**31 or any(
        np.abs(x.update["item"].view(np.int32)).max() > 1e9 for x in sent
    )
    for total in totals:
        np.testing.assert_array_equal(np.asarray(total.update["item"]), exact.astype(np.uint32))
        assert aggregator.reveal(total, {}, jax.random.key(0))[0].clients == 6


@pytest.mark.parametrize(
    "aggregator",
    [fixed_point(clipped(mean(uniform), 0.3), BITS), fixed_point(mean(over_holders=("user", "item")), BITS)],
    ids=["clipped", "over holders"],
)
def test_integer_sums_in_lanes_and_on_two_devices_equal_the_plain_loop(build, store, aggregator):
    """Every total is bit for bit the same, so the models differ by the clients' arithmetic alone."""
    plain, told = after(PlainSimulation(build(aggregator), RATES, store, Recruiting(5), seed=3))
    for devices in {1, min(2, len(jax.devices()))}:
        compiled = Simulation(
            build(aggregator), RATES, store, Recruiting(5), seed=3, lanes=2, num_devices=devices
        )
        found, records = after(compiled)
        for path, leaf in plain.items():
            np.testing.assert_allclose(found[path], leaf, atol=2**-BITS)
        fields = ("clients", "empty", "broken")
        assert [[getattr(r, f) for f in fields] for r in records] == [
            [getattr(r, f) for f in fields] for r in told
        ]
        np.testing.assert_allclose([r.loss for r in records], [r.loss for r in told], rtol=1e-3)


def test_integers_learn_as_floats_do(build, store):
    whole = after(Simulation(build(fixed_point(mean(), BITS)), RATES, store, Recruiting(5), seed=3))[0]
    plain = after(Simulation(build(mean()), RATES, store, Recruiting(5), seed=3))[0]
    for path, leaf in plain.items():
        np.testing.assert_allclose(whole[path], leaf, atol=1e-3)


def noisy(aggregator):
    """Noise on every row, whoever sent it."""

    def decode(partition, total, carried, rng):
        means, carried = aggregator.decode(partition, total, carried, rng)
        keys = dict(zip(sorted(means), jax.random.split(rng, len(means)), strict=True))
        return {p: x + jax.random.normal(keys[p], x.shape) for p, x in means.items()}, carried

    return aggregator._replace(decode=decode, all_rows=True)


def test_an_aggregator_that_sees_all_rows_moves_those_that_nobody_sent(build, store, monkeypatch):
    """Although its optimizer would let tables be cut to the rows of the cohort. The noise is the round's, so it is
    the same in both backends."""
    monkeypatch.setattr(Simulation, "_whole_tables", lambda self, whole=Simulation._whole_tables: whole(self))
    make = build(noisy(mean()))
    compiled = Simulation(make, RATES, store, Recruiting(2), seed=3)
    assert not compiled._cut_tables
    before = {path: np.array(leaf) for path, leaf in compiled.state.params.items()}
    found, _ = after(compiled)
    plain, _ = after(PlainSimulation(make, RATES, store, Recruiting(2), seed=3))
    for path, leaf in plain.items():
        assert np.all(found[path] != before[path])
        np.testing.assert_allclose(found[path], leaf, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", [Simulation, PlainSimulation])
def test_a_lazy_optimizer_and_an_aggregator_of_all_rows_do_not_fit(build, store, backend):
    with pytest.raises(UserError, match="lazy server optimizer"):
        backend(build(noisy(mean()), optimizers.LazyAdam), RATES, store, Recruiting(2))


def test_reports_have_the_type_of_the_sum(parts):
    for aggregator, dtype in ((mean(), np.float32), (fixed_point(mean(), BITS), np.uint32)):
        shapes = ReportForm(aggregator, parts).shapes({"user": 1, "item": 4})
        assert {x.dtype.name for x in shapes.values()} == {np.dtype(dtype).name}
        assert shapes["item"].shape == (4, DIM)
        assert shapes[SUMS].shape == (4,)


def test_mistakes():
    with pytest.raises(UserError, match="above 0, not -1"):
        clipped(mean(), -1)
    with pytest.raises(UserError, match="0 to 30 bits after it, not 31"):
        fixed_point(mean(), 31)
