"""Every named task through the same contract; and what is particular to some."""

import numpy as np
import pytest

from partwise.data import planted_ratings
from partwise.tasks import load_task, ratings_task
from partwise.testing import check_task
from partwise.types import UserError

needs_data = pytest.mark.skipif(
    "not __import__('os').environ.get('PARTWISE_DATA')", reason="PARTWISE_DATA is not set"
)


def test_the_planted_task_keeps_the_contract():
    task = load_task("planted", num_clients=100, num_items=40, mean_examples=15, dim=4)
    check_task(task)
    assert 0.5 < task.best["rmse"] < 0.7


@needs_data
@pytest.mark.parametrize("name", ["movielens", "movielens-seen"])
def test_movielens_tasks_keep_the_contract(name):
    check_task(load_task(name, size="100k", dim=4))


@needs_data
def test_movielens_1m_is_cut_as_in_the_paper():
    task = load_task("movielens")
    assert [part.num_clients for part in (task.train, task.validation, task.test)] == [4832, 604, 604]
    assert task.options["num_items"] == 3706
    assert task.train.counts.max() == 300


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
