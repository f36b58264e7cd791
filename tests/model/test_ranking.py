"""Ranks, metrics and losses against obvious loops, and the chances of drawn negatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from partwise.metrics import UndefinedError
from partwise.model.ranking import (
    Loss,
    Negatives,
    bpr_losses,
    coverage,
    draw,
    first,
    full_losses,
    hit,
    parse_loss,
    rank_of,
    ranking_metrics,
    sampled_losses,
)
from partwise.model.softmax import NOTHING
from partwise.model.spec import Metric
from partwise.types import UserError

TARGET = lambda batch: batch["item"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=9), st.data())
def test_the_rank_is_the_place_in_a_sorted_list_and_the_middle_of_equal_ones(scores, data):
    target = data.draw(st.integers(0, len(scores) - 1))
    places = [i + 1 for i, value in enumerate(sorted(scores, reverse=True)) if value == scores[target]]
    found = rank_of(TARGET)(jnp.array([scores], float), {"item": jnp.array([target])})
    assert float(found[0]) == np.mean(places)


def test_metrics_are_those_of_the_rank():
    scores = jnp.array([[5.0, 4, 3, 2, 1], [1, 2, 3, 4, 5], [0, 0, 0, 0, 9]])
    batch = {"item": jnp.array([0, 3, 0])}  # ranks 1, 2 and (2 + 3 + 4 + 5) / 4 = 3.5
    metrics = ranking_metrics(TARGET, 5)
    assert list(metrics) == ["ndcg@10", "ndcg@5", "hit@10", "hit@5", "mrr", "coverage@10"]
    found = {
        name: np.asarray(metric.values(scores, batch))
        for name, metric in metrics.items()
        if isinstance(metric, Metric)
    }
    np.testing.assert_allclose(found["hit@5"], [1, 1, 1])
    np.testing.assert_allclose(found["ndcg@5"], [1, 1 / np.log2(3), 1 / np.log2(4.5)], rtol=1e-6)
    np.testing.assert_allclose(found["mrr"], [1, 0.5, 1 / 3.5], rtol=1e-6)
    far = hit(rank_of(TARGET), 5).values(jnp.arange(20.0)[None], {"item": jnp.array([3])})
    assert float(far[0]) == 0


def test_coverage_is_the_share_of_items_among_the_first_of_anybody():
    """The first two of ten items, for some examples."""
    metric = coverage(TARGET, 10, 2)
    none = [NOTHING] * 10
    one_left = [*none[:7], 3.0, *none[8:]]
    not_numbers = [jnp.nan] * 10
    ties = [5.0, 1, 1, 1, 5, 1, 1, 1, 1, 5]  # of equal scores, the first in the catalogue
    up = list(range(10))
    down = [9.0, 0, 0, 0, 8, 0, 0, 0, 0, 0]
    found = metric.scores(jnp.array([none, one_left, not_numbers, ties, down]), {})
    assert found.dtype == metric.each.dtype
    assert found.tolist() == [[-1, -1], [7, -1], [-1, -1], [0, 4], [0, 4]]
    assert metric.finish(np.asarray(found), np.zeros(5)) == 3 / 10
    more = np.concatenate([found, metric.scores(jnp.array([up]), {})])  # 9 and 8
    assert metric.finish(more, np.zeros(6)) == 5 / 10
    assert first(jnp.array([[1.0, 2.0]]), 4).tolist() == [[1, 0, -1, -1]]  # a catalogue of two items
    with pytest.raises(UndefinedError, match="no examples"):
        metric.finish(np.zeros((0, 2), np.int32), np.zeros(0))


def test_a_score_that_is_not_a_number_ranks_last_and_a_missing_item_too():
    scores = jnp.array([[jnp.nan, 1.0, 2.0], [3.0, 1.0, 2.0]])
    found = rank_of(TARGET)(scores, {"item": jnp.array([0, -1])})
    assert found.tolist()[0] == 3
    assert found.tolist()[1] > 3


def test_sampled_metrics_are_means_over_draws_of_negatives_and_say_that_they_are_biased():
    """The mean over all draws, from the rank alone, equals many draws of real negatives."""
    scores, target, negatives = jnp.arange(50.0)[None], 40, 20  # nine of 49 others are before it
    metrics = {n: m for n, m in ranking_metrics(TARGET, 50, negatives).items() if isinstance(m, Metric)}
    name = f"hit@10 among {negatives} sampled, biased"
    found = float(metrics[name].values(scores, {"item": jnp.array([target])})[0])
    assert found == pytest.approx(binom.cdf(9, negatives, 9 / 49), rel=1e-4)
    rng, gains = np.random.default_rng(0), []
    for _ in range(4000):
        drawn = rng.choice(np.delete(np.arange(50), target), negatives)
        place = 1 + (drawn > target).sum()
        gains.append(1 / np.log2(1 + place) if place <= 10 else 0)
    ndcg = metrics[f"ndcg@10 among {negatives} sampled, biased"].values(scores, {"item": jnp.array([target])})
    assert float(ndcg[0]) == pytest.approx(np.mean(gains), abs=0.01)


@pytest.mark.parametrize("popular", [False, True])
def test_negatives_are_drawn_with_the_chances_they_tell_and_never_padding(popular):
    bias = jnp.array([0.0, 1.0, 2.0, -1.0, NOTHING, NOTHING])
    drawn = draw(jax.random.key(1), bias, (200, 100), popular)
    counts = np.bincount(np.asarray(drawn.positions).ravel(), minlength=6) / 20_000
    chances = np.exp([0.0, 1, 2, -1]) / np.exp([0.0, 1, 2, -1]).sum() if popular else np.full(4, 0.25)
    np.testing.assert_allclose(counts[:4], chances, atol=0.015)
    assert counts[4:].sum() == 0
    told = np.exp(np.asarray(drawn.log_chance))
    np.testing.assert_allclose(told, chances[np.asarray(drawn.positions)], rtol=1e-5)


def test_fresh_negatives_in_every_step():
    first, second = (draw(jax.random.key(i), jnp.zeros(1000), (4, 8), False).positions for i in range(2))
    assert (first != second).mean() > 0.9


def test_the_sampled_softmax_estimates_the_full_one():
    """With every item drawn once (as a draw with equal chances gives on average), it is the full softmax."""
    scores = jnp.array([[0.3, -1.0, 2.0, 0.5]])
    target, others = jnp.array([2]), jnp.array([[0, 1, 3]])
    drawn = Negatives(others, jnp.full((1, 3), -jnp.log(3.0)))
    found = sampled_losses(scores[:, 2], scores[:, [0, 1, 3]], drawn, target)
    np.testing.assert_allclose(found, full_losses(scores, target), rtol=1e-6)
    many = draw(jax.random.key(0), jnp.zeros(4), (1, 20_000), False)
    estimate = sampled_losses(scores[:, 2], scores[0][many.positions], many, target)
    np.testing.assert_allclose(estimate, full_losses(scores, target), rtol=0.02)


def test_bpr_leaves_out_the_right_item():
    drawn = Negatives(jnp.array([[1, 2]]), jnp.zeros((1, 2)))
    found = bpr_losses(jnp.array([1.0]), jnp.array([[1.0, 0.0]]), drawn, jnp.array([1]))
    np.testing.assert_allclose(found, [np.log1p(np.exp(-1.0))], rtol=1e-6)


def test_losses_by_name():
    assert parse_loss("softmax") == Loss("softmax")
    assert parse_loss("bpr:3") == Loss("bpr", 3)
    for wrong in ("softmax:3", "bpr", "bpr:0", "bpr:-1", "sampled:x", "hinge", ""):
        with pytest.raises(UserError, match=r"softmax \(all items that a client holds"):
            parse_loss(wrong)
