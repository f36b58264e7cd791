from __future__ import annotations

import pytest

from partwise.data.corpus import Text
from partwise.data.loaders import stackoverflow
from partwise.data.sentences import sentence_store, sentence_vocabulary
from partwise.data.tags import tag_store, tag_vocabularies
from partwise.types import UserError


def example(date, tags, title, tokens, kind):
    names = ("creation_date", "score", "tags", "title", "tokens", "type")
    return dict(zip(names, (date, 3, tags, title, tokens, kind), strict=True))


DATA = {
    "train": {
        "12": [
            example(
                b"2010-01-08 09:34:05.5 UTC", b"python|list", b"how to sort ?", b"use sort ( x ) .", b"answer"
            ),
            example(b"2010-01-08 09:34:05 UTC", b"", b"Caf\xc3\xa9, no", b"bad \xff byte", b"question"),
        ],
        "9": [example(b"2010-01-08 09:34:05 UTC", b"list", b"", b" ", b"question")],
    },
    "heldout": {
        "10": [example(b"2018-01-08 09:34:05 UTC", b"list", b"", b"x" * 50 + b" sort x x", b"question")]
    },
    "test": {"12": [example(b"never", b"list", b"", b"x", b"question")]},
}
EXPECTED = [
    Text("12", 1262943245500, "answer", "how to sort ?", ("use sort ( x ) .",), ("python", "list")),
    Text("12", 1262943245000, "question", "café , no", ("bad \ufffd byte",), ()),
]
COUNTS = {"texts": 2, "clients": 1, "examples": 3, "examples_not_utf8": 1, "dropped_no_words": 1}


@pytest.fixture
def file(tmp_path, write_sqlite):
    return write_sqlite(tmp_path / "stackoverflow.sqlite", DATA)


def test_every_example_is_a_sentence(file):
    corpus = stackoverflow.load(file, "train")
    assert list(corpus) == EXPECTED
    assert corpus.counts == COUNTS


def test_hdf5_gives_the_same_texts(tmp_path, write_hdf5):
    columns = {
        client: {name: [e[name] for e in examples] for name in examples[0]}
        for client, examples in DATA["train"].items()
    }
    corpus = stackoverflow.load(write_hdf5(tmp_path / "stackoverflow_train.h5", columns))
    assert list(corpus) == EXPECTED
    assert corpus.counts == COUNTS


def test_splits_share_the_vocabulary_of_train(file):
    train, heldout = (stackoverflow.load(file, split) for split in ("train", "heldout"))
    known = tag_vocabularies(train)
    assert known.words.words == ("sort", "(", ")", ".", "?", "how", "to", "use", "x")
    assert known.tags.words == ("list", "python")
    store = tag_store(heldout, known, width=4)
    assert store.client_ids.tolist() == ["10"]
    assert store.columns["words"].tolist() == [[0, 8, -1, -1]]
    assert store.columns["tags"].tolist() == [[0, -1, -1, -1, -1]]
    words = sentence_vocabulary(train)
    assert words.words[:4] == ("(", ")", ".", "bad")
    said = sentence_store(heldout, words, num_buckets=1, length=6).columns["tokens"]
    ids = {word: k + 1 for k, word in enumerate(words.words)}  # 1..9, then one bucket, BOS, EOS
    assert said.tolist() == [[11, 10, ids["sort"], ids["x"], ids["x"], 12, 0]]


def test_long_tokens_are_cut(file):
    (text,) = stackoverflow.load(file, "heldout")
    assert text.words() == ["x" * 40, "sort", "x", "x"]


def test_bad_files_are_named(file, tmp_path, write_sqlite):
    with pytest.raises(UserError, match=r"unknown split 'held_out' \(nearest: heldout"):
        stackoverflow.load(file, "held_out")
    with pytest.raises(
        UserError, match=r"stackoverflow.sqlite, split test, client 12: date 'never'; expected"
    ):
        list(stackoverflow.load(file, "test"))
    digits = write_sqlite(tmp_path / "emnist.sqlite", {"train": {"f1": [{"label": 3, "pixels": 0.5}]}})
    with pytest.raises(UserError, match=r"emnist.sqlite.*f1.*unknown feature 'creation_date'"):
        list(stackoverflow.load(digits, "train"))
