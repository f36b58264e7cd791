from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from partwise.metrics import PERCENTILES, Sums, add_sums, over_clients, over_examples, to_host, zero_sums

VALUES = np.array([4.0, 9.0, 0.0, 50.0])
WEIGHTS = np.array([1.0, 4.0, 0.0, 2.0])
SQUARES = {"rmse": Sums(VALUES, WEIGHTS), "loss": Sums(VALUES, WEIGHTS)}


def test_sums_add_up_from_nothing():
    total = add_sums(add_sums(zero_sums(), Sums(1.0, 2.0)), Sums(3.0, 4.0))
    assert (float(total.value), float(total.weight)) == (4.0, 6.0)


def test_pooled_metric_is_not_a_mean_of_client_means():
    pooled = over_examples(SQUARES, {"rmse": math.sqrt})
    assert pooled["loss"] == pytest.approx(63 / 7)
    assert pooled["rmse"] == pytest.approx(3.0)


def test_pooled_metric_without_examples_is_not_a_number():
    assert math.isnan(over_examples({"rmse": Sums(0.0, 0.0)}, {"rmse": math.sqrt})["rmse"])


def test_over_clients_finishes_each_client_and_skips_those_without_examples():
    result = over_clients(SQUARES, {"rmse": math.sqrt})["rmse"]
    each = np.sqrt([4.0, 2.25, 25.0])
    assert result["clients"] == 3
    assert result["mean"] == pytest.approx(each.mean())
    for p in PERCENTILES:
        assert result[f"p{p}"] == pytest.approx(np.percentile(each, p))


def test_over_clients_with_nobody():
    assert over_clients({"loss": Sums(np.zeros(3), np.zeros(3))}, {}) == {"loss": {"clients": 0}}


def test_to_host_gives_numpy_leaves():
    host = to_host({"a": jnp.arange(3), "b": Sums(jnp.zeros(()), jnp.ones(()))})
    assert isinstance(host["a"], np.ndarray)
    assert isinstance(host["b"], Sums)
    np.testing.assert_array_equal(host["a"], [0, 1, 2])
