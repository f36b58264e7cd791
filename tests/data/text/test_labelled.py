from __future__ import annotations

import numpy as np
import pytest

from partwise.data.text.corpus import Corpus, Text
from partwise.data.text.labelled import split_sentiment_stores
from partwise.types import UserError


def text(client, time, said, label="positive", title="") -> Text:
    return Text(client, time, "tweet", title, (said,) if said else (), (label,))


TEXTS = [
    *(text("a", k, f"good good own{k} x", title="so") for k in range(5)),
    *(text("b", k, "bad", "negative") for k in range(9)),
    text("b", 9, "", "negative"),
    text("c", 0, "alone"),
]


def split(texts=TEXTS, min_texts=5, **options):
    return split_sentiment_stores(Corpus.of(texts), min_texts, **options)


def test_parts_by_hand():
    train, validation, test = split(length=4)
    assert train.client_ids.tolist() == ["a", "b"]
    assert (train.counts.tolist(), test.counts.tolist()) == ([4, 8], [1, 2])
    assert validation is test
    assert train.columns["word"] is test.columns["word"]
    assert train.columns["word"].dtype == train.columns["label"].dtype == np.int32
    words = train.vocabularies["word"].tolist()
    assert words[:3] == ["good", "bad", "so"]  # 8, at least 7, 4 uses
    assert sorted(words[3:]) == sorted(set(words[3:]))
    assert len(words) == 7  # and four of the own words: the fifth is in the test part, x is cut off
    rows = train.examples(0)["word"]
    assert np.all(rows[:, :3] == [2, 0, 0])
    assert sorted(rows[:, 3].tolist()) == [3, 4, 5, 6]
    assert test.examples(0)["word"].tolist() == [[2, 0, 0, -1]]
    assert set(train.examples(0)["label"]) == {1}
    assert set(train.examples(1)["label"]) == {0}
    assert train.info["counts"] == {
        "texts": 16,
        "clients": 3,
        "dropped_small_users": 1,
        "dropped_texts_of_small_users": 1,
        "texts_cut": 5,
        "words": 4 * 5 + 9,
        "unknown": 1,
        "without_known_word": 1,
    }


def test_a_short_vocabulary_is_of_the_most_frequent_words():
    train, _, test = split(num_words=1)
    assert train.vocabularies["word"].tolist() == ["good"]
    assert train.columns["word"].shape == (15, 25)
    for part in (train, test):
        assert np.all(part.examples(0)["word"][:, :4] == [-1, 0, 0, -1])
        assert np.all(part.examples(1)["word"] == -1)


def test_what_is_held_out_hangs_on_the_seed():
    texts = [text("a", k, f"w{k}", "positive" if k % 2 else "negative") for k in range(40)]
    held = lambda seed: set(split(texts, seed=seed)[0].vocabularies["word"])
    assert held(1) == held(1) != held(2)
    assert len(held(1)) == 32


def test_a_validation_part_of_its_own():
    train, validation, test = split(validation=0.2)
    assert [part.counts.tolist() for part in (train, validation, test)] == [[3, 6], [1, 2], [1, 2]]


def test_bad_requests_are_named():
    with pytest.raises(
        UserError, match=r"none of the 3 users of .* has 41 texts; the largest has 10: set data"
    ):
        split(min_texts=41)
    with pytest.raises(UserError, match="has no text: give a file"):
        split([])
    with pytest.raises(UserError, match="min_texts 1: give at least 1 word, and at least 2 texts"):
        split(min_texts=1)
    with pytest.raises(UserError, match=r"all 5 texts of .* are positive, so there is nothing to learn"):
        split(TEXTS[:5])
    with pytest.raises(UserError, match=r"held_out is 0.5 and validation 0.5: give shares"):
        split(held_out=0.5, validation=0.5)
    with pytest.raises(UserError, match="vocabulary of 0 words was asked for"):
        split(num_words=0)
