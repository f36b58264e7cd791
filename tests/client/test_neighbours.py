"""Losses in which examples of a batch see each other: the rows that fill up a batch are left out by its mask, and a
loss that does not leave them out is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partwise as pw
from partwise import optimizers
from partwise.algorithm import change
from partwise.algorithms.fed_avg import fed_avg
from partwise.client import update
from partwise.client.batches import Batches
from partwise.client.check_model import check_model
from partwise.client.split import everything
from partwise.client.state import begin
from partwise.data import by_client
from partwise.device import Device
from partwise.server.cohort import Recruiting
from partwise.server.messages import send
from partwise.simulation.loop import Simulation
from partwise.simulation.plain import PlainSimulation
from partwise.testing import check_adapter, check_task
from partwise.types import UserError

NUM_ITEMS, DIM, EXAMPLES, RATE = 12, 3, 5, 0.3
REFUSED = r"of an example depends on more than this example.*batch\['mask'\]"


def scores_of(outputs, batch):
    query, item = outputs
    return jnp.where(batch["mask"], query @ item.T, -1e9)


def softmax(outputs, batch):
    """Every example's item against the items of the other examples."""
    scores = scores_of(outputs, batch)
    return jax.nn.logsumexp(scores, axis=1) - jnp.diagonal(scores)


def naive(outputs, batch):
    return softmax(outputs, {"mask": jnp.ones(len(outputs[0]), bool)})


def rank(outputs, batch):
    scores = scores_of(outputs, batch)
    return jnp.sum(scores > jnp.diagonal(scores)[:, None], axis=1).astype(jnp.float32)


def towers(loss=softmax, **more):
    def init(rng):
        return {"query": jnp.zeros((DIM, DIM)), "item": jax.random.normal(rng, (NUM_ITEMS, DIM))}

    predict = lambda params, batch, rng: (batch["x"] @ params["query"], params["item"][batch["item"]])
    return pw.Model(init, predict, loss, **{"metrics": {"rank": pw.Metric(rank)}, **more})


def parts_of(model):
    return pw.partition(model, {"item": pw.keyed("item")})


@pytest.fixture(scope="module")
def store(make_store):
    """Clients of five examples each: a batch of 5 is full, and one of 8 is not."""
    rng = np.random.default_rng(0)
    total = 6 * EXAMPLES
    items = np.concatenate([rng.permutation(NUM_ITEMS)[:EXAMPLES] for _ in range(6)]).astype(np.int32)
    return make_store([EXAMPLES] * 6, item=items, x=rng.normal(size=(total, DIM)).astype(np.float32))


def algorithm(batch_size, model=None):
    model = model or towers()
    return lambda rates: fed_avg(
        model,
        parts_of(model),
        update=update.by_steps(Batches(batch_size), RATE),
        optimizer=optimizers.Sgd(1.0).on_server(),
    )


def after(simulation):
    losses = [record.loss for call in simulation.run(2) for record in call]
    return {path: np.array(leaf) for path, leaf in simulation.state.params.items()}, losses


def assert_same(a, b):
    jax.tree_util.tree_map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


@pytest.mark.parametrize(
    "make",
    [
        lambda *given: Simulation(*given, lanes=1),
        lambda *given: Simulation(*given, lanes=3),
        PlainSimulation,
    ],
    ids=["one lane", "three lanes", "plain"],
)
def test_a_batch_of_8_with_5_examples_is_a_batch_of_5(make, store):
    full, padded = (after(make(algorithm(size), {}, store, Recruiting(4))) for size in (EXAMPLES, 8))
    assert_same(full, padded)
    assert np.abs(full[0]["query"]).max() > 0.01


def test_a_clients_update_is_the_gradient_of_its_examples_alone(store, make_client):
    model = towers()
    parts, params = parts_of(model), model.init(jax.random.key(3))
    examples = store.gather([2])
    batch = {name: jnp.asarray(column) for name, column in examples.columns.items()}
    batch["mask"] = jnp.ones(EXAMPLES, bool)
    mean = lambda params: jnp.mean(model.loss(model.predict(params, batch, None), batch))
    expected = jax.tree_util.tree_map(lambda g: -RATE * g, jax.grad(mean)(params))
    client = make_client(model, parts, params, store, 2)
    for size in (EXAMPLES, 6, 8):
        trained = update.by_steps(Batches(size), RATE)(client, begin(client), everything)
        moved = change(client, trained.progress)
        own = np.asarray(client.examples.keys["item"].rows)
        assert_same((moved["query"], moved["item"]), (expected["query"], expected["item"][own]))


def test_a_device_sends_the_same_report_whatever_its_batch_size(store):
    model = towers()
    reports = []
    for size in (EXAMPLES, 8):
        built = algorithm(size, model)({})
        device, examples = Device(built), store.gather([1])
        asked = device.ask(examples)
        params = built.partition.split(model.init(jax.random.key(3)))[0]
        message = send(built.partition, params, asked.keys, jax.random.key(0))
        found, _ = device._form.read(device.report(message, examples, asked), asked.keys)
        reports.append((dict(found.update), found.weight, tuple(found.loss)))
    assert_same(*reports)


def own_task(store, model):
    setting = pw.Setting(model, parts_of(model), ("item", "x"))
    return pw.Task("towers", *by_client(store), setting, setting)


def some_batch(store):
    return {name: jnp.asarray(column[:4]) for name, column in store.columns.items()}


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"loss": naive}, "loss"),
        ({"loss": lambda o, b: jnp.square(o[0] - o[0].mean(0)).sum(1)}, "loss"),
        ({"loss": lambda o, b: jnp.square(o[0]).sum(1) / len(o[0])}, "loss"),
        ({"train_loss": lambda p, b, r: jnp.square((b["x"] - b["x"].mean(0)) @ p["query"]).sum(1)}, "training"),
        ({"rebuild_loss": lambda p, b, r: jnp.square(b["x"] @ p["query"]).sum(1).cumsum()[::-1]}, "loss of a"),
        ({"metrics": {"spread": pw.Metric(lambda o, b: o[0].std(0).sum() + o[0][:, 0])}}, "metric 'spread'"),
        ({"weight": lambda batch: jnp.full(len(batch["x"]), 1.0 / len(batch["x"]))}, "weight"),
    ],
)  # fmt: skip
def test_what_sees_rows_that_only_fill_up_a_batch_is_refused_before_the_first_round(changed, what, store):
    task = own_task(store, towers(**changed))
    with pytest.raises(UserError, match=f"the model's {what}.*{REFUSED}"):
        pw.train(task, algorithm="fed_avg", rounds=1, cohort__size=2, simulation__lanes=1)
    if "rebuild_loss" not in changed:
        with pytest.raises(UserError, match=REFUSED):
            check_task(task)
        with pytest.raises(UserError, match=REFUSED):
            check_adapter(towers(**changed), some_batch(store))


def test_a_loss_that_reads_the_mask_passes_the_checks_and_is_trained(store):
    task = own_task(store, towers())
    check_task(task)
    check_adapter(task.personal.model, some_batch(store))
    runs = [
        pw.train(
            task, algorithm="fed_avg", rounds=2, cohort__size=3, update__batch_size=size, simulation__lanes=2
        )
        for size in (EXAMPLES, 16)
    ]
    assert_same(*(dict(run.params) for run in runs))
    assert runs[0].test["loss"] == pytest.approx(runs[1].test["loss"], rel=1e-5)


def test_a_loss_that_draws_by_itself_is_not_taken_for_one_that_sees_others(store, make_client):
    def dropping(params, batch, rng):
        kept = jax.random.bernoulli(rng, 0.5, batch["x"].shape[::-1]).T
        return jnp.square(jnp.where(kept, batch["x"], 0) @ params["query"] + 1).sum(1)

    model = towers(train_loss=dropping)
    check_model(make_client(model, parts_of(model), model.init(jax.random.key(0)), store))


def test_a_column_of_the_data_named_mask_stays_what_it_is(make_store):
    words = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], np.float32)
    loss = lambda outputs, batch: jnp.sum(outputs * batch["mask"], axis=1)
    model = pw.Model(lambda rng: {"w": jnp.ones(3)}, lambda p, b, r: p["w"] + 0 * b["mask"], loss)
    parts = pw.partition(model, {})
    build = lambda rates: fed_avg(
        model, parts, update=update.by_steps(Batches(2), 1.0), optimizer=optimizers.Sgd(1.0).on_server()
    )
    simulation = Simulation(build, {}, make_store([3], mask=words), Recruiting(1), lanes=1)
    list(simulation.run(1))
    np.testing.assert_allclose(simulation.state.params["w"], 1 - words[:2].mean(0) - words[2], atol=1e-6)
