from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from partwise.data import open_store
from partwise.data.generated.writers import generate_writers
from partwise.data.ragged import owners
from partwise.types import UserError

ARGUMENTS = {"median": 60, "num_classes": 10, "seed": 3}


@pytest.fixture(scope="module")
def store():
    return generate_writers(200, **ARGUMENTS)


def accuracy(train, test, num_classes: int) -> float:
    """Of a ridge classifier on the pixels."""

    def features(part):
        return np.c_[
            part.columns["pixels"].reshape(len(part.columns["label"]), -1) / 255.0, np.ones(part.num_examples)
        ]

    inputs, targets = features(train), np.eye(num_classes)[train.columns["label"]]
    weights = np.linalg.solve(inputs.T @ inputs + 10 * np.eye(785), inputs.T @ targets)
    return float(np.mean(np.argmax(features(test) @ weights, axis=1) == test.columns["label"]))


def test_columns_are_images_and_labels(store):
    assert store.columns["pixels"].shape == (store.num_examples, 28, 28)
    assert store.columns["pixels"].dtype == np.uint8
    assert store.columns["label"].dtype == np.int32
    assert np.unique(store.columns["label"]).tolist() == list(range(10))
    assert store.columns["pixels"].max() > 200
    assert np.median(store.columns["pixels"]) == 0  # background
    assert store.columns["pixels"].any(axis=(1, 2)).all()
    assert store.info["classes"] == 10


def test_images_per_writer_are_log_normal_around_the_median():
    counts = generate_writers(2000, median=20, num_classes=2, sigma=0.45, min_examples=1, seed=1).counts
    assert np.median(counts) == pytest.approx(20, rel=0.05)
    assert np.log(counts).std() == pytest.approx(0.45, rel=0.08)
    held = generate_writers(100, median=20, num_classes=2, min_examples=15, max_examples=25, seed=1).counts
    assert (held.min(), held.max()) == (15, 25)


def test_writers_use_the_classes_unevenly(store):
    def shares(made):
        times = np.zeros((made.num_clients, 10))
        np.add.at(times, (owners(made.counts), made.columns["label"]), 1)
        return np.max(times / made.counts[:, None], axis=1).mean()

    even = generate_writers(200, **ARGUMENTS, concentration=100.0)
    assert shares(store) > 1.5 * shares(even)
    overall = np.bincount(store.columns["label"]) / store.num_examples
    assert overall == pytest.approx(np.full(10, 0.1), abs=0.03)


def test_a_model_learns_them_on_unseen_writers_up_to_the_confusion(store):
    train, test = store.take(np.arange(150)).gather(), store.take(np.arange(150, 200)).gather()
    assert 0.6 < accuracy(train, test, 10) < 0.93
    clean = generate_writers(200, **ARGUMENTS, confusion=0.0)
    parts = clean.take(np.arange(150)).gather(), clean.take(np.arange(150, 200)).gather()
    assert accuracy(*parts, 10) > accuracy(train, test, 10) + 0.05


def test_a_writer_has_a_hand_of_their_own(store):
    """Two images of one class are closer if one writer made both."""
    mine, others = [], []
    for writer in range(60):
        images, labels = store.examples(writer)["pixels"] / 255.0, store.examples(writer)["label"]
        other, theirs = store.examples(writer + 60)["pixels"] / 255.0, store.examples(writer + 60)["label"]
        for label in range(10):
            if np.sum(labels == label) > 3 and np.sum(theirs == label) > 3:
                half = images[labels == label]
                mine.append(np.abs(half[::2].mean(axis=0) - half[1::2].mean(axis=0)).mean())
                others.append(
                    np.abs(half[::2].mean(axis=0) - other[theirs == label][::2].mean(axis=0)).mean()
                )
    assert np.mean(mine) < 0.7 * np.mean(others)


def test_a_writer_is_the_same_in_any_population(store):
    few = generate_writers(70, **ARGUMENTS)  # a whole block of writers and a part of the next
    assert np.array_equal(few.counts, store.counts[:70])
    for name, values in few.columns.items():
        assert np.array_equal(values, store.columns[name][: len(values)])
    other = generate_writers(70, **ARGUMENTS | {"seed": 4})
    assert not np.array_equal(other.counts, few.counts)


def test_disk_equals_memory(store, tmp_path):
    made = generate_writers(200, **ARGUMENTS, out=tmp_path / "writers")
    for found in (made, open_store(tmp_path / "writers")):
        assert np.array_equal(found.client_ids, store.client_ids)
        assert found.info == store.info
        for name, values in store.columns.items():
            assert np.array_equal(found.columns[name], values)
            assert found.columns[name].dtype == values.dtype


@pytest.mark.slow
def test_federated_emnist_in_size_takes_little_more_memory_than_its_pixels():
    """In a process of its own: what other tests left free would count otherwise."""
    code = (
        "import json, numpy as np, psutil; from partwise.data import generate_writers;"
        "rss = lambda: psutil.Process().memory_info().rss; before = rss(); store = generate_writers();"
        "print(json.dumps([store.num_clients, float(np.median(store.counts)), rss() - before,"
        " store.columns['pixels'].nbytes]))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    clients, median, grown, pixels = json.loads(told.stdout)
    assert clients == 3400
    assert median == pytest.approx(180, rel=0.05)
    assert grown < pixels + 150e6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_clients": 0}, "num_clients is 0: give at least 1"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"median": float("nan")}, "median is nan"),
        ({"median": 5}, r"median is 5: give at least min_examples \(20\)"),
        ({"seed": -1}, "seed is -1: give at least 0"),
        ({"concentration": 0.0}, "concentration is 0.0 .*above 0"),
        ({"confusion": 0.6}, "confusion 0.6: .*0 to 0.5"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        generate_writers(**{"num_clients": 10, **ARGUMENTS, **change})
