"""Sentiment: both formats under one name, words that are nothing, and that it learns."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from partwise.algorithms.registry import prepare, settings_for
from partwise.config.settings import Config
from partwise.runs.train import train
from partwise.tasks import load_task
from partwise.tasks.sentiment import two_layer_lstm
from partwise.testing import check_algorithm, check_task
from partwise.types import UserError

SMALL = {"dim": 3, "units": 4}
ROW = '"{}","{}","Mon Apr 06 22:19:45 PDT 2009","NO_QUERY","{}","{}"\n'


def tweets(num_users: int, num_texts: int, num_words: int = 40, seed: int = 0) -> str:
    """Every word is good, bad or neither; a tweet is positive if more of its words are good than bad."""
    rng = np.random.default_rng(seed)
    rows = []
    for user in range(num_users):
        for number in range(num_texts):
            words = rng.integers(0, num_words, rng.integers(3, 12))
            score = (words % 4 == 0).sum() - (words % 4 == 1).sum() or rng.choice([-1, 1])
            said = " ".join(f"w{word}" for word in words)
            rows.append(ROW.format(4 if score > 0 else 0, number, f"u{user}", said))
    return "".join(rows)


def reviews(num_users: int, num_texts: int) -> str:
    rows = []
    for number in range(num_users * num_texts):
        review = {"reviewerID": f"A{number % num_users}", "overall": 1 + number % 5, "unixReviewTime": number}
        rows.append(json.dumps({**review, "reviewText": f"it is {number % 5}", "summary": "well"}) + "\n")
    return "".join(rows)


def test_tweets_keep_the_contract(tmp_path):
    (tmp_path / "some.csv").write_text(tweets(3, 42) + tweets(1, 41, seed=1).replace("u0", "few"))
    task = load_task("sentiment", str(tmp_path), **SMALL)
    check_task(task)
    assert task.seen
    assert task.train.counts.tolist() == [28, 29, 29, 29]  # more than 40, of which 70 % train
    assert task.defaults["cohort.size"] == 2
    with pytest.raises(UserError, match=r"none of the 4 users .* has 99 texts; the largest has 42"):
        load_task("sentiment", str(tmp_path), min_texts=99)


def test_reviews_keep_the_contract(tmp_path):
    (tmp_path / "texts").write_text(reviews(3, 5))  # told by what is in it, not by its name
    task = load_task("sentiment", str(tmp_path / "texts"), **SMALL)
    check_task(task)
    assert task.train.num_clients == 3
    assert "well" in task.train.vocabularies["word"]
    bare = load_task("sentiment", str(tmp_path / "texts"), summary=False, **SMALL)
    assert "well" not in bare.train.vocabularies["word"]


def test_places_without_texts_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("PARTWISE_DATA", raising=False)
    with pytest.raises(UserError, match=r"no path to texts with a sentiment .*trainingandtestdata.zip"):
        load_task("sentiment")
    with pytest.raises(
        UserError, match=r"holds no .csv, .zip or .json file of texts, but nothing: give Sent"
    ):
        load_task("sentiment", str(tmp_path))
    for name in ("a.json", "b.json.gz"):
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=r"holds 2 files that would do \(a.json, b.json.gz\): give one"):
        load_task("sentiment", str(tmp_path))
    with pytest.raises(UserError, match=r"a.json has no text: give a file"):
        load_task("sentiment", str(tmp_path / "a.json"))
    (tmp_path / "c.csv").write_text(tweets(2, 5))
    with pytest.raises(UserError, match=r"'data\.dim' must be between 1 and"):
        load_task("sentiment", str(tmp_path / "c.csv"), min_texts=5, dim=0)


def test_words_that_are_nothing_are_skipped():
    model = two_layer_lstm(6, dim=3, units=4)
    params = model.init(jax.random.key(0))
    words = np.array([[1, 2, 5, -1], [-1, 1, 2, 5], [1, -1, 2, 5], [-1, -1, -1, -1], [1, 2, 4, -1]])
    scores = np.asarray(model.predict(params, {"word": words}, jax.random.key(1)))
    np.testing.assert_allclose(scores[1:3], scores[0], rtol=1e-5)
    assert scores[3] == params["out_bias"][0]
    assert scores[4] != scores[0]
    batch = {"label": np.array([1, 0])}
    scores = np.array([0.5, 3.0], np.float32)
    np.testing.assert_allclose(model.loss(scores, batch), np.log1p(np.exp([-0.5, 3.0])), 1e-5)
    assert model.metrics["accuracy"].values(scores, batch).tolist() == [1, 0]


def test_compiled_rounds_are_those_of_a_plain_loop(tmp_path):
    (tmp_path / "some.csv").write_text(tweets(3, 5, num_words=3))
    task = load_task("sentiment", str(tmp_path), min_texts=5, length=4, **SMALL)
    config = Config(algorithm="fed_avg").changed(settings_for(task.defaults, "fed_avg"))
    prepared = prepare(task, config)
    check_algorithm(prepared.build, prepared.rates, prepared.store, cohort=2, lanes=(2,))


@pytest.mark.slow
def test_it_learns_which_words_are_good(tmp_path):
    (tmp_path / "some.csv").write_text(tweets(60, 50))
    run = train("sentiment", data=str(tmp_path), rounds=20, simulation__lanes=1)
    assert run.test["accuracy"] > 0.8  # a majority class has 0.5; ties, decided at random, leave about 0.9
    assert run.test["loss"] < 0.5
