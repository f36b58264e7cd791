"""R and U around the loop: the pull, learned defaults, joint training."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from partwise.client import reconstruct, update
from partwise.client.batches import Batches
from partwise.client.split import alternate, everything, halves
from partwise.client.state import begin, local_values
from partwise.model.partition import keyed, local, partition, shared
from partwise.types import UserError

NUM_ITEMS, DIM, COUNT, RATE, PULL = 5, 2, 8, 0.2, 1.5


@pytest.fixture(scope="module")
def model(biased_model):
    return biased_model(NUM_ITEMS, DIM)


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(5))


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings([COUNT], NUM_ITEMS, seed=1)


@pytest.fixture(scope="module")
def client_with(model, params, store, make_client):
    def make(initial, **rules):
        parts = partition(model, {"user": local(initial=initial), "item/*": keyed("item")} | rules)
        return make_client(model, parts, params, store)

    return make


def mean_loss(model, store, rows, user, item, base):
    batch = {name: jnp.asarray(column)[rows] for name, column in store.columns.items()}
    outputs = model.predict({"user": user, "item": item, "base": base}, batch, None)
    return jnp.mean(model.loss(outputs, batch))


@pytest.mark.parametrize("initial", ["random", "learned"])
def test_pull_is_one_part_of_the_summed_loss(client_with, model, params, store, initial):
    """One step on the whole support set: l - rate * (gradient of the mean + 2 * pull / n * (l - default))."""
    client = client_with(initial)
    started = begin(client)._replace(local={"user": jnp.array([1.0, -2.0])})
    support = np.arange(COUNT // 2)
    found = jax.jit(lambda p: reconstruct.by_steps(Batches(COUNT), RATE, PULL)(client, p, halves().support))(
        started
    )
    default = np.asarray(params["user"]) if initial == "learned" else np.zeros(DIM)
    slope = jax.grad(mean_loss, argnums=3)(
        model, store, support, started.local["user"], params["item"], params["base"]
    )
    user = np.array([1.0, -2.0])
    expected = user - RATE * (np.asarray(slope) + 2 * PULL / len(support) * (user - default))
    np.testing.assert_allclose(found.local["user"], expected, rtol=1e-5)


def test_no_pull_by_default_and_skip_does_nothing(client_with):
    client = client_with("random")
    started = begin(client)
    assert reconstruct.skip()(client, started, everything) is started
    still = reconstruct.by_steps(Batches(4, 0), RATE)(client, started, everything)
    np.testing.assert_array_equal(still.local["user"], started.local["user"])
    assert not still.keyed


def test_a_model_without_local_leaves_has_nothing_to_reconstruct(model, params, store, make_client):
    client = make_client(model, partition(model, {"item/*": keyed("item")}), params, store)
    for procedure in (
        reconstruct.by_steps(Batches(4), RATE),
        reconstruct.by_steps(Batches(4), RATE, pull=PULL),
        reconstruct.by_solving(PULL),
    ):
        found = procedure(client, begin(client), everything)
        assert found.local == {}
        np.testing.assert_array_equal(found.shared["base"], params["base"])


@pytest.mark.parametrize("joint", [False, True])
def test_update_trains_the_local_part_only_if_joint(client_with, joint):
    client = client_with("random")
    procedure = update.by_steps(Batches(4), RATE, joint=joint)
    trained = jax.jit(lambda p: procedure(client, p, alternate(2).query))(begin(client))
    moved = not np.array_equal(trained.progress.local["user"], begin(client).local["user"])
    assert moved == joint
    assert not np.array_equal(trained.progress.shared["base"], client.received.shared["base"])
    assert np.abs(trained.progress.keyed["item/table"]).max() > 0
    assert trained.loss.weight == 4


def test_learned_default_gets_the_first_order_meta_gradient(client_with, model, params, store):
    """The gradient of the query loss with the rebuilt vector, as if it had moved along with its default."""
    client = client_with("learned")
    rebuild = reconstruct.by_steps(Batches(COUNT, 3), RATE)
    train = update.by_steps(Batches(COUNT), RATE)

    @jax.jit
    def both(progress):
        rebuilt = rebuild(client, progress, halves().support)
        return rebuilt, train(client, rebuilt, halves().query).progress

    rebuilt, after = both(begin(client))
    query = np.arange(COUNT // 2, COUNT)
    slope = jax.grad(mean_loss, argnums=3)(
        model, store, query, rebuilt.local["user"], params["item"], params["base"]
    )
    change = after.shared["default/user"] - params["user"]
    np.testing.assert_allclose(change, -RATE * slope, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(after.local["user"], rebuilt.local["user"])
    np.testing.assert_array_equal(local_values(client, after)["user"], rebuilt.local["user"])
    assert np.abs(change).max() > 1e-3


OPTIMIZERS = {"sgd": RATE, "adam": optax.adam(RATE)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
@pytest.mark.parametrize("joint", [False, True])
def test_a_learned_default_moves_nothing_but_itself(client_with, params, joint, optimizer):
    """From the same start, training is the same as without a default. A default moves as its leaf does, if that is
    trained."""
    train = update.by_steps(Batches(2, 2), optimizer, joint=joint)
    start = {"user": params["user"]}
    learned, plain = (
        jax.jit(lambda p, client=client: train(client, p, everything).progress)(
            begin(client)._replace(local=start)
        )
        for client in (client_with("learned"), client_with("random"))
    )
    default = learned.shared.pop("default/user")
    jax.tree_util.tree_map(np.testing.assert_array_equal, learned, plain)
    assert np.array_equal(default, plain.local["user"]) == joint
    assert not np.array_equal(default, start["user"])


@pytest.mark.parametrize("twin", ["add", "average"])
def test_a_twin_is_rebuilt_while_its_shared_half_waits(client_with, twin):
    client = client_with("random", base=shared(twin=twin))
    started = begin(client)
    found = jax.jit(lambda p: reconstruct.by_steps(Batches(COUNT), RATE)(client, p, everything))(started)
    assert not np.array_equal(found.local["base"], started.local["base"])
    np.testing.assert_array_equal(found.shared["base"], client.received.shared["base"])


def test_schedules_are_checked_when_a_procedure_is_made():
    with pytest.raises(UserError, match="reconstruct: the batch size"):
        reconstruct.by_steps(Batches(0), RATE)
    with pytest.raises(UserError, match="update: give epochs"):
        update.by_steps(Batches(4, None), RATE)
