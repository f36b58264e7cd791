from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.data import open_store
from partwise.data.text.corpus import Corpus, Text
from partwise.data.text.tag_bags import TagVocabularies, split_tag_stores, tag_store, tag_vocabularies
from partwise.data.text.words import Vocabulary
from partwise.types import UserError

KNOWN = TagVocabularies(Vocabulary(("the", "cat", "dog", "sat")), Vocabulary(("pets", "chairs")))


def text(client, time, title, body, tags) -> Text:
    return Text(client, time, "question", title, tuple(body), tuple(tags))


TEXTS = [
    text("b", 5, "sat", ["the cat sat .", "dog dog"], ["chairs", "pets"]),
    text("a", 9, "", ["sat the sat"], ["pets"]),
    text("a", 3, "", ["cat"], ["chairs", "unheard"]),
    text("a", 1, "cat", [], ["unheard"]),
    text("a", 2, "nothing", ["known"], ["pets"]),
    text("c", 2, "cat", ["sat"], []),
]


def check_by_hand(store, width):
    assert store.client_ids.tolist() == ["a", "b"]
    assert store.columns["words"].dtype == store.columns["tags"].dtype == np.int32
    assert store.columns["words"].shape == (3, width)
    a, b = store.examples(0), store.examples(1)
    pad = [-1] * (width - 4)
    assert a["words"].tolist() == [[1, -1, -1, -1, *pad], [0, 3, -1, -1, *pad]]  # by time
    assert a["tags"].tolist() == [[1, -1, -1], [0, -1, -1]]
    assert b["words"].tolist() == [[0, 1, 2, 3, *pad]]
    assert b["tags"].tolist() == [[0, 1, -1]]
    assert (store.num_keys("words"), store.num_keys("tags")) == (4, 2)
    assert store.vocabularies["words"].tolist() == ["the", "cat", "dog", "sat"]
    counts = {"texts": 6, "without_tag": 2, "without_word": 1, "words_cut": 0, "tags_cut": 0}
    assert store.info["counts"] == counts


def test_bags_by_hand():
    check_by_hand(tag_store(Corpus.of(TEXTS), KNOWN, width=6, max_tags=3), 6)
    assert tag_store(Corpus.of(TEXTS), KNOWN).columns["words"].shape == (3, 256)
    assert tag_store(Corpus.of(TEXTS), KNOWN).columns["tags"].shape == (3, 5)


def test_bags_on_disk_are_those_in_memory(tmp_path):
    check_by_hand(tag_store(Corpus.of(TEXTS), KNOWN, 5, 3, out=tmp_path / "new" / "bags"), 5)
    check_by_hand(open_store(tmp_path / "new" / "bags"), 5)
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["bags"]
    with pytest.raises(UserError, match="bags already exists"):
        tag_store(Corpus.of(TEXTS), KNOWN, out=tmp_path / "new" / "bags")


def test_too_many_words_and_tags_are_cut_and_counted():
    store = tag_store(Corpus.of(TEXTS[:1]), KNOWN, width=3, max_tags=1)
    assert store.columns["words"].tolist() == [[0, 2, 3]]  # sat, dog twice; the before cat
    assert store.columns["tags"].tolist() == [[0]]
    assert (store.info["counts"]["words_cut"], store.info["counts"]["tags_cut"]) == (1, 1)


words = st.lists(st.sampled_from(["the", "cat", "dog", "sat", "mat"]), max_size=12)


@given(st.lists(st.tuples(st.sampled_from("abc"), words), min_size=1), st.integers(1, 5))
def test_bags_are_the_distinct_words(said, width):
    texts = [text(client, k, "", [" ".join(w)], ["pets"]) for k, (client, w) in enumerate(said)]
    kept = [(client, {w for w in ws if w in KNOWN.words.ids}) for client, ws in said]
    kept = sorted([(client, k, bag) for k, (client, bag) in enumerate(kept) if bag], key=lambda x: x[:2])
    if not kept:
        with pytest.raises(UserError, match="no text gave an example"):
            tag_store(Corpus.of(texts), KNOWN, width)
        return
    store = tag_store(Corpus.of(texts), KNOWN, width)
    for row, (_, _, bag) in zip(store.columns["words"], kept, strict=True):
        ids = row[row >= 0]
        assert len(ids) == min(len(bag), width)
        assert np.all(np.diff(ids) > 0)
        assert {KNOWN.words.words[k] for k in ids} <= bag
        assert np.all(row[len(ids) :] == -1)


def test_vocabularies_are_of_texts_with_tags():
    known = tag_vocabularies(TEXTS, num_words=2, num_tags=9)
    assert known.words.words == ("sat", "cat")  # 4 and 3 times; dog and the twice
    assert known.tags.words == ("pets", "chairs", "unheard")


def test_parts_hold_different_clients_and_the_first_makes_the_vocabulary():
    texts = [text(f"c{k}", 0, f"own{k}", ["the cat"], ["pets", f"tag{k}"]) for k in range(20)]
    parts = split_tag_stores(Corpus.of([*texts, TEXTS[-1]]), num_words=99, num_tags=99, seed=1)
    assert [part.num_clients for part in parts] == [16, 2, 2]
    ids = [client for part in parts for client in part.client_ids]
    assert sorted(ids) == sorted(f"c{k}" for k in range(20))
    seen = {f"own{client[1:]}" for client in parts[0].client_ids}
    assert set(parts[0].vocabularies["words"]) == seen | {"the", "cat"}
    assert parts[0].num_keys("tags") == 17
    assert np.shares_memory(parts[0].columns["words"], parts[2].columns["words"])
    for a, b in zip(parts, split_tag_stores(Corpus.of(texts), 99, 99, seed=1), strict=True):
        assert np.array_equal(a.gather().columns["words"], b.gather().columns["words"])


def test_bad_requests_are_named():
    with pytest.raises(UserError, match="width is 0 and max_tags 5: give at least 1"):
        tag_store(Corpus.of(TEXTS), KNOWN, width=0)
    with pytest.raises(UserError, match="no text has a tag: give questions"):
        tag_vocabularies(TEXTS[-1:])
    with pytest.raises(UserError, match="vocabulary of 0 words was asked for"):
        tag_vocabularies(TEXTS, num_words=0)
    with pytest.raises(UserError, match="there is no text to cut by client"):
        split_tag_stores(Corpus.of(TEXTS[-1:]))
