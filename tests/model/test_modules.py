"""Weights go back into the framework's own module, which then answers as the personal model does."""

from __future__ import annotations

import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partwise
from partwise.config.settings import Config
from partwise.model.partition import keyed, local, partition
from partwise.runs.client_file import source_of
from partwise.runs.personal import Personal
from partwise.tasks import Setting
from partwise.tasks.ratings import settings
from partwise.types import UserError

needs = lambda *names: pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in names), reason=f"{' or '.join(names)} is not installed"
)
LOSS = lambda outputs, batch: jnp.square(outputs - batch["label"])


def opened(model, rules, store) -> Personal:
    """A client's model with random values."""
    parts = partition(model, rules)
    params, _ = parts.split(model.init(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(params))
    shaken = {
        path: np.asarray(leaf + 0.3 * jnp.abs(jax.random.normal(key, leaf.shape)))
        for (path, leaf), key in zip(params.items(), keys, strict=True)
    }
    return Personal(Config(), Setting(model, parts, tuple(store.columns)), shaken, source_of(store))


@pytest.fixture
def clicks():
    rng = np.random.default_rng(0)
    columns = {"item": rng.integers(0, 9, 6), "label": rng.random(6).astype(np.float32)}
    return partwise.ClientStore.from_arrays(np.zeros(6, int), **columns)


@pytest.fixture
def digits():
    rng = np.random.default_rng(0)
    columns = {
        name: rng.normal(size=(8, *shape)).astype(np.float32) for name, shape in (("x", (4,)), ("label", ()))
    }
    return partwise.ClientStore.from_arrays(np.zeros(8, int), **columns)


@needs("keras")
def test_a_keras_model(clicks):
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    def build(num_items):
        item = keras.Input((), dtype="int32", name="item")
        vector = keras.layers.Embedding(num_items, 3, name="vector")(item)
        normal = keras.layers.BatchNormalization(name="norm")(vector)
        return keras.Model(item, keras.layers.Dense(1, name="out")(keras.layers.Dropout(0.5)(normal))[:, 0])

    model = partwise.keras(build, LOSS, rows={"num_items": 9}, inputs="item")
    me = opened(model, {"vector/*": keyed("item"), "out/*": local()}, clicks)
    mine = {"out/kernel": np.ones((3, 1), np.float32), "out/bias": np.ones(1, np.float32)}
    module = me.module(mine)
    assert isinstance(module, keras.Model)
    assert module.get_layer("norm").momentum == pytest.approx(0.99)  # as it was built
    found = module(clicks.columns["item"])
    np.testing.assert_allclose(found, me.predict(mine, clicks), rtol=1e-5)
    with pytest.raises(UserError, match="has a local part"):
        me.module()


@needs("flax")
@pytest.mark.parametrize("ready", [False, True])
def test_an_nnx_module(ready, digits):
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.norm = nnx.Linear(4, 5, rngs=rngs), nnx.BatchNorm(5, rngs=rngs)
            self.dropout, self.out = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(5, 1, rngs=rngs)

        def __call__(self, x):
            return self.out(self.dropout(self.norm(self.first(x))))[:, 0]

    made = Net(nnx.Rngs(3)) if ready else (lambda rngs: Net(rngs))
    me = opened(partwise.nnx(made, LOSS, inputs="x"), {"norm/*": local()}, digits)
    mine = {
        path: np.full(leaf.shape, 0.5, np.float32)
        for path, leaf in me.setting.partition.shapes.items()
        if path.startswith("norm/")
    }
    module = me.module(mine)
    assert isinstance(module, Net)
    assert module.norm.momentum == pytest.approx(0.99)
    np.testing.assert_allclose(module(digits.columns["x"]), me.predict(mine, digits), rtol=1e-5)
    if ready:
        assert not np.allclose(
            made.first.kernel[...], module.first.kernel[...]
        )  # the user's own is as it was


@needs("torch", "torchax")
def test_a_torch_module(digits):
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.out = (
                torch.nn.Linear(4, 5),
                torch.nn.BatchNorm1d(5),
                torch.nn.Linear(5, 1),
            )

        def forward(self, x):
            return self.out(torch.dropout(self.norm(self.first(x)), 0.5, self.training))[:, 0]

    own = Net()
    me = opened(partwise.torch(own, LOSS, inputs="x"), {"out/*": local()}, digits)
    mine = {"out/weight": np.ones((1, 5), np.float32), "out/bias": np.ones(1, np.float32)}
    expected = me.predict(mine, digits)
    module = me.module(mine)
    assert isinstance(module, Net)
    assert module is not own
    found = module(torch.from_numpy(digits.columns["x"])).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_plain_functions_have_no_module():
    setting = settings(4, 2, 2)[0]
    params, _ = setting.partition.split(setting.model.init(jax.random.key(0)))
    store = partwise.ClientStore.from_arrays([0, 0], ids=["item"], item=[1, 2], rating=[1.0, 2.0])
    me = Personal(Config(), setting, params, source_of(store))
    with pytest.raises(UserError, match="plain functions of arrays"):
        me.module({"user": np.zeros(2, np.float32)})
