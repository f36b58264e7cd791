"""Next word with a sampled softmax: one loss for steps, another for judging."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from partwise.tasks.next_word import next_word_task, settings
from partwise.testing import check_task
from partwise.types import UserError

WORDS, LENGTH = 17, 4
SHAPE = {"width": 8, "heads": 2, "units": 8, "length": LENGTH}


@pytest.fixture(scope="module")
def store(make_store):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, WORDS, (12, LENGTH + 1)).astype(np.int32)
    tokens[rng.random(tokens.shape) < 0.1] = -1
    store = make_store([5, 4, 3], tokens=tokens)
    return dataclasses.replace(store, vocabularies={"tokens": np.arange(WORDS)})


def test_the_task_keeps_the_contract(store):
    task = next_word_task(store, store, store, num_buckets=1, sampled=3, **SHAPE)
    check_task(task)
    assert task.options["sampled"] == 3
    plain = next_word_task(store, store, store, num_buckets=1, **SHAPE)
    assert plain.personal.model.train_loss is None
    model, batch = task.personal.model, {"tokens": store.columns["tokens"]}
    params, rng = model.init(jax.random.key(0)), jax.random.key(1)
    scores = model.predict(params, batch, rng)
    assert scores.shape == (12, LENGTH, task.options["num_ids"])  # evaluation scores all words
    np.testing.assert_array_equal(scores, plain.personal.model.predict(params, batch, rng))


def test_a_negative_number_of_samples_is_refused():
    with pytest.raises(UserError, match="not -1"):
        settings(WORDS, WORDS - 4, **SHAPE, sampled=-1)
