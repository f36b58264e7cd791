"""Every named task through the same contract; and what is particular to some."""

import numpy as np
import pytest

from partwise.client.split import alternate, halves
from partwise.data import planted_ratings
from partwise.tasks import load_task
from partwise.tasks.ratings import ratings_task
from partwise.testing import check_task
from partwise.types import UserError

needs_data = pytest.mark.skipif(
    "not __import__('os').environ.get('PARTWISE_DATA')", reason="PARTWISE_DATA is not set"
)


def test_the_planted_task_keeps_the_contract():
    task = load_task("planted", num_clients=100, num_items=40, mean_examples=15, dim=4)
    check_task(task)
    assert 0.5 < task.best(alternate(5))["rmse"] < 0.7
    assert task.best(halves(90))["rmse"] < task.best(halves(10))["rmse"]  # who knows more is better
    assert task.best(None) == {}


@needs_data
@pytest.mark.parametrize("name", ["movielens", "movielens-seen"])
def test_movielens_tasks_keep_the_contract(name):
    check_task(load_task(name, size="100k", dim=4))


@needs_data
def test_movielens_1m_is_cut_as_in_the_paper():
    """With the settings of the paper; by default more of each client's ratings are kept."""
    task = load_task("movielens", preset="paper")
    assert [part.num_clients for part in (task.train, task.validation, task.test)] == [4832, 604, 604]
    assert task.options["num_items"] == 3706
    whole = load_task("movielens", max_examples=10**8).train
    np.testing.assert_array_equal(whole.client_ids, task.train.client_ids)
    np.testing.assert_array_equal(task.train.counts, np.minimum(whole.counts, 300))
    kept = load_task("movielens").train.counts
    assert (kept >= task.train.counts).all()
    assert kept.sum() > 0.99 * whole.counts.sum()


def test_a_table_of_ones_own_keeps_the_contract(tmp_path):
    table = tmp_path / "table.csv"
    rng = np.random.default_rng(0)
    rows = [f"u{rng.integers(20)},f{rng.integers(9)},{rng.integers(1, 6)},{i}" for i in range(200)]
    table.write_text("\n".join(["who,film,stars,at", *rows]) + "\n")
    names = {"client": "who", "item": "film", "rating": "stars", "time": "at"}
    task = load_task("ratings", str(table), dim=2, biases=True, order="time", **names)
    check_task(task)
    assert task.options["num_items"] == 9
    assert all(np.all(np.diff(task.train.examples(c)["time"]) > 0) for c in range(task.train.num_clients))


def test_orders_that_cannot_be_had():
    store = planted_ratings(num_clients=20, num_items=20, mean_examples=12).store
    with pytest.raises(UserError, match="needs a column 'time'"):
        ratings_task(store, order="time")
    with pytest.raises(UserError, match="unknown order of examples 'random'"):
        ratings_task(store, order="random")  # pyright: ignore


@pytest.mark.parametrize("name", ["writers", "tags-planted", "next-word-planted"])
def test_what_generates_its_data_reads_none(name):
    with pytest.raises(UserError, match=f"'{name}' generates its data .*'/no/such/file': leave out --data"):
        load_task(name, "/no/such/file")


def test_generated_tags_keep_the_contract():
    task = load_task("tags-planted", num_clients=40, num_words=300, num_tags=20, mean_examples=10)
    check_task(task)
    assert 0.2 < task.best(None)["recall_at_5"] <= 1


@needs_data
def test_stack_exchange_tags_keep_the_contract():
    task = load_task("tags", num_words=500, num_tags=30, width=32)
    check_task(task)
    assert task.options == {"num_words": 500, "num_tags": 30}


@needs_data
@pytest.mark.parametrize(("network", "keys"), [("cnn", 64), ("2nn", 200)])
def test_handwriting_keeps_the_contract(network, keys):
    task = load_task("handwriting", network=network)
    check_task(task)
    parts = task.personal.partition
    assert parts.num_keys("filter") == keys
    total = sum(int(np.prod(leaf.shape)) for leaf in parts.shapes.values())
    assert total == {"cnn": 1_663_370, "2nn": 199_210}[network]  # McMahan et al., with ten classes


def test_generated_writers_keep_the_contract():
    check_task(load_task("writers", network="2nn", num_clients=30, median=25, num_classes=5))


def test_recall_counts_the_tags_among_the_five_best():
    """Two examples with three tags; two of them are among the five highest scores."""
    from partwise.tasks.tags import logistic_regression

    recall = logistic_regression(4, 8).metrics["recall_at_5"]
    scores = np.array([[8.0, 7, 6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6, 7, 8]])
    batch = {"tags": np.array([[0, 7, -1], [7, -1, -1]])}
    assert recall.values(scores, batch).tolist() == [1, 1]
    assert recall.weight is not None
    assert recall.weight({"tags": np.array([[0, 7, -1], [7, -1, -1]])}).tolist() == [2, 1]


def test_sentences_made_with_another_number_of_buckets_are_refused():
    pytest.importorskip("flax")
    from partwise.data.generated.planted_sentences import planted_sentences
    from partwise.tasks.next_word_lstm import next_word_lstm_task

    store = planted_sentences(num_clients=3, sentences=2, num_words=9, num_buckets=4, length=3)
    with pytest.raises(UserError, match="num_buckets is 5, and the sentences were made with 4"):
        next_word_lstm_task(store, store, store, num_buckets=5, embedding=2, units=2)
