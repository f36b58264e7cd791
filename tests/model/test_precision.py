"""Steps in bfloat16: what is rounded, what is not, and that it learns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partwise as pw
from partwise.algorithms.registry import prepare
from partwise.model.precision import with_precision
from partwise.model.spec import Model
from partwise.runs.resolve import resolve
from partwise.types import UserError

SETTINGS = {
    "data.num_clients": 200,
    "data.num_items": 60,
    "data.mean_examples": 15,
    "data.dim": 4,
    "cohort.size": 20,
    "rounds": 30,
    "reconstruct.method": "steps",
    "simulation.lanes": 4,
    "simulation.evaluate_every": 0,
}
seen: dict[str, set] = {}


def watched(name, function):
    def called(*arguments):
        leaves = jax.tree_util.tree_leaves(arguments)
        seen.setdefault(name, set()).update(
            str(x.dtype) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)
        )
        return function(*arguments)

    return called


def test_predictions_are_rounded_and_the_rest_is_not():
    seen.clear()
    model = Model(
        init=lambda rng: {"w": jnp.ones(3)},
        predict=watched("predict", lambda params, batch, rng: batch["x"] @ params["w"]),
        loss=watched("loss", lambda outputs, batch: (outputs - batch["y"]) ** 2),
    )
    batch = {"x": jnp.array([[1.001, 0.3, 0.1]]), "y": jnp.array([1.7]), "id": jnp.array([3])}
    low = with_precision(model, "bfloat16")
    predict = lambda params: low.predict(params, batch, jax.random.key(0))
    loss, gradient = jax.value_and_grad(lambda params: low.loss(predict(params), batch).sum())(
        model.init(None)
    )
    assert seen == {"predict": {"bfloat16"}, "loss": {"float32"}}
    assert loss.dtype == gradient["w"].dtype == jnp.float32
    exact = lambda params: model.loss(batch["x"] @ params["w"], batch).sum()
    np.testing.assert_allclose(gradient["w"], jax.grad(exact)(model.init(None))["w"], rtol=0.05, atol=0.02)


def test_a_training_loss_is_rounded_too():
    model = Model(
        init=lambda rng: {"w": jnp.ones(3)},
        predict=lambda params, batch, rng: batch["x"] @ params["w"],
        loss=lambda outputs, batch: outputs,
        train_loss=watched("train", lambda params, batch, rng: batch["x"] @ params["w"]),
    )
    seen.clear()
    losses = with_precision(model, "bfloat16").train_loss
    assert losses
    assert losses({"w": jnp.ones(3)}, {"x": jnp.ones((2, 3))}, jax.random.key(0)).dtype == jnp.float32
    assert seen == {"train": {"bfloat16"}}


RATINGS = ("planted", SETTINGS, "item", "rmse")
POSTS = {"data.num_words": 100, "data.num_tags": 8, "data.num_clients": 100, "cohort.size": 20, "rounds": 30}
POSTS |= {"simulation.lanes": 4, "simulation.evaluate_every": 0}
LEARNED = {
    "fed_recon": RATINGS,
    "fed_avg": RATINGS,
    "fed_prox": RATINGS,
    "scaffold": ("tags-planted", POSTS, "weights", "loss"),  # its clients learn no rows of their own
}


@pytest.mark.parametrize("algorithm", LEARNED)
def test_it_learns_as_in_full_precision(algorithm):
    task, settings, table, metric = LEARNED[algorithm]
    full, low = (
        pw.train(task, changes=settings | {"algorithm": algorithm, "update.precision": precision})
        for precision in ("float32", "bfloat16")
    )
    assert low.params[table].dtype == np.float32
    assert (low.params[table] != full.params[table]).any()
    assert abs(low.summary["test"][metric] / full.summary["test"][metric] - 1) < 0.02


def test_a_model_is_checked_in_full_precision():
    """In 16 bits, the sum of an example's rows would not be what the model adds up itself."""
    prepared = prepare(*resolve("planted", None, SETTINGS | {"update.precision": "bfloat16"}))
    assert prepared.checked
    rounded, exact = prepared.build(prepared.rates).model, prepared.checked(prepared.rates).model
    assert rounded.predict is not exact.predict
    assert exact.predict is prepared.evaluation(prepared.rates).model.predict


def test_an_unknown_precision_is_named():
    with pytest.raises(UserError, match=r"update.precision.*float8.*float32, bfloat16"):
        pw.train("planted", changes=SETTINGS | {"update.precision": "float8"})


def test_closed_forms_need_full_precision():
    with pytest.raises(UserError, match=r"reconstruct.method = solve needs float32"):
        pw.train(
            "planted", changes=SETTINGS | {"update.precision": "bfloat16", "reconstruct.method": "solve"}
        )
