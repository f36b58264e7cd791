"""The update through the closed form, against the gradient of everything written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise.client import reconstruct
from partwise.client.split import Split, Subset, alternate, everything
from partwise.client.state import begin, with_deltas
from partwise.client.through import Through
from partwise.config.parts import make_through, rates_of
from partwise.config.settings import Config
from partwise.model.partition import keyed, local, partition
from partwise.tasks.informed_factorization import informed_factorization
from partwise.types import UserError

NUM_ITEMS, DIM, PULL, RATE, COUNT = 6, 2, 0.7, 0.3, 11
LEARNED = ("item", "item_bias", "item_signal", "item_attention")
ITEMS = (*LEARNED, "item_features")
FEATURES = np.array([[0, 1], [1, -1], [2, 0], [-1, -1], [2, 1], [0, -1]])
EMPTY = Subset(lambda n: n * 0, lambda j, n: j)


@pytest.fixture(scope="module")
def model():
    more = {"signals": True, "attention": True, "item_pull": 0.2}
    return informed_factorization(
        NUM_ITEMS, DIM, center=3.0, spread=1.2, **more, item_features=FEATURES, num_item_features=3
    )


@pytest.fixture(scope="module")
def params(model):
    start = model.init(jax.random.key(3))
    noise = lambda leaf: leaf + 0.4 * jax.random.normal(jax.random.key(5), leaf.shape)
    return {path: leaf if path == "item_features" else noise(leaf) for path, leaf in start.items()}


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings([COUNT], NUM_ITEMS, seed=4)


def client_of(model, params, store, make_client, initial):
    rules = {"user": local(initial), "user_bias": local(initial), **dict.fromkeys(ITEMS, keyed("item"))}
    return make_client(model, partition(model, rules), params, store)


def written_out(model, params, store, split, initial):
    """The mean loss of the query set as a function of all that was received, the client's part solved for."""
    examples = {name: jnp.asarray(column) for name, column in store.columns.items()}
    part = lambda subset: {
        name: column[subset.index(np.arange(subset.count(COUNT)), COUNT)] for name, column in examples.items()
    }
    support, query = part(split.support), part(split.query)

    def loss(given):
        towards = jnp.array([*given["user"], given["user_bias"]]) * (initial == "learned")
        place = lambda x: {**given, "user": x[:DIM], "user_bias": x[DIM]}
        summed = lambda x: (
            model.rebuild_loss(place(x), support, None).sum() + PULL * jnp.sum(jnp.square(x - towards))
        )
        zero = jnp.zeros(DIM + 1)
        x = -jnp.linalg.solve(jax.hessian(summed)(zero), jax.grad(summed)(zero))
        return model.train_loss(place(x), query, None).mean()

    return loss


@pytest.mark.parametrize("initial", ["zero", "learned"])
@pytest.mark.parametrize("batch_size", [4, 32])
@pytest.mark.parametrize("split", [alternate(2), Split(everything, everything)], ids=["alternate", "none"])
def test_it_is_the_gradient_of_the_query_loss(model, params, store, make_client, initial, batch_size, split):
    client = client_of(model, params, store, make_client, initial)
    step = Through(PULL, RATE, batch_size).given(split.support)
    rebuild = reconstruct.by_solving(PULL, batch_size)
    found = jax.jit(lambda: step(client, rebuild(client, begin(client), split.support), split.query))()
    expected = jax.grad(written_out(model, params, store, split, initial))(params)
    keys = np.unique(store.columns["item"])
    for path in LEARNED:
        change = found.progress.keyed[path][: len(keys)]
        np.testing.assert_allclose(change, -RATE * expected[path][keys], rtol=2e-3, atol=2e-5, err_msg=path)
    assert not np.any(found.progress.keyed["item_features"])  # the names of features stay
    received = client.received.shared
    for path in received:
        name = path.removeprefix("default/")
        change = found.progress.shared[path] - received[path]
        np.testing.assert_allclose(change, -RATE * expected[name], rtol=2e-3, atol=2e-5, err_msg=path)


def test_without_a_query_set_nothing_changes(model, params, store, make_client):
    client = client_of(model, params, store, make_client, "learned")
    rebuilt = reconstruct.by_solving(PULL)(client, begin(client), everything)
    found = jax.jit(lambda: Through(PULL, RATE).given(everything)(client, rebuilt, EMPTY))()
    before = with_deltas(client, rebuilt)
    jax.tree_util.tree_map(np.testing.assert_array_equal, found.progress, before)


def test_it_needs_a_local_part_that_is_solved_for(model, params, store, make_client):
    roles = partition(model, dict.fromkeys(ITEMS, keyed("item")))
    client = make_client(model, roles, params, store)
    with pytest.raises(UserError, match="nothing is local: use steps"):
        Through(PULL, RATE).given(everything)(client, begin(client), everything)
    config = Config().changed({"update.method": "through"})
    with pytest.raises(UserError, match=r"not with reconstruct.method = steps"):
        make_through(config, rates_of(config))
