"""Clicks made of sequences: who takes what next, with drawn items beside."""

from __future__ import annotations

import numpy as np
import pytest

from partwise.data.loaders import sequence_clicks
from partwise.types import UserError


@pytest.fixture
def folder(tmp_path):
    """Users 1 to 4 with 1 to 4 items, and one with many."""
    lines = [f"{user} " + " ".join(str(10 * k) for k in range(1, user + 1)) for user in range(1, 5)]
    (tmp_path / "Yelp.txt").write_text("\n".join([*lines, "9 " + " ".join(map(str, range(50, 90)))]) + "\n")
    return tmp_path


def test_a_positive_for_each_next_item_and_a_negative_beside_it(folder):
    store = sequence_clicks.load(folder, "Yelp", length=2)
    assert store.counts.tolist() == [0, 2, 4, 6, 78]
    mine = store.examples(3)
    items = store.vocabularies["item"]
    assert items[mine["item"]][::2].tolist() == [20, 30, 40]
    assert mine["label"].tolist() == [1, 0] * 3
    assert mine["user"].tolist() == [3] * 6
    words = [[int(items[k]) for k in row if k >= 0] for row in mine["history"]]
    assert words == [[10], [10], [10, 20], [10, 20], [20, 30], [20, 30]]
    for k in range(5):
        each = store.examples(k)
        assert not set(each["item"][1::2]) & {*each["item"][::2], *each["history"].ravel()}


def test_negatives_are_drawn_by_the_seed_from_all_other_items(folder):
    first, again, other = (sequence_clicks.load(folder, "Yelp", seed=seed) for seed in (0, 0, 1))
    assert first.columns["item"].tolist() == again.columns["item"].tolist() != other.columns["item"].tolist()
    drawn = {
        int(item)
        for seed in range(20)
        for item in sequence_clicks.load(folder, "Yelp", seed=seed).examples(4)["item"][1::2]
    }
    assert drawn == set(np.flatnonzero(first.vocabularies["item"] < 50))


def test_the_last_pairs_are_held_out(folder):
    store = sequence_clicks.load(folder, "Yelp")
    train, validation, test = sequence_clicks.hold_out_last(store)
    assert train.counts.tolist() == [0, 2, 2, 2, 74]
    assert validation.counts.tolist() == [0, 0, 0, 2, 2]
    assert test.counts.tolist() == [0, 0, 2, 2, 2]
    joined = np.concatenate([part.examples(4)["item"] for part in (train, validation, test)])
    assert joined.tolist() == store.examples(4)["item"].tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 5 6\n2 5 6 7\n", r"Yelp.txt: user 2 takes all 3 items"),
        ("1 5\n2 6\n", r"Yelp.txt: no user has two items"),
        ("1\n", r"Yelp.txt, line 1: '1'; expected whole numbers"),
    ],
)
def test_what_gives_no_clicks_is_named(tmp_path, text, message):
    (tmp_path / "Yelp.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        sequence_clicks.load(tmp_path, "Yelp")
    with pytest.raises(UserError, match="length is 0"):
        sequence_clicks.load(tmp_path, "Yelp", length=0)
