"""One model in several frameworks: score = relu(item row . hidden) . out, of which out is the client's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from partwise import optimizers
from partwise.algorithms.fed_recon import fed_recon
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.model.columns import masked
from partwise.model.partition import Role, keyed, local, partition
from partwise.model.spec import Model
from partwise.server.cohort import Recruiting
from partwise.simulation.loop import Simulation
from partwise.tree import flatten, unflatten

NUM_ITEMS, DIM, UNITS = 30, 4, 5
DIGITS = {"pixels": jnp.linspace(-1, 1, 24).reshape(6, 4) ** 2, "label": jnp.array([0, 1, 2, 0, 1, 2])}


def squared(outputs: jax.Array, batch: dict) -> jax.Array:
    return jnp.square(outputs - batch["rating"])


def crossed(outputs: jax.Array, batch: dict) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["label"])


def plain_start() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {
        "item": (NUM_ITEMS, DIM),
        "hidden": (DIM, UNITS),
        "hidden bias": (UNITS,),
        "out": (UNITS, 1),
        "out bias": (1,),
    }
    return {name: jnp.asarray(rng.normal(0, 0.4, shape), jnp.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="session")
def plain_model() -> Model:
    def predict(params, batch, rng):
        hidden = jax.nn.relu(params["item"][batch["item"]] @ params["hidden"] + params["hidden bias"])
        return (hidden @ params["out"] + params["out bias"])[:, 0]

    return Model(lambda rng: plain_start(), predict, squared)


@pytest.fixture(scope="session")
def one_round(make_ratings) -> Callable[..., dict[str, np.ndarray]]:
    """What the server has after a round of reconstruction, under the names of the plain model.

    `names` says where in the model each of the plain model's leaves is; of those in `turned` it has the transpose.
    """
    store = make_ratings([9, 4, 13, 7, 8, 5], NUM_ITEMS, seed=3)

    def run(model: Model, names: dict[str, str], turned: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        turn = lambda name, leaf: leaf.T if name in turned else leaf
        like = jax.eval_shape(model.init, jax.random.key(0))
        start = {names[name]: turn(name, leaf) for name, leaf in plain_start().items()}
        assert set(start) == set(flatten(like))
        structure, paths = jax.tree_util.tree_structure(like), tuple(flatten(like))
        model = model._replace(init=lambda rng: unflatten(structure, paths, start))
        roles: dict[str, Role] = {
            names["item"]: keyed("item"),
            names["out"]: local(),
            names["out bias"]: local(),
        }
        parts = partition(model, roles)
        build = lambda rates: fed_recon(
            model,
            parts,
            split=split.halves(),
            reconstruct=reconstruct.by_steps(Batches(3, 2), rates["recon"]),
            update=update.by_steps(Batches(3), rates["update"]),
            optimizer=optimizers.Sgd(1.0).on_server(),
        )
        rates = {"recon": 0.1, "update": 0.2}
        simulation = Simulation(build, rates, store.select(["item", "rating"]), Recruiting(4), lanes=2)
        list(simulation.run(1))
        of = {path: name for name, path in names.items()}
        return {of[path]: turn(of[path], np.asarray(leaf)) for path, leaf in simulation.state.params.items()}

    return run


@pytest.fixture(scope="session")
def expected_round(one_round, plain_model) -> dict[str, np.ndarray]:
    found = one_round(plain_model, {name: name for name in plain_start()})
    moved = {name: np.abs(leaf - plain_start()[name]).max() for name, leaf in found.items()}
    assert set(moved) == {"item", "hidden", "hidden bias"}
    assert min(moved.values()) > 1e-3
    return found


@pytest.fixture(scope="session")
def digits() -> dict[str, jax.Array]:
    return DIGITS


@pytest.fixture(scope="session")
def losses() -> dict[str, Callable]:
    return {"squared": squared, "crossed": crossed}


def _step(model: Model, params: dict, batch: dict, rate: float, seed: int = 0) -> dict[str, jax.Array]:
    """One step of SGD, by path."""
    mean = lambda values: jnp.mean(model.train_loss(values, batch, jax.random.key(seed)))
    gradients = jax.jit(jax.grad(mean))(params)
    return flatten(jax.tree_util.tree_map(lambda p, g: p - rate * g, params, gradients))


@pytest.fixture(scope="session")
def one_step() -> Callable[..., dict[str, jax.Array]]:
    return _step


@pytest.fixture(scope="session")
def assert_padding_is_left_out() -> Callable[..., None]:
    """Of a model of two columns, `x` [B, 3] and `y`: steps on 5 examples and padding are those on 5 alone."""

    def check(model: Model) -> None:
        rng, params = np.random.default_rng(0), model.init(jax.random.key(0))
        x, y = rng.normal(size=(8, 3)).astype(np.float32), rng.normal(size=8).astype(np.float32)
        mask = np.arange(8) < 5

        def gradient(batch: dict) -> Any:
            losses = lambda values: model.train_loss(values, batch, jax.random.key(1))  # pyright: ignore
            return jax.jit(jax.grad(lambda values: jnp.where(batch["mask"], losses(values), 0).sum()))(params)

        alone = gradient(masked({"x": jnp.asarray(x[:5]), "y": jnp.asarray(y[:5])}, jnp.asarray(mask[:5])))
        filled = gradient(masked({"x": jnp.asarray(x), "y": jnp.asarray(y)}, jnp.asarray(mask)))
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        jax.tree_util.tree_map(close, alone, filled)
        nothing = gradient(masked({"x": jnp.asarray(x), "y": jnp.asarray(y)}, jnp.zeros(8, bool)))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree_util.tree_leaves(nothing))

    return check
