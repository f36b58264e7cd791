from __future__ import annotations

import numpy as np
import pytest

from partwise.data import ClientStore, open_planted, open_store, oracle, planted_ratings
from partwise.data.ragged import owners
from partwise.types import UserError

ARGUMENTS = {"num_items": 300, "rank": 4, "noise": 0.3, "mean_examples": 40, "seed": 5}


def even(n: int) -> np.ndarray:
    return np.arange(0, n, 2)


def odd(n: int) -> np.ndarray:
    return np.arange(n) % 2 == 1


@pytest.fixture(scope="module")
def planted():
    return planted_ratings(num_clients=2500, **ARGUMENTS)


def test_the_planted_noise_is_recovered_under_the_truth(planted):
    store, truth = planted.store, planted.truth
    users = truth.user_factors(store.client_ids)[owners(store.counts)]
    residual = store.columns["rating"] - np.sum(users * truth.item_factors[store.columns["item"]], axis=1)
    assert residual.std() == pytest.approx(0.3, rel=0.01)
    assert residual.mean() == pytest.approx(0, abs=0.005)
    assert store.columns["rating"].mean() == pytest.approx(3.5, abs=0.15)


def test_users_follow_the_planted_prior(planted):
    users = planted.truth.user_factors(planted.store.client_ids)
    assert users.mean(axis=0) == pytest.approx(planted.truth.user_mean, abs=0.06)
    assert users.std(axis=0) == pytest.approx(planted.truth.user_scale, rel=0.06)


def test_no_client_rates_an_item_twice_and_keys_fit(planted):
    store = planted.store
    pairs = owners(store.counts) * 300 + store.columns["item"]
    assert len(np.unique(pairs)) == len(pairs)
    assert store.num_keys("item") == 300
    assert store.columns["item"].max() < 300
    assert store.counts.min() >= 10
    assert store.counts.mean() == pytest.approx(40, rel=0.05)


@pytest.mark.parametrize("num_items", [12, 40])
def test_clients_can_rate_nearly_everything(num_items):
    store = planted_ratings(
        50, num_items, mean_examples=num_items, min_examples=num_items - 2, zipf=2.0
    ).store
    for position in range(50):
        items = store.examples(position)["item"]
        assert len(set(items.tolist())) == len(items) >= num_items - 2


def test_popularity_falls_by_the_zipf_law():
    store = planted_ratings(3000, 2000, zipf=1.0, mean_examples=10, min_examples=10, sigma=0.0).store
    times = np.bincount(store.columns["item"], minlength=2000)
    weights = 1 / np.arange(1.0, 2001)
    assert np.all(np.diff(times[[0, 3, 30, 300]]) < 0)
    # rare items are hardly thinned out by the ban on repeats, so their ratio is that of the weights
    assert times[100:200].sum() / times[1000:2000].sum() == pytest.approx(
        weights[100:200].sum() / weights[1000:2000].sum(), rel=0.05
    )


def test_draws_without_replacement_follow_the_sequential_law():
    """Two of three items with weights 1, 1/2, 1/3: the chance of every pair is known."""
    store = planted_ratings(30_000, 3, zipf=1.0, mean_examples=2, min_examples=2, sigma=0.0).store
    weight = np.array([6, 3, 2]) / 11
    left_out = 3 - store.columns["item"].reshape(-1, 2).sum(axis=1)
    for item in range(3):
        a, b = (k for k in range(3) if k != item)
        chance = weight[a] * weight[b] / (1 - weight[a]) + weight[b] * weight[a] / (1 - weight[b])
        assert np.mean(left_out == item) == pytest.approx(chance, abs=0.012)


def test_the_order_of_a_clients_rows_says_nothing(planted):
    capped = planted.store.cap(10)
    items = np.stack([capped.examples(k)["item"] for k in range(capped.num_clients)])
    assert items[:, :5].mean() == pytest.approx(items[:, 5:].mean(), rel=0.03)


def test_a_client_is_the_same_in_any_population(planted):
    few = planted_ratings(num_clients=1100, **ARGUMENTS)
    for name, values in few.store.columns.items():
        assert np.array_equal(values, planted.store.columns[name][: len(values)])
    assert np.array_equal(few.store.counts, planted.store.counts[:1100])
    assert np.array_equal(few.truth.item_factors, planted.truth.item_factors)
    other = planted_ratings(num_clients=1100, **ARGUMENTS | {"seed": 6})
    assert not np.array_equal(other.store.counts, few.store.counts)


def test_disk_equals_memory_and_the_truth_comes_back(planted, tmp_path):
    made = planted_ratings(num_clients=2500, out=tmp_path / "planted", **ARGUMENTS)
    for found in (made, open_planted(tmp_path / "planted")):
        for name, values in planted.store.columns.items():
            assert np.array_equal(found.store.columns[name], values)
            assert not found.store.columns[name].flags.owndata
        assert np.array_equal(found.store.client_ids, planted.store.client_ids)
        assert np.array_equal(found.truth.item_factors, planted.truth.item_factors)
        assert found.truth.noise == 0.3
    assert open_store(tmp_path / "planted").info["arguments"]["rank"] == 4


def test_the_oracle_is_between_the_noise_and_a_few_percent_more(planted):
    best = oracle(planted.truth, planted.store, even, odd)
    assert best["noise"] == 0.3
    assert 0.3 < best["rmse"] < 0.36
    knows_nothing = oracle(planted.truth, planted.store, lambda n: np.arange(0), odd)
    assert knows_nothing["rmse"] > 0.6


def test_no_other_ridge_beats_the_oracle(planted):
    """The posterior mean is optimal: other strengths towards the prior are worse on many clients."""
    store, truth = planted.store, planted.truth
    best = oracle(truth, store, even, odd)["rmse"]
    for strength in (0.2, 5.0):
        squares, examples = 0.0, 0
        for position in range(store.num_clients):
            rows = store.examples(position)
            factors, ratings = truth.item_factors[rows["item"]].astype(float), rows["rating"].astype(float)
            known, asked = even(len(ratings)), odd(len(ratings))
            ridge = np.diag(strength * truth.noise**2 / truth.user_scale**2)
            right = factors[known].T @ (ratings[known] - factors[known] @ truth.user_mean)
            vector = truth.user_mean + np.linalg.solve(factors[known].T @ factors[known] + ridge, right)
            squares += np.sum((factors[asked] @ vector - ratings[asked]) ** 2)
            examples += asked.sum()
        assert np.sqrt(squares / examples) > best


def test_without_noise_the_oracle_is_exact():
    clean = planted_ratings(num_clients=50, **ARGUMENTS | {"noise": 0.0})
    assert oracle(clean.truth, clean.store, even, odd)["rmse"] < 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_clients": 0}, "num_clients is 0: give at least 1"),
        ({"rank": 0}, "rank is 0: give at least 1"),
        ({"noise": -1.0}, "noise is -1.0: give at least 0"),
        ({"noise": float("nan")}, "noise is nan"),
        ({"seed": -1}, "seed is -1: give at least 0"),
        ({"mean_examples": 301}, r"mean_examples is 301: .*at most num_items \(300\)"),
        ({"mean_examples": 3}, r"mean_examples is 3: give at least min_examples \(10\)"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        planted_ratings(**{"num_clients": 10, **ARGUMENTS, **change})


def test_other_stores_have_no_truth(tmp_path):
    store = ClientStore.from_arrays([1, 2], x=[1, 2])
    store.save(tmp_path / "other")
    with pytest.raises(UserError, match="was not written by planted_ratings"):
        open_planted(tmp_path / "other")


def test_an_oracle_needs_query_rows(planted):
    with pytest.raises(UserError, match="no client has a query row"):
        oracle(planted.truth, planted.store.take([0]), even, lambda n: np.arange(0))
