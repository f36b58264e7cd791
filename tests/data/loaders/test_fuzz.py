"""Every reader on damaged files, a hundred of each kind; see `fuzz.py`. PARTWISE_FUZZ=1000 makes it a thousand."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from partwise.checkpoint import save_arrays
from partwise.data import ClientStore
from partwise.data.text.words import Vocabulary
from partwise.runs.personal import save_local

COUNT = int(os.environ.get("PARTWISE_FUZZ", "100"))
TABLE = pa.table(
    {
        "user": ["ann", "bob", "ann", "cy"],
        "item": ["0", "00", "tea", "0"],
        "rating": [1.0, 2.5, 3.0, 4.0],
        "past": [["tea"], [], ["0", "00", "tea"], ["0"]],
        "kind": pa.array(["a", "b", "a", "a"]).dictionary_encode(),
    }
)
FLAT = TABLE.select(["user", "item", "rating"])
RATINGS = "1::10::4::100\n1::20::3::101\n2::10::5::102\n"
USERS = "1::F::25::1::x\n2::M::18::1::y\n"
CLICKS = "1\t1\t3\t0\n0\t1\t4\t3\n1\t2\t3\t4,3\n"
STARS = "u1,i1,5.0,100\nu1,i2,3.0,101\nu2,i1,5.0,102\n"
TWEET = '"{}","1","Mon Apr 06 22:19:45 PDT 2009","NO_QUERY","{}","so tired, again"\n'
TWEETS = TWEET.format(0, "ann") + TWEET.format(4, "bob")
REVIEW = {"reviewerID": "A1", "overall": 5.0, "unixReviewTime": 100, "reviewText": "good", "summary": "yes"}
SPEECH = {"play": "Hamlet", "character": "Ghost", "order": 1, "text": "Mark me.\nI will."}
BLOG = "<Blog><date>31,May,2004</date><post>An ant is here. It works.</post></Blog>"
SAID = pa.table(
    {"user": [1, 2, 1], "rank": [1, 0, 0], "text": ["an ant is here", "it works well", "so it is"]}
)
POST = '<row Id="{}" PostTypeId="1" CreationDate="2016-08-02T15:39:14.947" Body="&lt;p&gt;Why so?&lt;/p&gt;" '
POST += 'OwnerUserId="{}" Title="A word" Tags="&lt;ai&gt;" />\n'
POSTS = (
    "<?xml version='1.0' encoding='utf-8'?>\n<posts>\n" + POST.format(1, 7) + POST.format(2, 8) + "</posts>"
)
WRITERS = {"users": ["f1", "f2"], "num_samples": [1, 1]}
WRITERS |= {"user_data": {name: {"x": [[1.0] * 784], "y": [3]} for name in WRITERS["users"]}}
SENTENCE = {
    "creation_date": b"2018-01-08 09:34:05 UTC",
    "tags": b"list|c",
    "title": b"how",
    "type": b"question",
}
SENTENCE |= {"tokens": b"sort a list"}


def write_tables(folder: Path) -> list[tuple[str, str]]:
    """(reader, file) of every kind of table."""
    lines = ["user,item,rating", *(f"{r['user']},{r['item']},{r['rating']}" for r in FLAT.to_pylist()), ""]
    text = "\n".join(lines).encode()
    (folder / "t.csv").write_bytes(text)
    (folder / "t.csv.gz").write_bytes(gzip.compress(text))
    (folder / "t.tsv").write_bytes(text.replace(b",", b"\t"))
    pyarrow.parquet.write_table(FLAT, folder / "t.parquet")
    pyarrow.parquet.write_table(TABLE, folder / "l.parquet")
    pyarrow.feather.write_feather(TABLE, folder / "l.feather")
    pyarrow.feather.write_feather(FLAT, folder / "t.feather", compression="uncompressed")
    for name, write in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with write(folder / name, TABLE.schema) as writer:
            writer.write_table(TABLE)
    plain = ["t.csv", "t.csv.gz", "t.tsv", "t.parquet", "t.feather"]
    listed = ["l.parquet", "l.feather", "file.arrow", "stream.arrow"]
    return (
        [("table", name) for name in plain]
        + [("whole rows", name) for name in ("t.csv", "t.parquet", "t.feather")]
        + [("lists", name) for name in (listed)]
        + [("client", name) for name in ("t.csv", "t.parquet")]
    )


def write_texts(folder: Path) -> list[tuple[str, str]]:
    """The loaders of text files, plain and packed."""
    texts = {
        "ratings.dat": ("movielens", RATINGS),
        "u.data": ("movielens-100k", RATINGS.replace("::", "\t")),
        "amazon_train.tsv": ("amazon-clicks", CLICKS),
        "stars.csv": ("amazon-clicks", STARS),
        "Yelp.txt": ("sequence-clicks", "1 10 20 30\n2 20 40 50 10\n"),
        "tweets.csv": ("sentiment140", TWEETS),
        "reviews.json": ("amazon-reviews", (json.dumps(REVIEW) + "\n") * 2),
        "speeches.jsonl": ("shakespeare", (json.dumps(SPEECH) + "\n") * 2),
        "Posts.xml": ("stackexchange", POSTS),
        "all_data_0.json": ("femnist", json.dumps(WRITERS)),
        "1.male.20.Arts.Leo.xml": ("blogs", BLOG),
        "said.csv": ("sentences", 'user,rank,text\n1,0,an ant is here\n2,1,"so, it is"\n'),
    }
    for name, (_, text) in texts.items():
        (folder / name).write_text(text)
    found = [(reader, name) for name, (reader, _) in texts.items()]
    for name in ("stars.csv", "tweets.csv", "reviews.json", "speeches.jsonl"):
        (folder / f"{name}.gz").write_bytes(gzip.compress(texts[name][1].encode()))
        found.append((texts[name][0], f"{name}.gz"))
    members = {"ml-1m/ratings.dat": RATINGS, "ml-1m/users.dat": USERS}
    for name, held in (
        ("ml-1m.zip", members),
        ("clicks.zip", {"amazon_train.tsv": CLICKS}),
        ("tweets.zip", texts),
    ):
        with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, text in held.items():
                archive.writestr(member, text if isinstance(text, str) else text[1])
    with zipfile.ZipFile(folder / "tweets.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("training.csv", TWEETS)
    with zipfile.ZipFile(folder / "blogs.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("blogs/1.male.20.Arts.Leo.xml", BLOG)
    return [
        *found,
        ("movielens", "ml-1m.zip"),
        ("movielens-users", "ml-1m.zip"),
        ("amazon-clicks", "clicks.zip"),
        ("sentiment140", "tweets.zip"),
        ("blogs", "blogs.zip"),
    ]


def write_arrays(folder: Path) -> list[tuple[str, str]]:
    """Files of numpy, partwise and Parquet."""
    np.savez_compressed(
        folder / "mnist_by_writer.npz",
        images=np.zeros((4, 28, 28), np.uint8),
        labels=np.arange(4, dtype=np.uint8),
        writer=np.array([1, 1, 2, 2], np.int16),
        split=np.array([0, 0, 1, 1], np.uint8),
    )
    np.savez_compressed(
        folder / "femnist_leaf_sample.npz",
        images=np.zeros((4, 28, 28), np.uint8),
        labels=np.arange(4, dtype=np.uint8),
        writer=np.array([0, 0, 1, 1], np.int16),
        writer_ids=np.array(["f1", "f2"]),
        complete=np.array([True, False]),
    )
    save_arrays(folder / "a.safetensors", {"a": np.ones((2, 3), np.float32), "b": np.arange(3)}, {"x": 1})
    save_local(folder / "local.safetensors", {"user": np.ones(3, np.float32)}, "run")
    Vocabulary(("tea", "rice")).save(folder / "words.json")
    row = {"Site": "ai", "Id": 1, "PostTypeId": 1, "ParentId": None, "CreationDate": "2016-08-02T15:39:14"}
    row |= {"Body": "<p>Why so?</p>", "OwnerUserId": 7, "Title": "A word", "Tags": "<ai>"}
    pyarrow.parquet.write_table(pa.Table.from_pylist([row, row | {"Id": 2}]), folder / "posts.parquet")
    pyarrow.parquet.write_table(SAID, folder / "said.parquet")
    pyarrow.feather.write_feather(SAID, folder / "said.arrow", compression="uncompressed")
    names = {"mnist": "mnist_by_writer.npz", "arrays": "a.safetensors", "local": "local.safetensors"}
    names |= {"femnist": "femnist_leaf_sample.npz"}
    return [*names.items(), ("words", "words.json"), ("stackexchange", "posts.parquet")] + [
        ("sentences", name) for name in ("said.parquet", "said.arrow")
    ]


def write_federated(folder: Path, write_sqlite, write_hdf5) -> list[tuple[str, str]]:
    """TensorFlow Federated's files."""
    write_sqlite(folder / "so.sqlite", {"train": {"7": [SENTENCE] * 2, "8": [SENTENCE]}})
    (folder / "so.sqlite.lzma").write_bytes(lzma.compress((folder / "so.sqlite").read_bytes()))
    image = {"pixels": [1.0] * 784, "label": 3}
    digits = {"f1": [image], "f2": [image, image]}
    write_sqlite(folder / "emnist.sqlite", {"digits_only_train": digits, "digits_only_test": digits})
    write_hdf5(folder / "so.h5", {k: {name: [v] * 2 for name, v in SENTENCE.items()} for k in ("7", "8")})
    for part in ("train", "test"):
        pixels = np.ones((2, 28, 28), np.float32)
        write_hdf5(folder / f"em_{part}.h5", {"f1": {"pixels": pixels, "label": np.array([1, 2])}})
        write_hdf5(folder / f"shakespeare_{part}.h5", {"ROMEO": {"snippets": [b"Ah me.", b"Night."]}})
    write_sqlite(
        folder / "shakespeare.sqlite", {s: {"R": [{"snippets": b"Ah me."}]} for s in ("train", "test")}
    )
    return [
        ("stackoverflow", "so.sqlite"),
        ("stackoverflow", "so.sqlite.lzma"),
        ("stackoverflow", "so.h5"),
        ("tff", "em_train.h5"),
        ("emnist", "emnist.sqlite"),
        ("emnist", "em_train.h5"),
        ("shakespeare", "shakespeare.sqlite"),
        ("shakespeare", "shakespeare_train.h5"),
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory, write_sqlite, write_hdf5):
    folder = tmp_path_factory.mktemp("fuzz")
    files = write_tables(folder) + write_texts(folder) + write_arrays(folder)
    files += write_federated(folder, write_sqlite, write_hdf5)
    targets = [
        {"name": f"{r} {n}", "reader": r, "path": str(folder / n), "file": str(folder / n)} for r, n in files
    ]
    store = ClientStore.from_arrays(["a", "b", "a"], ids=["item"], item=["x", "y", "z"], pair=np.ones((3, 2)))
    store.save(folder / "store")
    for name in ("store.json", "clients.arrow", "vocabularies.arrow", "examples.arrow"):
        place = {"path": str(folder / "store"), "file": str(folder / "store" / name)}
        targets.append({"name": f"store {name}", "reader": "store", **place})
    (folder / "targets.json").write_text(json.dumps(targets))
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded by way of /proc")
def test_damaged_files_are_read_or_refused(written, record_property):
    script = Path(__file__).with_name("fuzz.py")
    done = subprocess.run(
        [sys.executable, str(script), str(written), str(COUNT), os.environ.get("PARTWISE_FUZZ_SEED", "")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    last = (written / "last.json").read_text()
    assert done.returncode == 0, f"the process ended with {done.returncode}, at {last}"
    told = json.loads(done.stdout)
    for name, counts in told.items():
        record_property(name, f"{counts['read']} read, {counts['refused']} refused")
        print(name, counts)
    assert {name: counts["failures"] for name, counts in told.items() if counts["failures"]} == {}
    assert all(counts["read"] + counts["refused"] == COUNT for counts in told.values())
