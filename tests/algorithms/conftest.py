"""A small model with a shared and a keyed leaf, and clients that hold different keys."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from partwise.model.partition import keyed, partition
from partwise.model.spec import Metric, Model, lookup

ITEMS = 5
HELD = (
    [0, 1, 0, 1, 1],
    [0, 2, 2, 0],
    [0, 3, 1],
    [0],
    [0, 4, 4, 0, 4, 0],
)  # the items of every client's examples


def squared(outputs, batch):
    return jnp.square(outputs - batch["y"])


@pytest.fixture(scope="package")
def sparse_model():
    """A bias and a row of two numbers per item; its output is their sum."""

    def init(rng):
        return {"bias": jnp.asarray(0.5), "table": jnp.linspace(-1.0, 1.0, 2 * ITEMS).reshape(ITEMS, 2)}

    def predict(params, batch, rng):
        return params["bias"] + lookup(params["table"], batch["item"]).sum(-1)

    return Model(init, predict, squared, {"mse": Metric(squared)})


@pytest.fixture(scope="package")
def sparse_parts(sparse_model):
    return partition(sparse_model, {"table": keyed("item")})


@pytest.fixture(scope="package")
def sparse_store(make_store):
    counts = list(map(len, HELD))
    y = np.random.default_rng(3).normal(size=sum(counts)).astype(np.float32)
    return make_store(counts, item=np.concatenate(HELD), y=y)
