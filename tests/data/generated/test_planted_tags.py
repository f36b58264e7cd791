from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partwise.data import ClientStore, by_client, open_store
from partwise.data.generated.planted_tags import _first_of_each, best_recall, generate_tags
from partwise.types import UserError

ARGUMENTS = {"num_words": 400, "num_tags": 40, "mean_examples": 30, "words_per_example": 20, "seed": 5}


@pytest.fixture(scope="module")
def store():
    return generate_tags(300, **ARGUMENTS)


@pytest.fixture(scope="module")
def large():
    """The size of the published task, with fewer clients."""
    return generate_tags(100, num_words=10_000, num_tags=500, seed=1)


def indicators(column: np.ndarray, size: int) -> np.ndarray:
    rows = np.zeros((len(column), size + 1))
    np.put_along_axis(rows, column.astype(np.int64), 1, axis=1)  # -1 marks the last column
    return rows[:, :-1]


def recall(tags: np.ndarray, best: np.ndarray) -> float:
    return np.sum(tags[:, :, None] == best[:, None, :]) / np.sum(tags >= 0)


def test_bags_have_no_repeats_and_end_in_nothing(store):
    for name, width, size in (("words", 30, 400), ("tags", 5, 40)):
        column = store.columns[name]
        assert column.shape == (store.num_examples, width)
        assert column.dtype == np.int32
        assert (column.min(), column.max()) >= (-1, 0)
        assert column.max() < size == store.num_keys(name)
        held = column >= 0
        assert held.any(axis=1).all()
        assert np.all(held[:, :-1] >= held[:, 1:])  # what there is comes first
        ordered = np.sort(column, axis=1)
        assert not np.any((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0))


def test_counts_are_as_asked(large):
    assert (large.columns["words"] >= 0).sum(axis=1).mean() == pytest.approx(60, rel=0.04)
    assert (large.columns["tags"] >= 0).sum(axis=1).mean() == pytest.approx(3, rel=0.02)
    assert np.bincount((large.columns["tags"] >= 0).sum(axis=1))[1:] == pytest.approx(
        np.full(5, large.num_examples / 5), rel=0.1
    )
    counts = generate_tags(3000, 20, 10, 12, 4, 1, sigma=0.5, min_examples=1).counts
    assert counts.mean() == pytest.approx(12, rel=0.03)
    assert np.log(counts).std() == pytest.approx(0.5, rel=0.1)


def test_a_client_uses_about_a_tenth_of_all_words(large):
    distinct = [len(np.unique(large.examples(k)["words"])) - 1 for k in range(large.num_clients)]
    assert 800 < np.median(distinct) < 1300
    assert len(np.unique(large.columns["words"])) > 8000


def test_words_follow_the_zipf_law():
    """Posts of one or two words are hardly thinned out by the ban on repeats."""
    store = generate_tags(3000, 1000, 20, 20, 1, 1, num_topics=400, zipf=1.0)
    times = np.bincount(store.columns["words"].reshape(-1), minlength=1000)
    weights = 1 / np.arange(1.0, 1001)
    for part in (slice(10, 100), slice(100, 300), slice(300, 1000)):
        assert times[part].sum() / times.sum() == pytest.approx(weights[part].sum() / weights.sum(), rel=0.15)


def test_clients_differ_in_their_words(store):
    """Two halves of a client share more words than two clients do."""
    own, other = [], []
    bags = indicators(store.columns["words"], 400)
    for k in range(100):
        first, second = (slice(store.starts[j], store.starts[j] + store.counts[j]) for j in (k, k + 100))
        halves = bags[first][::2].mean(axis=0), bags[first][1::2].mean(axis=0), bags[second].mean(axis=0)
        own.append(np.minimum(halves[0], halves[1]).sum())
        other.append(np.minimum(halves[0], halves[2]).sum())
    assert np.mean(own) > 1.5 * np.mean(other)


def test_a_linear_model_learns_the_tags_of_unseen_clients(store):
    train, _, test = (part.gather() for part in by_client(store))
    inputs, targets = indicators(train.columns["words"], 400), indicators(train.columns["tags"], 40)
    mean = targets.mean(axis=0)
    weights = np.linalg.solve(inputs.T @ inputs + 20 * np.eye(400), inputs.T @ (targets - mean))
    scores = indicators(test.columns["words"], 400) @ weights + mean
    learned = recall(test.columns["tags"], np.argsort(-scores, axis=1)[:, :5])
    popular = recall(test.columns["tags"], np.tile(np.argsort(-mean)[:5], (test.num_examples, 1)))
    best = best_recall(test)
    assert popular < 0.45 < 0.55 < learned < best < 0.95
    assert best_recall(test, at=1) < best


def test_the_best_recall_is_that_of_a_plain_loop(store):
    part = store.take([3, 1]).gather()
    assert best_recall(part) == pytest.approx(best_recall(store.take([1, 3])))
    assert best_recall(part, at=40) == 1.0
    with pytest.raises(UserError, match="was not made by generate_tags"):
        best_recall(ClientStore.from_arrays([1], words=[[1]], tags=[[1]]))


def test_a_client_is_the_same_in_any_population(store):
    few = generate_tags(70, **ARGUMENTS)  # a whole block of clients and a part of the next
    assert np.array_equal(few.counts, store.counts[:70])
    for name, values in few.columns.items():
        assert np.array_equal(values, store.columns[name][: len(values)])
    other = generate_tags(70, **ARGUMENTS | {"seed": 6})
    assert not np.array_equal(other.counts, few.counts)


def test_disk_equals_memory(store, tmp_path):
    made = generate_tags(300, **ARGUMENTS, out=tmp_path / "tags")
    for found in (made, open_store(tmp_path / "tags")):
        assert found.info == store.info
        assert found.num_keys("words") == 400
        for name, values in store.columns.items():
            assert np.array_equal(found.columns[name], values)
            assert not found.columns[name].flags.writeable
    assert best_recall(made) == best_recall(store)


@given(st.lists(st.lists(st.integers(0, 5), min_size=8, max_size=8), min_size=1, max_size=5), st.data())
@settings(max_examples=50)
def test_the_first_different_values_of_each_row(rows, data):
    wanted = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
    found = _first_of_each(np.array(rows), np.array(wanted), 4)
    for row, number, out in zip(rows, wanted, found.tolist(), strict=True):
        kept = list(dict.fromkeys(row))[:number]
        assert out == kept + [-1] * (4 - len(kept))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_clients": 0}, "num_clients is 0: give at least 1"),
        ({"num_topics": 0}, "num_topics is 0"),
        ({"zipf": -1.0}, "zipf is -1.0: give at least 0"),
        ({"mean_examples": 2}, r"mean_examples is 2: give at least min_examples \(5\)"),
        (
            {"words_per_example": 300},
            "words_per_example needs up to 450 different words, but num_words is 400",
        ),
        ({"tags_per_example": 30}, "tags_per_example needs up to 59 different tags, but num_tags is 40"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        generate_tags(**{"num_clients": 10, **ARGUMENTS, **change})
