"""Embeddings of a client's own words, learned where they are known: planted sentences. Slow: run with `-m slow`."""

from __future__ import annotations

from functools import cache

import pytest

from partwise.algorithms.registry import prepare
from partwise.runs.backends import make_evaluator
from partwise.runs.train import train
from partwise.tasks import load_task

pytestmark = pytest.mark.slow
METRIC = "accuracy_no_oov_or_eos"
CHANGES = {"rounds": 150, "update.rate": 1.0, "simulation.lanes": 1, "simulation.evaluate_every": 0}


@pytest.fixture(scope="module")
def learn():
    """A run, by algorithm and options of the task; each is trained once."""
    return cache(
        lambda algorithm="fed_recon", **options: train(
            load_task("next-word-planted", **{"words": "input"} | options),
            changes={**CHANGES, "algorithm": algorithm},
        )
    )


def test_only_rebuilding_tells_what_a_clients_own_words_mean(learn):
    """Which kind a bucket is, the client alone knows: neither the same model with embeddings as they begin nor one
    that was trained with one embedding for all can tell what follows it."""
    run = learn()
    config = run.config.changed({"reconstruct.method": "skip"})
    without = make_evaluator(prepare(run.task, config), config, run.task.test)(run.params)
    yogi = learn("fed_yogi")
    assert yogi.config.evaluation.local == "trained"
    assert yogi.test[METRIC] > 0.45  # it did learn what follows a word
    assert run.test[METRIC] > without[METRIC] + 0.06
    assert run.test[METRIC] > yogi.test[METRIC] + 0.06


def test_clients_that_hold_their_own_words_learn_as_well(learn):
    keyed = learn(words="keyed")
    assert keyed.config.select["word"] == "own"
    assert keyed.test[METRIC] > learn().test[METRIC] - 0.01
    sent = lambda run: run.summary["bytes_down_per_client"]
    assert sent(keyed) < sent(learn())


def test_half_precision_learns_as_full(learn):
    assert abs(learn(precision="bfloat16").test[METRIC] - learn().test[METRIC]) < 0.01
