"""The backend that runs step by step: it gives the same model, its functions see numbers, and what breaks a client
is named with a remedy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partwise as pw
from partwise.data.store import ClientStore
from partwise.model.spec import Metric, auc
from partwise.types import UserError

BACKENDS = ("compiled", "plain", "eager")
ROUNDS = {"rounds": 2, "cohort__size": 4, "simulation__lanes": 2, "simulation__evaluate_every": 1}
LINE = {"update__rate": 0.1, "split__kind": "none"}


def points(y=lambda y: y, clients=12):
    rng = np.random.default_rng(0)
    counts = rng.integers(7, 10, clients)
    total = counts.sum()
    columns = {
        "x": rng.normal(size=total).astype(np.float32),
        "item": rng.integers(0, 6, total).astype(np.int32),
        "y": y(rng.normal(size=total).astype(np.float32)),
    }
    return ClientStore(columns, np.cumsum(counts) - counts, counts, np.arange(clients) + 100)


def error(outputs, batch):
    return jnp.square(outputs - batch["y"])


def of_line(params, batch, rng):
    return params["slope"] * batch["x"] + params["own"] + params["item"][batch["item"]]


def make_task(predict=of_line, loss=error, store=None, metrics=None, init=None):
    start = lambda rng: {
        "slope": jnp.zeros(()),
        "own": jnp.zeros(()),
        "item": 0.1 * jax.random.normal(rng, (6,)),
    }
    model = pw.Model(init or start, predict, loss, metrics or {})
    roles = pw.partition(model, {"own": pw.local("learned"), "item": pw.keyed("item")})
    store = store or points()
    parts = (store.take(np.arange(8)), store.take([8, 9]), store.take([10, 11]))
    return pw.Task("line", *parts, pw.Setting(model, roles, ("x", "item", "y")))


def train(task, backend, **changes):
    return pw.train(task, **{**ROUNDS, **changes}, simulation__backend=backend)


def test_step_by_step_trains_and_evaluates_as_compiled():
    metrics = {"error": Metric(error), "auc": auc("y"), "wide": Metric(error, weight=lambda b: 1 + b["item"])}
    runs = [train(make_task(metrics=metrics), backend) for backend in BACKENDS]
    expected = runs[0]
    for run in runs[1:]:
        for path, leaf in expected.params.items():
            np.testing.assert_allclose(run.params[path], leaf, rtol=1e-5, atol=1e-6)
        for name in ("loss", "error", "auc", "wide", "clients"):
            assert run.test[name] == pytest.approx(expected.test[name], rel=1e-4)
        looks = [[record["evaluation"]["loss"] for record in each.records] for each in (run, expected)]
        np.testing.assert_allclose(*looks, rtol=1e-4)


def test_what_clients_keep_is_evaluated_step_by_step_too():
    runs = [train(make_task(), backend, algorithm="fed_per") for backend in ("plain", "eager")]
    assert runs[0].test["loss"] == pytest.approx(runs[1].test["loss"], rel=1e-4)


def test_a_models_functions_see_numbers_at_every_step():
    seen = []

    def looking(outputs, batch):
        value = getattr(outputs, "primal", outputs)  # what a gradient is taken of is around its value
        seen.append((isinstance(value, jax.core.Tracer), isinstance(batch["y"], jax.core.Tracer)))
        return error(outputs, batch)

    train(make_task(loss=looking), "eager", rounds=1)
    assert len(seen) > 30
    assert not any(map(any, seen))
    seen.clear()
    train(make_task(loss=looking), "plain", rounds=1)
    assert any(map(any, seen))


def nan_of_one_example(y):
    return np.where(np.arange(len(y)) % 7 == 2, np.nan, y).astype(np.float32)


@pytest.mark.parametrize("backend", ["compiled", "plain"])
@pytest.mark.parametrize(
    ("given", "changes", "says"),
    [
        (
            {"store": points(nan_of_one_example)},
            {},
            r"The data has it: example \d of client 10\d has a 'y' that is not finite\. .*correct the data",
        ),
        (
            {"store": points(lambda y: np.full_like(y, 1e30))},
            {},
            r"loss has it before any step: that of example 1 of client 10\d \(x = .*, y = 1e\+30\).*if these",
        ),
        (
            {"loss": lambda outputs, batch: jnp.log(outputs * 0)},
            {},
            r"The model's loss has it before any step.*correct",
        ),
        (
            {"loss": lambda outputs, batch: jnp.sqrt(jnp.abs(outputs * 0))},
            {},
            r"of client 10\d is finite before any step, and its gradient is not, along .*correct the model's loss",
        ),
        ({}, {"update__rate": 1e30}, r"client 10\d are finite with the model before training.*lower"),
    ],
)
def test_what_made_a_run_not_finite_is_named_with_its_remedy(given, changes, says, backend):
    with pytest.raises(UserError, match=says) as raised:
        train(make_task(**given), backend, rounds=4, simulation__evaluate_every=0, **{**LINE, **changes})
    rates = "update.rate" in str(raised.value)
    assert rates == bool(changes)  # rates are blamed only if they are to blame


def test_the_advice_fits_the_backend():
    told = {}
    for backend in BACKENDS:
        task = make_task(store=points(lambda y: np.full_like(y, 1e21)))  # the loss is not finite, updates are
        with pytest.raises(UserError, match="has diverged") as raised:
            train(task, backend, rounds=2, simulation__evaluate_every=0, **LINE | {"update__rate": 1e-6})
        told[backend] = str(raised.value)
    assert all("simulation.backend=eager" in told[backend] for backend in ("compiled", "plain"))
    assert "breakpoint()" in told["eager"]
    assert "simulation.backend" not in told["eager"]


def test_a_servers_step_that_is_not_finite_names_the_leaves():
    settings = {**LINE, "server__optimizer": "sgd", "server__rate": 1e30, "simulation__patience": 0}
    for backend in ("compiled", "plain"):
        says = r"no longer finite after round \d+, those of .*'item'.*lower server\.rate"
        task = make_task(store=points(lambda y: 1e12 * y))
        with pytest.raises(UserError, match=says):
            train(task, backend, rounds=8, simulation__evaluate_every=0, **settings)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"predict": lambda p, b, r: b["x"] @ jnp.ones((3, 2))}, r"predict failed .*given params item float.*x fl"),
        ({"loss": lambda o, b: o - jnp.ones(77)}, r"loss failed in test_eager\.py, line \d+ .*outputs float"),
        ({"predict": lambda p, b, r: p["slop"] * b["x"]}, r"predict failed .*KeyError: 'slop'"),
        ({"metrics": {"m": Metric(lambda o, b: o.nothing)}}, r"values of the metric 'm' failed .*AttributeError"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_of_the_model_that_fails_is_named_with_what_it_was_given(given, says, backend):
    with pytest.raises(UserError, match=f"the model's {says}") as raised:
        train(make_task(**given), backend)
    assert not isinstance(raised.value.__cause__, UserError | None)


def test_an_init_that_fails_is_named():
    with pytest.raises(
        UserError, match=r"the model's init failed in test_eager\.py, line \d+ \(TypeError: dot"
    ):
        make_task(init=lambda rng: {"slope": jnp.zeros(3) @ jnp.zeros(2)})
