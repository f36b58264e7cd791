"""Steps on the sums of examples' rows: the same as steps on the whole slice."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from partwise import optimizers
from partwise.algorithm import init_params
from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.fed_prox import fed_prox
from partwise.algorithms.fed_select import fed_select
from partwise.client import solve, update
from partwise.client.batches import Batches
from partwise.device import Device
from partwise.model import spec
from partwise.model.partition import keyed, partition
from partwise.randomness import round_rng
from partwise.selection.choose import parse_choice
from partwise.server.cohort import Recruiting
from partwise.server.messages import send
from partwise.simulation.loop import Simulation
from partwise.tasks.tags import logistic_regression
from partwise.testing import check_algorithm
from partwise.types import UserError

WORDS, TAGS, RATES = 30, 4, {"update": 0.5, "server": 1.0}
CHOICES = ["own", "top:5", "random:6", "all"]


@pytest.fixture(scope="module")
def store(make_store):
    rng = np.random.default_rng(0)
    counts = [5, 1, 7, 3, 6]
    words = rng.integers(-1, WORDS, (sum(counts), 6)).astype(np.int32)
    words[3] = -1  # an example without words
    return make_store(counts, words=words, tags=rng.integers(-1, TAGS, (sum(counts), 2)).astype(np.int32))


def parts_with(model=None, **role):
    return partition(
        model or logistic_regression(WORDS, TAGS), {"weights": keyed("word", **role)}, {"word": ("words",)}
    )


def selecting(choice, role, stepping=None):
    def build(rates):
        return fed_select(
            logistic_regression(WORDS, TAGS),
            parts_with(**role),
            choose={"word": parse_choice(choice)},
            update=update.by_steps(Batches(2), stepping or rates["update"]),
            optimizer=optimizers.Sgd(rates["server"]).on_server(),
        )

    return build


def proximal(role, rates):
    return fed_prox(
        logistic_regression(WORDS, TAGS),
        parts_with(**role),
        schedule=Batches(2),
        client_optimizer=rates["update"],
        optimizer=optimizers.Sgd(rates["server"]).on_server(),
        mu=0.3,
        choose={"word": parse_choice("own")},
    )


def trained(build, store, lanes=2):
    simulation = Simulation(build, RATES, store, Recruiting(4), lanes=lanes)
    for _ in simulation.run(3):
        pass
    return simulation.state.params


def assert_alike(build_of, store):
    summed, whole = (trained(build_of(role), store) for role in ({"summed": True}, {"whole": True}))
    assert np.abs(summed["weights"]).max() > 0.01
    for path, leaf in whole.items():
        np.testing.assert_allclose(summed[path], leaf, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("small", [0, 1024])
@pytest.mark.parametrize("choice", CHOICES)
def test_steps_on_sums_are_steps_on_the_whole_slice(monkeypatch, store, choice, small):
    monkeypatch.setattr(spec, "SMALL_TABLE", small)  # 0: only the rows that are named are touched
    assert_alike(partial(selecting, choice), store)


def test_so_are_those_of_an_optimizer_with_a_state(store):
    assert_alike(lambda role: selecting("own", role, optax.adam(0.05)), store)


def test_so_are_those_with_a_pull(store):
    assert_alike(lambda role: partial(proximal, role), store)


@pytest.mark.parametrize("choice", ["own", "random:6"])
def test_lanes_and_devices_equal_the_plain_loop(store, choice):
    check_algorithm(selecting(choice, {"summed": True}), RATES, store, cohort=4, lanes=(1, 2))


def test_slices_in_eight_bits_equal_the_plain_loop(store):
    build = selecting("top:5", {"summed": True, "psi": "int8"})
    check_algorithm(build, RATES, store, cohort=4, lanes=(2,), tol=2e-5)


def checked(model, store):
    algorithm = fed_select(
        model,
        parts_with(model, summed=True),
        choose={"word": parse_choice("own")},
        update=update.by_steps(Batches(4), 0.1),
        optimizer=optimizers.Sgd(1.0).on_server(),
    )
    device, examples = Device(algorithm), store.gather([2])
    params = init_params(algorithm, jax.random.key(0))
    device.check(send(algorithm.partition, params, device.ask(examples).keys, round_rng(0, 0)), examples)


def test_a_model_that_uses_more_than_the_sum_is_refused(store):
    model = logistic_regression(WORDS, TAGS)
    checked(model, store)
    mean = lambda params, batch, rng: (
        model.predict(params, batch, rng) / jnp.maximum((batch["words"] >= 0).sum(1), 1)[:, None]
    )
    with pytest.raises(UserError, match=r"more than the sum of the rows of key space 'word'.*summed=True"):
        checked(model._replace(predict=mean), store)


def count(batch):
    return (batch["words"] >= 0).sum(1).astype(jnp.float32)


FIRST_TAG = spec.auc("tags")._replace(labels=lambda batch: batch["tags"][:, 0])
COUNTING = {
    "weight": {"weight": count},
    "metric 'words'": {"metrics": {"words": spec.Metric(lambda outputs, batch: count(batch))}},
    "score in metric 'words'": {
        "metrics": {"words": FIRST_TAG._replace(scores=lambda outputs, batch: count(batch))}
    },
    "training loss": {"train_loss": lambda params, batch, rng: count(batch)},
}


@pytest.mark.parametrize("what", COUNTING)
def test_so_is_one_that_counts_an_examples_ids_elsewhere(store, what):
    model = logistic_regression(WORDS, TAGS)._replace(**COUNTING[what])
    with pytest.raises(UserError, match=f"more than the sum of .*: its {what} is 1 with the sums"):
        checked(model, store)


@pytest.mark.parametrize("small", [0, 1024])
@pytest.mark.parametrize("shape", [(), (3, 2)])
def test_rows_of_any_shape_are_added_to_bags(monkeypatch, shape, small):
    monkeypatch.setattr(spec, "SMALL_TABLE", small)
    rng = np.random.default_rng(0)
    table, rows = rng.normal(size=(5, *shape)), rng.normal(size=(3, *shape))
    ids, expected = np.array([[0, 2, 2, -1], [-1, -1, -1, -1], [4, -1, 0, 1]]), table.copy()
    for example, ids_of_example in enumerate(ids):
        for number in ids_of_example[ids_of_example >= 0]:
            expected[number] += rows[example]
    found = spec.add_to_bags(*map(jnp.asarray, (table, ids, rows)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("more", [{"whole": True}, {"block": 2}])
def test_sums_of_what_is_whole_or_in_blocks_are_refused(more):
    with pytest.raises(UserError, match=r"key space 'word' has summed=True.*Leave out summed=True"):
        parts_with(summed=True, **more)


def test_sums_need_one_column():
    with pytest.raises(UserError, match="one column must name the keys, not 2"):
        partition(
            logistic_regression(WORDS, TAGS),
            {"weights": keyed("word", summed=True)},
            {"word": ("words", "title")},
        )


def least_squares():
    model = logistic_regression(WORDS, TAGS)
    return model._replace(
        predict=lambda params, batch, rng: (
            params["bias"].sum() + spec.bag(params["weights"], batch["words"]).sum(1)
        ),
        loss=lambda outputs, batch: jnp.square(outputs - batch["tags"].sum(1)),
        metrics={},
    )


@pytest.mark.parametrize("most_dense", [512, 0])  # 0: conjugate gradients
def test_the_closed_form_of_sums_is_that_of_the_whole_slice(monkeypatch, store, most_dense):
    monkeypatch.setattr(solve, "MOST_DENSE", most_dense)
    model = least_squares()

    def solving(role):
        return lambda rates: fed_avg(
            model,
            parts_with(model, **role),
            update=update.by_solving(0.5),
            optimizer=optimizers.Sgd(rates["server"]).on_server(),
        )

    assert_alike(solving, store)
