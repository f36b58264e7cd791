from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.metrics import (
    PERCENTILES,
    Pairs,
    Sums,
    UndefinedError,
    add_sums,
    area_under_curve,
    over_clients,
    over_examples,
    over_pairs,
    to_host,
    zero_sums,
)

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


def test_area_under_curve_by_hand():
    """Two positives and two negatives: of four pairs two are right, one is wrong and one is a tie."""
    assert area_under_curve(np.array([0.9, 0.5, 0.5, 0.7]), np.array([1, 1, 0, 0])) == 2.5 / 4


@given(
    st.lists(
        st.tuples(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0]), st.booleans()), min_size=2, max_size=60
    )
)
def test_area_under_curve_is_the_share_of_pairs_in_order(examples):
    scores, labels = (np.array(column) for column in zip(*examples, strict=True))
    above, below = scores[labels], scores[~labels]
    if not len(above) or not len(below):
        with pytest.raises(UndefinedError, match=f"all {len(scores)} labels are"):
            area_under_curve(scores, labels)
        return
    more, same = above[:, None] > below, above[:, None] == below
    assert area_under_curve(scores, labels) == (2 * more.sum() + same.sum()) / (2 * len(above) * len(below))


def test_area_under_curve_is_exact_for_many_equal_scores():
    labels = np.arange(1_000_000) % 3 == 0
    assert area_under_curve(np.zeros(len(labels)), labels) == 0.5


def test_scores_that_are_no_numbers_give_no_number():
    assert math.isnan(area_under_curve(np.array([0.1, math.nan]), np.array([0, 1])))


def test_pooled_metrics_without_a_value_say_why():
    held = np.array([True, True, False])
    pairs = {"auc": Pairs(np.arange(3.0), np.array([1, 1, 0]), held)}
    assert over_pairs(pairs, {"auc": area_under_curve}) == (
        {"auc": None},
        {"auc": "all 2 labels are positive, and both kinds are needed"},
    )
    nobody = {"auc": Pairs(*np.zeros((2, 0)), np.zeros(0, bool))}
    assert over_pairs(nobody, {"auc": area_under_curve})[1] == {"auc": "there are no examples"}
