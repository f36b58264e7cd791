from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.data import open_store
from partwise.data.text.corpus import Corpus, Text
from partwise.data.text.sentences import (
    TokenIds,
    encode,
    sentence_store,
    sentence_vocabulary,
    split_sentence_stores,
)
from partwise.data.text.words import Vocabulary
from partwise.types import UserError

WORDS = Vocabulary(("the", "cat", "sat"))
IDS = TokenIds(num_words=3, num_buckets=3)  # pad 0, words 1..3, buckets 4..6, BOS 7, EOS 8


def text(client, time, *body, title="a title") -> Text:
    return Text(client, time, "answer", title, body, ())


TEXTS = [text("b", 2, "the cat"), text("a", 9, "sat", "sat sat sat the cat"), text("a", 4, "zebra quagga")]


def test_ids_by_hand():
    assert (IDS.first_bucket, IDS.bos, IDS.eos, IDS.num_ids) == (4, 7, 8, 9)
    assert IDS.names(WORDS) == [
        "<pad>",
        "the",
        "cat",
        "sat",
        "<oov 0>",
        "<oov 1>",
        "<oov 2>",
        "<bos>",
        "<eos>",
    ]
    # CRC-32: zebra 358047158, quagga 2659578133, café (UTF-8) 2561491637; modulo 3: 2, 1, 2
    assert [IDS.bucket(word) for word in ("zebra", "quagga", "café")] == [6, 5, 6]


def test_rows_by_hand():
    assert encode(["the", "cat"], WORDS, IDS, 4) == [7, 1, 2, 8, 0]
    assert encode(["the", "cat", "sat"], WORDS, IDS, 4) == [7, 1, 2, 3, 8]
    assert encode(["the", "cat", "sat", "zebra"], WORDS, IDS, 4) == [7, 1, 2, 3, 6]
    assert encode(["the", "cat", "sat", "zebra", "the"], WORDS, IDS, 4) == [7, 1, 2, 3, 6]


@given(st.lists(st.sampled_from(["the", "cat", "sat", "zebra", "é"]), min_size=1, max_size=30))
def test_a_row_begins_ends_and_is_padded(words):
    row = encode(words, WORDS, IDS)
    assert len(row) == 21
    assert row[0] == IDS.bos
    assert row.count(IDS.eos) == (len(words) < 20)
    said = row[1 : 1 + min(len(words), 20)]
    assert all(0 < token < IDS.bos for token in said)
    names = IDS.names(WORDS)
    assert all(names[t] == w or w not in WORDS.ids for t, w in zip(said, words, strict=False))
    assert row[len(said) + 2 :] == [0] * (19 - len(said))


def check_by_hand(store):
    assert store.client_ids.tolist() == ["a", "b"]
    assert store.columns["tokens"].dtype == np.int32
    assert store.examples(0)["tokens"].tolist() == [[7, 6, 5, 8, 0], [7, 3, 8, 0, 0]]  # by time, 2 at most
    assert store.examples(1)["tokens"].tolist() == [[7, 1, 2, 8, 0]]
    assert store.num_keys("tokens") == 9
    assert store.info["counts"] == {
        "texts": 3,
        "without_sentence": 0,
        "empty_sentences": 0,
        "sentences_cut": 1,
        "words": 9,
        "unknown": 2,
        "examples_over_max": 1,
    }


def test_stores_by_hand(tmp_path):
    check_by_hand(sentence_store(Corpus.of(TEXTS), WORDS, 3, length=4, max_sentences=2))
    check_by_hand(sentence_store(Corpus.of(TEXTS), WORDS, 3, 4, 2, out=tmp_path / "said"))
    check_by_hand(open_store(tmp_path / "said"))
    assert sentence_store(Corpus.of(TEXTS), WORDS).columns["tokens"].shape == (4, 21)


def test_sentences_of_one_text_keep_their_order():
    said = sentence_store(Corpus.of([text("a", 1, "sat"), text("a", 0, "the", "cat", "the")]), WORDS, 3)
    assert said.columns["tokens"][:, 1].tolist() == [1, 2, 1, 3]


def test_the_vocabulary_is_of_the_sentences():
    assert sentence_vocabulary(TEXTS, 2).words == ("sat", "cat")  # 4 times; cat and the twice
    with pytest.raises(UserError, match="no word or tag was counted"):
        sentence_vocabulary([text("a", 0)])


def test_parts_hold_different_clients_and_the_first_makes_the_vocabulary():
    texts = [text(f"c{k}", 0, f"own{k} the") for k in range(20)] + [text("silent", 0)]
    parts = split_sentence_stores(Corpus.of(texts), num_words=99, num_buckets=2, seed=1)
    assert [part.num_clients for part in parts] == [16, 2, 2]
    ids = [client for part in parts for client in part.client_ids]
    assert sorted(ids) == sorted(f"c{k}" for k in range(20))
    assert parts[0].info["num_words"] == 17
    assert parts[0].info["counts"]["without_sentence"] == 1
    own = {f"own{client[1:]}" for client in parts[0].client_ids}
    assert set(parts[0].vocabularies["tokens"][1:18]) == own | {"the"}
    for part in parts[1:]:
        assert np.all(np.isin(part.gather().columns["tokens"][:, 1], [18, 19]))


def test_a_sentence_of_one_word_is_one_and_without_a_word_is_none():
    said = sentence_store(Corpus.of([text("a", 0, "cat", "", " "), text("b", 0, "")]), WORDS, 3, length=2)
    assert said.client_ids.tolist() == ["a"]
    assert said.columns["tokens"].tolist() == [[7, 2, 8]]
    assert said.info["counts"]["empty_sentences"] == 3
    cut = sentence_store(Corpus.of([text("a", 0, "cat the")]), WORDS, 3, length=1)
    assert cut.columns["tokens"].tolist() == [[7, 2]]  # no room for the end


@pytest.mark.parametrize("size", [0, -1, 2.5])
@pytest.mark.parametrize("name", ["num_words", "num_buckets", "length", "max_sentences"])
def test_sizes_are_refused_before_anything_is_read(name, size):
    def read(counts):
        raise AssertionError("the corpus was read")

    message = f"{name} is {size}: give a whole number, at least 1"
    with pytest.raises(UserError, match=message):
        split_sentence_stores(Corpus("never", read), **{name: size})
    if name == "num_words":
        with pytest.raises(UserError, match=message):
            sentence_vocabulary(Corpus("never", read), size)
    else:
        with pytest.raises(UserError, match=message):
            sentence_store(Corpus("never", read), WORDS, **{name: size})


def test_ids_without_buckets_are_refused():
    with pytest.raises(UserError, match="num_buckets is 0: give a whole number, at least 1"):
        TokenIds(3, 0)


@pytest.mark.parametrize("texts", [[], [text("a", 0)], [text("a", 0, "", " ")]])
def test_no_text_is_named(texts, tmp_path):
    with pytest.raises(UserError, match="there is no text to cut by client in the letters"):
        split_sentence_stores(Corpus.of(texts, "the letters"))
    with pytest.raises(UserError, match="no text gave an example"):
        sentence_store(Corpus.of(texts), WORDS)
    with pytest.raises(UserError, match="there are no rows to store"):
        sentence_store(Corpus.of(texts), WORDS, out=tmp_path / "said")


def test_too_few_clients_to_cut_are_named():
    with pytest.raises(UserError, match=r"the letters has 1 clients .* 0.8, 0.1, 0.1 none of them is left"):
        split_sentence_stores(Corpus.of([text("a", 0, "the cat")], "the letters"))
