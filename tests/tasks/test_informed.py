"""MovieLens with genres, users' features and signals: on generated files in the official formats."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from partwise.deployment.federation import found_run, open_run
from partwise.runs.personal import Personal
from partwise.runs.resolve import resolve
from partwise.runs.train import train
from partwise.tasks import load_task
from partwise.tasks.informed_factorization import informed_factorization
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.tasks.movielens import settings
from partwise.types import UserError

NUM_USERS, NUM_ITEMS = 20, 8
SMALL = {
    "data.dim": 2,
    "data.signals": True,
    "data.attention": True,
    "rounds": 3,
    "cohort.size": 4,
    "simulation.lanes": 2,
    "simulation.evaluate_every": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place, rng = tmp_path_factory.mktemp("ml-1m"), np.random.default_rng(0)
    ratings = [
        f"{user}::{item}::{rng.integers(1, 6)}::{step}\n"
        for user in range(1, NUM_USERS + 1)
        for step, item in enumerate(1 + rng.permutation(NUM_ITEMS)[:7])
    ]
    (place / "ratings.dat").write_text("".join(ratings))
    genres = ("Drama", "War|Drama", "Comedy")
    movies = [
        f"{item}::Film {item} ({1985 + item})::{genres[item % 3]}\n" for item in range(1, NUM_ITEMS + 1)
    ]
    (place / "movies.dat").write_text("".join(movies))
    users = [
        f"{user}::{'FM'[user % 2]}::{(18, 25)[user % 2]}::{user}::0\n" for user in range(1, NUM_USERS + 1)
    ]
    (place / "users.dat").write_text("".join(users))
    return str(place)


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "informed"
    return train("movielens", data=folder, preset="informed", changes=SMALL, out=out)


def test_without_more_it_is_matrix_factorization():
    plain = matrix_factorization(NUM_ITEMS, 3, biases=True, center=3.0, spread=1.2)
    informed = informed_factorization(NUM_ITEMS, 3, center=3.0, spread=1.2)
    params, batch = plain.init(jax.random.key(0)), {"item": np.array([1, 5]), "rating": np.array([4.0, 2.0])}
    jax.tree_util.tree_map(np.testing.assert_array_equal, params, informed.init(jax.random.key(0)))
    for of in ("predict", "train_loss"):
        found, expected = (getattr(model, of)(params, batch, None) for model in (informed, plain))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert settings(NUM_ITEMS, NUM_USERS)[1] is not None  # all options off: the settings of ratings


def test_roles(run):
    roles = {path: role.kind for path, role in run.task.personal.partition.roles.items()}
    assert {path for path, kind in roles.items() if kind == "local"} == {"user", "user_bias"}
    assert {path for path, kind in roles.items() if kind == "keyed"} == {
        *("item", "item_bias", "item_signal", "item_attention", "item_features")
    }
    assert {path.split("/")[0] for path, kind in roles.items() if kind == "shared"} >= {
        "item_tower",
        "user_tower",
    }


def test_compiled_and_plain_rounds_agree(run, folder):
    plain = train(
        "movielens", data=folder, preset="informed", changes={**SMALL, "simulation.backend": "plain"}
    )
    for path, leaf in run.params.items():
        np.testing.assert_allclose(leaf, plain.params[path], rtol=1e-3, atol=1e-5, err_msg=path)
    for path in ("item_signal", "item_attention", "item_tower"):
        assert np.any(run.params[path]), path


def test_attention_and_pull_by_hand():
    model = informed_factorization(NUM_ITEMS, 2, center=3.0, signals=True, attention=True, item_pull=0.1)
    params = model.init(jax.random.key(0)) | {
        "item": np.full((NUM_ITEMS, 2), 2.0),
        "user": np.array([1.0, -0.5]),
    }
    params |= {"item_bias": np.full(NUM_ITEMS, 0.5), "item_attention": np.log(np.arange(1.0, NUM_ITEMS + 1))}
    params |= {"item_signal": np.ones((NUM_ITEMS, 2))}
    batch = {"item": np.array([0, 2]), "rating": np.array([4.0, 2.5])}
    squares = np.array([0.5**2, 2.0**2])  # both predictions are 4.5: 3 + 2 - 1 + 0.5
    own = 4 + 4 + 0.25 + np.log([1.0, 3.0]) ** 2 + 1 + 1
    np.testing.assert_allclose(model.train_loss(params, batch, None), squares + 0.1 * own, rtol=1e-6)
    np.testing.assert_allclose(model.rebuild_loss(params, batch, None), [1, 3] * squares - 2 * 0.5, rtol=1e-6)


def test_a_pull_keeps_what_is_an_items_own_small(folder):
    small = {**SMALL, "data.signals": False, "data.attention": False}
    free, pulled = (
        train(
            "movielens",
            data=folder,
            preset="informed",
            changes={**small, "data.item_pull": pull, "rounds": 30},
        )
        for pull in (0.0, 100.0)
    )
    for path in ("item", "item_bias"):
        assert np.linalg.norm(pulled.params[path]) < 0.5 * np.linalg.norm(free.params[path])


NOISE = {"privacy.clip": 1.0, "privacy.noise": 1.0, "server.weighting": "uniform"}


@pytest.mark.parametrize(
    "changes",
    [
        NOISE,
        {**NOISE, "simulation.backend": "plain"},
        {**NOISE, "privacy.sums": "masked"},
        {"server.optimizer": "adam"},
    ],
)
def test_nothing_changes_which_features_items_have(run, folder, changes):
    other = train("movielens", data=folder, preset="informed", changes={**SMALL, **changes})
    np.testing.assert_array_equal(other.params["item_features"], run.params["item_features"])
    assert not np.array_equal(other.params["item"], run.params["item"])


def test_a_deployed_run_begins_with_the_features_of_its_movies(run, folder, tmp_path):
    task, config = resolve("movielens", folder, SMALL, "informed")
    found_run(task, config, tmp_path / "run")
    hub = open_run(tmp_path / "run").hub
    np.testing.assert_array_equal(hub.state(0).params["item_features"], run.params["item_features"])
    hub.close()


def test_a_new_client_is_rebuilt_from_its_file_and_gets_recommendations(run, tmp_path):
    table = tmp_path / "mine.csv"
    table.write_text(
        "item,rating,gender,age,occupation\n" + "".join(f"{i},{i % 5 + 1},F,25,3\n" for i in range(1, 6))
    )
    opened = Personal.open(run.recorded.folder.path)
    features = opened.params["item_features"]
    np.testing.assert_array_equal(features, run.task.personal.model.init(jax.random.key(0))["item_features"])
    mine = opened.read(table, opened.columns_in(table))
    local = opened.personalize(mine)
    assert np.isfinite(opened.predict(local, mine)).all()
    best = opened.recommend(local, 3, exclude=mine, given=mine)
    assert {each.id for each in best} == {6, 7, 8}


def test_cuts_say_what_is_right():
    model = informed_factorization(NUM_ITEMS, 1, cuts=(2.0, 2.5, 3.4, 4.2))
    right = model.metrics["accuracy"].values
    batch = {"rating": np.array([1.0, 2.0, 3.0, 4.0, 5.0, 4.0])}
    assert right(np.array([1.9, 2.1, 3.3, 3.5, 4.3, 4.3]), batch).tolist() == [True] * 5 + [False]


@pytest.mark.parametrize("name", ["signals", "attention"])
def test_what_only_an_update_through_the_reconstruction_learns(folder, name):
    changes = {**SMALL, "data.signals": False, "data.attention": False, f"data.{name}": True}
    with pytest.raises(UserError, match=rf"data.{name} = True would have no effect: .*\(through does\)"):
        train("movielens", data=folder, changes=changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"item_pull": -1.0}, "item_pull"),
        ({"item_pull": float("nan")}, "item_pull"),
        ({"cuts": "3.5,1.5"}, "data.cuts is '3.5,1.5'; expected growing numbers"),
        ({"cuts": "three"}, "data.cuts is 'three'"),
        ({"signals": True, "biases": False}, "a model with biases, not .*data.biases = False"),
        ({"users": True, "seen": True}, "for unseen users"),
    ],
)
def test_bad_options(folder, options, message):
    with pytest.raises(UserError, match=message):
        load_task("movielens", folder, **options)
