from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise.metrics import Sums
from partwise.model.partition import keyed, partition
from partwise.model.spec import Model
from partwise.server.mean import mean, uniform
from partwise.server.total import Report, add, zero_total

RNG = jax.random.key(0)
START = {"table": jnp.zeros((4, 2)), "bias": jnp.zeros(1)}


@pytest.fixture(scope="module")
def parts():
    return partition(Model(lambda rng: START, None, None), {"table": keyed("item")})


def report(rows, bias, weight):
    update = {"table": jnp.asarray(rows, jnp.float32), "bias": jnp.array([bias])}
    return Report(update, jnp.asarray(weight), Sums(jnp.asarray(weight * 2), jnp.asarray(weight)))


# Keys 3 and 0; key 0 alone, padded with a row that does not exist; a client with nothing to say.
REPORTS = [
    (report([[1, 2], [3, 4]], 10.0, 2.0), {"item": np.array([3, 0])}),
    (report([[5, 6], [7, 8]], 20.0, 6.0), {"item": np.array([0, 4])}),
    (report([[9, 9], [9, 9]], 90.0, 0.0), {"item": np.array([1, 2])}),
]


def total_of(parts, aggregator, reports):
    total = zero_total(aggregator, parts, START)
    for each, rows in reports:
        total = add(parts, total, aggregator.encode(each, RNG), rows)
    return total


def decoded(parts, aggregator, total):
    return aggregator.decode(parts, total, {}, RNG)[0]


def test_weighted_mean_is_over_all_examples_not_over_the_holders_of_a_row(parts):
    total = total_of(parts, mean(), REPORTS)
    found = decoded(parts, mean(), total)
    np.testing.assert_allclose(found["bias"], [(2 * 10 + 6 * 20) / 8])
    row_0 = [(2 * 3 + 6 * 5) / 8, (2 * 4 + 6 * 6) / 8]
    np.testing.assert_allclose(found["table"], [row_0, [0, 0], [0, 0], [2 / 8, 4 / 8]])
    assert (float(total.weight), float(total.clients)) == (8, 2)
    assert (float(total.loss.value), float(total.loss.weight)) == (16, 8)


def test_uniform_mean_counts_clients_with_examples(parts):
    found = decoded(parts, mean(uniform), total_of(parts, mean(uniform), REPORTS))
    np.testing.assert_allclose(found["bias"], [15])
    np.testing.assert_allclose(found["table"][0], [4, 5])


def test_mean_over_holders_divides_a_row_by_the_weight_of_those_who_hold_it(parts):
    """Shared leaves stay a mean over the cohort; a row that nobody with a weight holds does not move."""
    aggregator = mean(over_holders=("item",))
    total = total_of(parts, aggregator, REPORTS)
    np.testing.assert_allclose(total.held["item"], [8, 0, 0, 2])
    found = decoded(parts, aggregator, total)
    np.testing.assert_allclose(found["bias"], [(2 * 10 + 6 * 20) / 8])
    row_0 = [(2 * 3 + 6 * 5) / 8, (2 * 4 + 6 * 6) / 8]
    np.testing.assert_allclose(found["table"], [row_0, [0, 0], [0, 0], [1, 2]])


def test_the_order_of_reports_does_not_matter(parts):
    means = [decoded(parts, mean(), total_of(parts, mean(), r)) for r in itertools.permutations(REPORTS)]
    for other in means[1:]:
        np.testing.assert_allclose(other["table"], means[0]["table"], rtol=1e-6)


@pytest.mark.parametrize(
    "aggregator",
    [mean(), mean(uniform), mean(over_holders=("item",))],
    ids=["weighted", "uniform", "holders"],
)
def test_nobody_means_no_update(parts, aggregator):
    total = total_of(parts, aggregator, REPORTS[2:])
    assert total.weight == 0
    assert total.clients == 0
    for path, update in decoded(parts, aggregator, total).items():
        np.testing.assert_array_equal(update, np.zeros_like(START[path]))


def test_who_has_nothing_to_report_never_counts_whatever_an_aggregator_says(parts):
    """An empty lane is such a client: no aggregator has to think of it."""
    careless = mean(lambda report: jnp.ones(()))
    total = total_of(parts, careless, REPORTS)
    assert (float(total.weight), float(total.clients)) == (2, 2)
    np.testing.assert_allclose(decoded(parts, careless, total)["bias"], [15])
