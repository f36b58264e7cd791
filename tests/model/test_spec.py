"""Rows by id, with -1 for nothing: one at a time, and added up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise.model import spec
from partwise.model.partition import frozen, partition
from partwise.model.spec import (
    Metric,
    Model,
    add_to_bags,
    bag,
    check_arguments,
    indicators,
    lookup,
    training_losses,
)
from partwise.types import UserError

TABLE = jnp.arange(12.0).reshape(4, 3) + 1
IDS = jnp.array([[0, 3, -1], [-1, -1, -1], [2, -1, 2]])


def test_nothing_is_zero():
    found = lookup(TABLE, IDS)
    np.testing.assert_array_equal(found[0], [TABLE[0], TABLE[3], np.zeros(3)])
    assert found[1].sum() == 0


@pytest.mark.parametrize("width", [1, 3, 10, 23])
def test_a_bag_is_the_sum_of_its_rows(width):
    ids = jnp.asarray(np.random.default_rng(width).integers(-1, 4, (5, width)))
    np.testing.assert_allclose(jax.jit(bag)(TABLE, ids), lookup(TABLE, ids).sum(1), rtol=1e-6)


def test_the_gradient_of_a_bag_is_that_of_the_sum():
    weights = jnp.arange(9.0).reshape(3, 3)
    of_bag = jax.grad(lambda table: jnp.vdot(bag(table, IDS), weights))(TABLE)
    of_sum = jax.grad(lambda table: jnp.vdot(lookup(table, IDS).sum(1), weights))(TABLE)
    np.testing.assert_allclose(of_bag, of_sum, rtol=1e-6)
    many = jax.vmap(lambda ids: bag(TABLE, ids))(jnp.stack([IDS, IDS[::-1]]))
    np.testing.assert_allclose(many[1], bag(TABLE, IDS)[::-1], rtol=1e-6)


@pytest.mark.parametrize("small", [0, 1024])
def test_rows_are_added_to_all_rows_of_a_bag(monkeypatch, small):
    """In a pass over the table, or row by row: `bag` is the transpose. Lanes have bags of their own lengths."""
    monkeypatch.setattr(spec, "SMALL_TABLE", small)
    rows = jnp.arange(9.0).reshape(3, 3)
    transposed = jax.grad(lambda table: jnp.vdot(bag(table, IDS), rows))(TABLE)
    np.testing.assert_array_equal(add_to_bags(TABLE, IDS, rows), TABLE + transposed)
    ids = jnp.stack([IDS, jnp.where(jnp.arange(3) == 0, IDS, -1)])
    for lanes in ((0, 0, 0), (None, 0, None)):
        given = [
            each if lane is None else jnp.stack([each, each + 2])
            for each, lane in zip((TABLE, rows), (lanes[0], lanes[2]), strict=True)
        ]
        found = jax.jit(jax.vmap(add_to_bags, in_axes=lanes))(given[0], ids, given[1])
        for i in range(2):
            alone = [each if lane is None else each[i] for each, lane in zip(given, lanes[::2], strict=True)]
            np.testing.assert_array_equal(found[i], add_to_bags(alone[0], ids[i], alone[1]))


def test_indicators_count():
    np.testing.assert_array_equal(indicators(IDS, 4), [[1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 2, 0]])


@pytest.mark.parametrize(
    "loss", [lambda outputs, batch: outputs.mean(), lambda outputs, batch: outputs[:, None]]
)
def test_a_loss_without_a_value_for_every_example_is_refused(loss):
    model = Model(lambda rng: {}, lambda params, batch, rng: batch["x"], loss)
    with pytest.raises(UserError, match=r"the loss of a batch of 3 examples has shape .*; expected \(3,\)"):
        jax.eval_shape(lambda: training_losses(model, {}, {"x": jnp.ones(3)}, jax.random.key(0)))


def model_with(**changes):
    model = Model(
        init=lambda rng: {"w": jnp.zeros(3)},
        predict=lambda params, batch, rng: batch["x"] * params["w"].sum(),
        loss=lambda outputs, batch: jnp.square(outputs),
    )
    return model._replace(**changes)


@pytest.mark.parametrize("name", ["loss", "clients", "over_clients", "judged", "undefined"])
def test_a_metric_may_not_take_the_name_of_something_else(name):
    with pytest.raises(UserError, match=f"a metric cannot be named '{name}'"):
        partition(model_with(metrics={name: Metric(lambda outputs, batch: outputs)}), {})


def test_a_metric_is_a_metric():
    with pytest.raises(UserError, match="the metric 'm' is a function, not a Metric or Pooled"):
        partition(model_with(metrics={"m": lambda outputs, batch: outputs}), {})


@pytest.mark.parametrize("dtype", [jnp.int32, bool])
def test_a_loss_without_a_gradient_is_refused(dtype):
    model = model_with(loss=lambda outputs, batch: jnp.square(outputs).astype(dtype))
    with pytest.raises(UserError, match="along which there is no gradient"):
        training_losses(model, {"w": jnp.ones(3)}, {"x": jnp.ones(2)}, jax.random.key(0))


def test_a_parameter_of_whole_numbers_can_only_be_frozen():
    model = model_with(init=lambda rng: {"w": jnp.zeros(3), "n": jnp.zeros(2, int)})
    with pytest.raises(UserError, match="parameter 'n' has the type int32"):
        partition(model, {})
    assert partition(model, {"n": frozen()}).of("frozen") == ("n",)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"predict": lambda params, batch: 0}, r"predict cannot be called as predict\(params, batch, rng\)"),
        ({"loss": lambda outputs: outputs}, r"loss cannot be called as loss\(outputs, batch\)"),
    ],
)
def test_a_function_with_other_arguments_is_refused(changes, says):
    with pytest.raises(UserError, match=says):
        check_arguments(model_with(**changes))
