"""The deep interest network: its arithmetic by hand, the contract, both formats, and training end to end."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise import load_task, train
from partwise.algorithms.registry import prepare, settings_for
from partwise.config.settings import Config
from partwise.tasks.clicks import ATTENTION, attend, deep_interest_network
from partwise.testing import check_algorithm, check_task
from partwise.types import UserError


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Users like items of one parity only, which their histories show."""
    rng, lines = np.random.default_rng(0), []
    for user in range(1, 31):
        liked: list[int] = []
        for _ in range(20):
            item = int(rng.integers(1, 13))
            label = int(item % 2 == user % 2)
            lines.append(f"{label}\t{user}\t{item}\t{','.join(map(str, liked)) or '0'}\n")
            liked += [item] if label and item not in liked else []
    path = tmp_path_factory.mktemp("amazon") / "amazon_train.tsv"
    path.write_text("".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def task(file):
    return load_task("clicks", file, length=4, dim=3)


def test_attention_is_a_network_of_item_target_difference_and_product():
    rng = np.random.default_rng(1)
    history, target = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 5, 3), (2, 3)))
    params = deep_interest_network(4, 4, dim=3).init(jax.random.key(0))["attention"]
    params = jax.tree.map(lambda leaf: leaf + jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params)
    beside = jnp.broadcast_to(target[:, None], history.shape)
    x = jnp.concatenate([history, beside, history - beside, history * beside], axis=-1)
    hidden = jax.nn.relu(x @ params["kernel"] + params["bias"])
    assert hidden.shape == (2, 5, ATTENTION)
    expected = hidden @ params["out"] + params["out_bias"]
    np.testing.assert_allclose(attend(params, history, target), expected, rtol=1e-4, atol=1e-5)


def test_what_is_not_in_a_history_does_not_matter():
    """Neither the place of an item among nothing, nor the rows of other items."""
    model = deep_interest_network(3, 6, dim=3)
    params = model.init(jax.random.key(0))
    batch = {"user": jnp.array([1, 1]), "item": jnp.array([2, 2])}
    batch["history"] = jnp.array([[4, 5, -1, -1], [-1, 4, -1, 5]])
    first, second = model.predict(params, batch, jax.random.key(0))
    assert first == pytest.approx(float(second), rel=1e-5)
    params["item"] = params["item"].at[jnp.array([0, 1, 3])].add(9.0)
    assert model.predict(params, batch, jax.random.key(0))[0] == pytest.approx(float(first), rel=1e-5)
    params["item"] = params["item"].at[4].add(9.0)
    assert model.predict(params, batch, jax.random.key(0))[0] != pytest.approx(float(first), rel=1e-5)


def test_the_contract(task):
    check_task(task)
    assert task.options == {"num_users": 30, "num_items": 12, "dim": 3}
    for part, count in ((task.train, 16), (task.validation, 2), (task.test, 2)):
        assert part.counts.tolist() == [count] * 30
    assert task.train.info["histories_cut"] > 0


def test_the_compiled_cohort_equals_the_plain_loop(task):
    small = task._replace(train=task.train.take(np.arange(3)).cap(6))
    config = Config().changed(settings_for(small.defaults, "fed_avg") | {"task": "clicks", "cohort.size": 2})
    prepared = prepare(small, config)
    check_algorithm(prepared.build, prepared.rates, prepared.store, cohort=2, rounds=1, lanes=(2,))


@pytest.mark.slow
def test_it_learns_from_histories(file):
    settings = {
        "server__optimizer": "adagrad",
        "server__rate": 0.3,
        "update__rate": 0.3,
        "simulation__lanes": 4,
    }
    run = train("clicks", data=file, rounds=60, data__dim=4, data__length=6, **settings)
    assert run.test["auc"] > 0.9


def test_raw_ratings_are_cut_by_time(tmp_path):
    rows = [f"u{u},i{(7 * u + t) % 9},{1 + (u + t) % 5},{t}\n" for u in range(6) for t in range(10)]
    path = tmp_path / "ratings.csv"
    path.write_text("".join(rows))
    task = load_task("clicks", str(path), min_ratings=5, split_time=5, length=3)
    check_task(task)
    assert task.train.counts.tolist() == [6] * 6
    assert task.train.examples(0)["time"].max() == 5
    assert [task.validation.examples(0)["time"].tolist(), task.test.examples(0)["time"].tolist()] == [
        [6, 7],
        [8, 9],
    ]


def test_a_file_of_sequences(tmp_path):
    rng = np.random.default_rng(0)
    lines = [f"{user} {' '.join(map(str, 1 + rng.permutation(20)[:6]))}\n" for user in range(1, 9)]
    (tmp_path / "Yelp.txt").write_text("".join(lines))
    task = load_task("clicks", str(tmp_path), file="Yelp", length=3, dim=3)
    check_task(task)
    assert task.options == {"num_users": 8, "num_items": 19, "dim": 3}
    for part, count in ((task.train, 6), (task.validation, 2), (task.test, 2)):
        assert part.counts.tolist() == [count] * 8


@pytest.fixture
def sequences(tmp_path):
    lines = [f"{user} {' '.join(str(1 + (user * k) % 20) for k in range(1, 7))}\n" for user in range(1, 9)]
    (tmp_path / "Toys.txt").write_text("".join(lines))
    return str(tmp_path / "Toys.txt")


def test_options_of_other_data_are_refused_if_they_are_given(file, sequences):
    few: Any = {"rounds": 1, "cohort__size": 2, "data__dim": 2, "simulation__lanes": 1}
    for data, given, reason in (
        (sequences, {"data__file": "Toys", "data__min_ratings": 40}, "raw ratings, and these are sequences"),
        (sequences, {"data__file": "Toys", "data__split_time": 7}, "raw ratings, and these are sequences"),
        (file, {"data__min_ratings": 5}, "raw ratings, and these are examples"),
        (file, {"data__max_judged": 5}, r"sequences .data.file."),
        (file, {"data__seed": 0}, r"sequences .data.file."),
    ):
        key, value = list(given.items())[-1]
        told = rf"{key.replace('__', '.')} = {value} would have no effect: it is read for {reason}"
        with pytest.raises(UserError, match=told):
            train("clicks", data=data, **few, **given)
        options = {name.removeprefix("data__"): each for name, each in given.items()}
        with pytest.raises(UserError, match=told):
            load_task("clicks", data, **options)
    run = train("clicks", data=sequences, data__file="Toys", data__max_judged=4, data__seed=1, **few)
    assert run.summary["rounds"] == 1


def test_a_file_of_sequences_has_its_own_name(sequences):
    assert load_task("clicks", sequences, file="Toys", dim=2).train.info["source"] == "sequences Toys"
    with pytest.raises(
        UserError, match=r"data.file = Yelp would have no effect: .*Give --set data.file=Toys"
    ):
        load_task("clicks", sequences, file="Yelp", dim=2)


@pytest.mark.skipif(not os.environ.get("PARTWISE_DATA"), reason="PARTWISE_DATA is not set")
def test_the_papers_data_keeps_the_contract():
    task = load_task("clicks")
    check_task(task)
    assert task.options == {"num_users": 1859, "num_items": 29_303, "dim": 18}
    assert task.defaults["cohort.size"] == 100
