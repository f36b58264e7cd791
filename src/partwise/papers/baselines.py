"""What a task reaches without federated learning: trivial baselines, and alternating least squares in one place."""

from __future__ import annotations

from typing import Any

import numpy as np

from partwise.client.split import Split, everything
from partwise.data.ragged import owners
from partwise.data.store import ClientStore
from partwise.tasks import Task

RIDGE = 5.0  # ratings of an imagined user or item without a bias
DIM, SWEEPS = 10, 15  # of alternating least squares
RIDGES = (1.0, 5.0, 10.0, 20.0)  # the best of these on the validation clients


def biases(task: Task, split: Split) -> float:
    """The RMSE of mean + user + item, fitted by least squares with a pull to zero. Unseen users fit theirs to
    what they know."""
    user, item, rating = _ratings(task.train, everything)
    mean, items = rating.mean(), np.zeros(task.train.num_keys("item"))
    fit = lambda group, left, size: _sums(group, left, size) / (_sums(group, None, size) + RIDGE)
    users = np.zeros(task.train.num_clients)
    for _ in range(20):
        items = fit(item, rating - mean - users[user], len(items))
        users = fit(user, rating - mean - items[item], len(users))
    if task.seen:
        user, item, rating = _ratings(task.test, everything)
        users = users[task.train.places(task.test.client_ids)]
    else:
        user, item, rating = _ratings(task.test, split.support)
        users = fit(user, rating - mean - items[item], task.test.num_clients)
        user, item, rating = _ratings(task.test, split.query)
    return float(np.sqrt(np.mean((mean + users[user] + items[item] - rating) ** 2)))


def least_squares(task: Task, split: Split) -> float:
    """The RMSE of vectors and biases that are solved in turn, users and items. Unseen users are solved for what
    they know."""
    user, item, rating = _ratings(task.train, everything)
    mean, spread = rating.mean(), rating.std()
    units = lambda values: (values - mean) / spread
    found = []
    for ridge in RIDGES:
        items = np.random.default_rng(0).normal(0, 0.1, (task.train.num_keys("item"), DIM + 1))
        trained, errors = np.zeros((task.train.num_clients, DIM + 1)), []
        for _ in range(SWEEPS):
            trained = _solved(user, item, units(rating), items, len(trained), ridge)
            items = _solved(item, user, units(rating), trained, len(items), ridge)
        for store in (task.validation, task.test):
            if task.seen:
                users, asked = trained[task.train.places(store.client_ids)], _ratings(store, everything)
            else:
                who, what, known = _ratings(store, split.support)
                users = _solved(who, what, units(known), items, store.num_clients, ridge)
                asked = _ratings(store, split.query)
            who, what, wanted = asked
            told = _products(users[who], items[what])
            errors.append(float(spread * np.sqrt(np.mean((told - units(wanted)) ** 2))))
        found.append(errors)
    return min(found)[1]


def _products(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Predictions of rows whose last number is a bias."""
    return (some[:, :-1] * others[:, :-1]).sum(1) + some[:, -1] + others[:, -1]


def _solved(
    group: np.ndarray, other: np.ndarray, values: np.ndarray, rows: np.ndarray, size: int, ridge: float
) -> np.ndarray:
    """For every number of `group` the vector and the bias that fit its values best, given the rows of `other`."""
    found, order = np.zeros((size, rows.shape[1])), np.argsort(group, kind="stable")
    ends = np.searchsorted(group[order], np.arange(size + 1))
    inputs = np.concatenate([rows[:, :-1], np.ones((len(rows), 1))], axis=1)
    for number in range(size):
        mine = order[ends[number] : ends[number + 1]]
        known = inputs[other[mine]]
        left = values[mine] - rows[other[mine], -1]
        found[number] = np.linalg.solve(known.T @ known + ridge * np.eye(known.shape[1]), known.T @ left)
    return found


def popularity(task: Task, split: Split) -> float:
    """NDCG@10 if all are recommended the items that most training events name, without those that they had."""
    _, item, _ = _columns(task.train, everything, "item")
    counts = np.bincount(item, minlength=task.train.num_keys("item")).astype(float)
    again, gains = bool(task.options["again"]), []
    for place in range(task.test.num_clients):
        items = task.test.examples(place)["item"]
        support, query = (_rows(part, len(items)) for part in split)
        for row in query.tolist():
            scores = counts.copy()
            scores[[] if again else items[support]] = -1
            rank = int((scores > scores[items[row]]).sum())
            gains.append(1 / np.log2(rank + 2) if rank < 10 else 0.0)
    return float(np.mean(gains))


def commonest_class(task: Task, split: Split) -> float:
    """The accuracy of always answering the commonest class."""
    _, label, _ = _columns(task.train, everything, "label")
    _, tested, _ = _columns(task.test, everything, "label")
    return float(np.mean(tested == np.bincount(label).argmax()))


def commonest_tags(task: Task, split: Split) -> float:
    """Recall@5 if every post gets the five commonest tags."""
    _, tags, _ = _columns(task.train, everything, "tags")
    _, tested, _ = _columns(task.test, everything, "tags")
    five = np.argsort(-np.bincount(tags[tags >= 0]))[:5]
    return float(np.isin(tested, five).sum() / (tested >= 0).sum())


def _columns(store: ClientStore, part: Any, *names: str) -> tuple[np.ndarray, ...]:
    """The client (its place) and two columns of every example of a part of each client's examples."""
    every = store.gather(np.arange(store.num_clients))
    starts = zip(every.starts.tolist(), every.counts.tolist(), strict=True)
    rows = np.concatenate([start + _rows(part, count) for start, count in starts])
    columns = [every.columns[name][rows] for name in (*names, *names)[:2]]
    return owners(every.counts)[rows], *columns


def _ratings(store: ClientStore, part: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    user, item, rating = _columns(store, part, "item", "rating")
    return user, item, rating.astype(np.float64)


def _rows(part: Any, count: int) -> np.ndarray:
    """The rows of a client that are in the part."""
    return np.asarray(part.index(np.arange(part.count(count)), count), np.int64)


def _sums(group: np.ndarray, values: np.ndarray | None, size: int) -> np.ndarray:
    return np.bincount(group, values, size)
