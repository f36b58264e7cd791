"""One client, bytes in and out: what travels, and what must not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithm import init_params
from partwise.algorithms.fed_recon import fed_recon
from partwise.checkpoint import from_bytes
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.client.evaluate import BATCH
from partwise.device import Device, ask
from partwise.model.partition import frozen, keyed, local, partition
from partwise.model.spec import Model
from partwise.randomness import child, client_numbers, client_rng, words
from partwise.server.messages import send
from partwise.server.report_form import SUMS
from partwise.types import UserError

NUM_ITEMS, DIM = 10, 3
PLANTED = np.float32(1234.5677)
ROUND = jax.random.key(2)


@pytest.fixture(scope="module")
def planted(biased_model):
    """A model whose local leaf is drawn as one recognisable number; `base` and `scale` travel too."""
    inner = biased_model(NUM_ITEMS, DIM)

    def init(rng):
        drawn = inner.init(rng) | {"user": jnp.full(DIM, PLANTED), "scale": jnp.asarray(2.0)}
        return drawn | {"shift": jnp.asarray(0.25)}

    def predict(params, batch, rng):
        outputs = inner.predict(params | {"user": params["user"] / PLANTED}, batch, rng)
        return outputs * params["scale"] / 2 + params["shift"]

    return inner._replace(init=init, predict=predict)


def algorithm_for(model: Model):
    rules = {"user": local(), "item/*": keyed("item"), "scale": frozen()}
    return fed_recon(
        model,
        partition(model, rules),
        split=split.alternate(2),
        reconstruct=reconstruct.skip(),
        update=update.by_steps(Batches(4), 0.1),
        optimizer=optimizers.Sgd(1.0).on_server(),
    )


@pytest.fixture(scope="module")
def setting(planted, make_ratings):
    """(algorithm, device, server parameters, the store of one client with 7 examples)."""
    algorithm = algorithm_for(planted)
    return (
        algorithm,
        Device(algorithm),
        init_params(algorithm, jax.random.key(0)),
        make_ratings([7], NUM_ITEMS, seed=5),
    )


@pytest.fixture(scope="module")
def message(setting):
    algorithm, _, params, store = setting
    return send(algorithm.partition, params, ask(algorithm.partition, algorithm.choose, store).keys, ROUND)


@pytest.fixture(scope="module")
def answer(setting, message):
    _, device, _, store = setting
    return device.report(message, store)


def holds(data: bytes) -> bool:
    return any(np.array([PLANTED], kind).tobytes() in data for kind in (np.float32, np.float64, np.float16))


def test_the_message_holds_own_rows_and_whole_shared_leaves(setting, message):
    _, _, params, store = setting
    arrays, header = from_bytes(message)
    own = np.unique(store.columns["item"])
    assert set(arrays) == {"item/table:rows", "item/offset:rows", "base", "scale", "shift"}
    np.testing.assert_array_equal(arrays["item/table:rows"], params["item/table"][own])
    np.testing.assert_array_equal(arrays["item/offset:rows"], params["item/offset"][own])
    np.testing.assert_array_equal(arrays["base"], params["base"])
    assert arrays["scale"].shape == ()
    assert header["rng"] == jax.random.key_data(ROUND).tolist()
    assert len(own) < NUM_ITEMS


def test_no_local_value_is_in_what_travels(setting, message, answer):
    """The planted number is in the client's own part, and nowhere in the bytes."""
    _, device, _, store = setting
    np.testing.assert_array_equal(device.personalize(message, store)["user"], np.full(DIM, PLANTED))
    assert not holds(message)
    assert not holds(answer)
    assert holds(device.personalize(message, store)["user"].tobytes())


def test_the_report_holds_the_change_of_own_rows_only(setting, answer):
    _, _, _, store = setting
    update_, header = from_bytes(answer)
    own = np.unique(store.columns["item"])
    assert set(update_) == {"item/table", "item/offset", "base", "shift", SUMS}
    assert update_["item/table"].shape == (len(own), DIM)
    assert update_["item/offset"].shape == (len(own),)
    query = store.columns["item"][[2, 3, 6]]
    moved = np.isin(own, query)
    np.testing.assert_array_equal(update_["item/offset"] != 0, moved)
    assert update_[SUMS][:2].tolist() == [3, 1]
    assert header["valid"] is True


def test_a_scalar_leaf_travels_both_ways(answer):
    update_, _ = from_bytes(answer)
    assert update_["shift"].shape == ()
    assert update_["shift"] != 0


def test_prediction_with_a_rebuilt_part_equals_the_models(setting, planted, message):
    algorithm, device, params, store = setting
    own = {"user": np.array([1.0, 2.0, 3.0], np.float32)}
    found = device.predict(message, own, store)
    batch = {name: jnp.asarray(column) for name, column in store.columns.items()}
    expected = planted.predict(algorithm.partition.merge(params, own), batch, None)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found.shape == (7,)


def test_evaluation_equals_the_metric_by_hand(setting, planted, message):
    algorithm, device, params, store = setting
    sums = device.evaluate(message, store)
    rows = np.array([2, 3, 6])
    batch = {name: jnp.asarray(column)[rows] for name, column in store.columns.items()}
    whole = algorithm.partition.merge(params, {"user": jnp.full(DIM, PLANTED)})
    errors = np.square(planted.predict(whole, batch, None) - batch["rating"])
    np.testing.assert_allclose(sums["rmse"].value, errors.sum(), rtol=1e-5)
    assert sums["rmse"].weight == sums["loss"].weight == 3


def test_evaluation_goes_over_more_than_one_batch(biased_model, make_ratings):
    count, model = 2 * BATCH + 5, biased_model(NUM_ITEMS, DIM)
    store = make_ratings([count], NUM_ITEMS)
    algorithm = fed_recon(
        model,
        partition(model, {"user": local(), "item/*": keyed("item")}),
        split=split.none(),
        reconstruct=reconstruct.skip(),
        update=update.by_steps(Batches(4), 0.1),
        optimizer=optimizers.Sgd(1.0).on_server(),
    )
    params = init_params(algorithm, jax.random.key(0))
    message = send(algorithm.partition, params, ask(algorithm.partition, algorithm.choose, store).keys, ROUND)
    sums = Device(algorithm).evaluate(message, store)
    rng = client_rng(ROUND, words(client_numbers(store.client_ids)[0]))
    user = model.init(child(rng, "init"))["user"]
    batch = {name: jnp.asarray(column) for name, column in store.columns.items()}
    outputs = model.predict(algorithm.partition.merge(params, {"user": user}), batch, None)
    assert sums["rmse"].weight == count
    np.testing.assert_allclose(sums["rmse"].value, np.sum(np.square(outputs - batch["rating"])), rtol=1e-5)


def test_a_client_without_examples_reports_nothing_and_breaks_nothing(setting):
    algorithm, device, params, store = setting
    nobody = store.narrow(np.zeros_like(store.counts), np.zeros_like(store.counts)).gather([0])
    empty = send(algorithm.partition, params, ask(algorithm.partition, algorithm.choose, nobody).keys, ROUND)
    update_, _ = from_bytes(device.report(empty, nobody))
    assert update_[SUMS].tolist() == [0, 0, 0, 0]
    assert update_["item/table"].shape == (0, DIM)
    assert all(not np.any(change) for change in update_.values())
    assert device.evaluate(empty, nobody)["rmse"].weight == 0


def test_a_device_works_for_one_client_at_a_time(setting, make_ratings):
    with pytest.raises(UserError, match=r"this store has 2: take one with store\.gather"):
        setting[1].ask(make_ratings([4, 7], NUM_ITEMS))


def test_a_client_taken_out_of_a_store_is_that_client(setting, make_ratings):
    """`take` is a view of all rows; what a device does must be with its own."""
    algorithm, device, params, _ = setting
    both = make_ratings([4, 7], NUM_ITEMS, seed=3)
    answers = []
    for own in (both.take([1]), both.gather([1])):
        asked = device.ask(own)
        message = send(algorithm.partition, params, asked.keys, ROUND)
        answers.append((asked.keys["item"].tolist(), device.report(message, own, asked)))
    assert answers[0] == answers[1]
