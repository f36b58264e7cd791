from __future__ import annotations

import lzma

import numpy as np
import pytest

from partwise.data.loaders import stackoverflow
from partwise.data.text.corpus import Text
from partwise.data.text.sentences import sentence_store, sentence_vocabulary
from partwise.data.text.tag_bags import tag_store, tag_vocabularies
from partwise.tasks import load_task
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
    assert store.client_ids.tolist() == [10]
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


def sentences(split: str, clients: int) -> dict:
    """Users with three tagged sentences each."""
    words = b"how do i sort a list in python or java and why".split()
    return {
        f"{split}{c}": [
            example(
                b"2010-01-0%d 09:34:05 UTC" % (k + 1),
                b"python|list" if (c + k) % 2 else b"java",
                b"sort it",
                b" ".join(words[(c + k) % 6 :][:6]),
                b"question",
            )
            for k in range(3)
        ]
        for c in range(clients)
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory, write_sqlite, write_hdf5):
    """The same users in one SQLite file and in HDF5 files, each in a folder of its own."""
    splits = {"train": sentences("t", 6), "heldout": sentences("h", 4)}
    root = tmp_path_factory.mktemp("tff")
    for name in ("new", "old", "packed"):
        (root / name).mkdir()
    file = write_sqlite(root / "new" / "stackoverflow.sqlite", splits)
    (root / "packed" / "stackoverflow.sqlite.lzma").write_bytes(lzma.compress(file.read_bytes()))
    for split, name in (("train", "train"), ("heldout", "held_out")):
        columns = {
            client: {feature: [e[feature] for e in examples] for feature in examples[0]}
            for client, examples in splits[split].items()
        }
        write_hdf5(root / "old" / f"stackoverflow_{name}.h5", columns)
    return root


@pytest.mark.parametrize("task", ["tags", "next-word"])
@pytest.mark.parametrize(
    "place",
    ["new", "old", "packed", "old/stackoverflow_train.h5", "old/stackoverflow_held_out.h5"],
)
def test_tasks_read_every_format(both, task, place):
    options = {"width": 8} if task == "tags" else {"width": 8, "heads": 2, "units": 8}
    wanted = load_task(task, str(both / "new" / "stackoverflow.sqlite"), **options)
    found = load_task(task, str(both / place), **options)
    assert wanted.options == found.options
    assert wanted.train.num_clients == 6
    assert sorted((*wanted.validation.client_ids, *wanted.test.client_ids)) == ["h0", "h1", "h2", "h3"]
    for part in ("train", "validation", "test"):
        stores = getattr(wanted, part).gather(), getattr(found, part).gather()
        assert stores[0].client_ids.tolist() == stores[1].client_ids.tolist()
        for column in stores[0].columns:
            np.testing.assert_array_equal(stores[0].columns[column], stores[1].columns[column])


def test_an_hdf5_file_without_the_others_is_named(both, tmp_path):
    file = tmp_path / "stackoverflow_train.h5"
    file.write_bytes((both / "old" / file.name).read_bytes())
    with pytest.raises(UserError, match=r"stackoverflow_held_out.h5 does not exist: keep the files"):
        load_task("tags", str(file))
    with pytest.raises(UserError, match=r"gone.sqlite does not exist"):
        load_task("next-word", str(tmp_path / "gone.sqlite"))
