"""A column that nobody named is a mistake, wherever the model's functions read it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partwise as pw
from partwise.data import by_client
from partwise.model.columns import Columns
from partwise.types import UserError

WRONG = lambda outputs, batch: outputs - batch["y"]
RIGHT = lambda outputs, batch: jnp.square(outputs - batch["rating"])
READS = (
    r"reads the column 'y', and the examples that it is given have only: item, rating.*\"rating\", \"y\"\)"
)


def scores(params, batch, rng):
    return params["item"][batch["item"]] @ params["user"]


def make_task(make_ratings, **functions):
    init = lambda rng: {"item": jax.random.normal(rng, (6, 2)), "user": jnp.ones(2)}
    model = pw.Model(init, **{"predict": scores, "loss": RIGHT, **functions})
    roles = pw.partition(model, {"item": pw.keyed("item"), "user": pw.local()})
    store = make_ratings([6] * 20, 6)
    return pw.Task("mine", *by_client(store), pw.Setting(model, roles, ("item", "rating")))


def train(task, **settings):
    return pw.train(task, rounds=1, cohort__size=2, split__batch_size=2, simulation__lanes=1, **settings)


@pytest.mark.parametrize(
    "functions",
    [
        {"loss": WRONG},
        {"predict": lambda params, batch, rng: batch["y"]},
        {"weight": lambda batch: batch["y"]},
        {"metrics": {"error": pw.Metric(WRONG)}},
    ],
    ids=lambda functions: next(iter(functions)),
)
def test_training_names_the_column_those_there_are_and_the_remedy(make_ratings, functions):
    with pytest.raises(UserError, match=READS):
        train(make_task(make_ratings, **functions))


def test_the_plain_loop_and_a_client_on_its_own_do_too(make_ratings):
    with pytest.raises(UserError, match=READS):
        train(make_task(make_ratings, loss=WRONG), simulation__backend="plain")
    used = lambda params, batch, rng: scores(params, batch, rng) + batch["rating"]
    task = make_task(make_ratings, predict=used)
    run, mine = train(task), task.test.gather([0])
    local = run.personal.personalize(mine)
    with pytest.raises(UserError, match=r"reads the column 'rating'.*have only: item"):
        run.personal.predict(local, mine.select(["item"]))


def test_a_batch_is_a_dict_to_jax():
    batch = Columns(b=np.arange(3.0), a=np.ones(3))
    assert jax.tree_util.tree_leaves(batch)[0] is batch["a"]
    doubled = jax.jit(jax.vmap(lambda one: jax.tree_util.tree_map(lambda x: 2 * x, one)))(batch)
    assert isinstance(doubled, Columns)
    np.testing.assert_allclose(doubled["b"], [0, 2, 4])
    assert ("y" in batch, batch.get("y"), type({**batch, "y": 0})) == (False, None, dict)
    assert [str(path[0]) for path, _ in jax.tree_util.tree_leaves_with_path(batch)] == ["['a']", "['b']"]
