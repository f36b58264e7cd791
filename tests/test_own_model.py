"""Models that users bring, from end to end: batch statistics by role, and mistakes told in one paragraph."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partwise as pw
from partwise import optimizers
from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.fed_recon import fed_recon
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.device import Device
from partwise.server.cohort import Recruiting
from partwise.server.messages import send
from partwise.simulation.loop import Simulation
from partwise.types import UserError

nnx = pytest.importorskip("flax.nnx")
COUNTS = [4, 4, 4]


@pytest.fixture
def store(make_store):
    x = np.random.default_rng(0).normal(np.repeat([0, 3, 6], 4)[:, None], 1, (12, 2)).astype(np.float32)
    return make_store(COUNTS, x=x, y=x.sum(1))


class Normalised(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.out = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(x))[:, 0]


def error(outputs, batch):
    return jnp.square(outputs - batch["y"])


def test_shared_statistics_are_the_mean_of_the_clients_running_ones(store):
    model = pw.nnx(Normalised, error, inputs="x")
    build = lambda rates: fed_avg(
        model,
        pw.partition(model, {}),
        update=update.by_steps(Batches(4), 0.1),
        optimizer=optimizers.Sgd(1.0).on_server(),
    )
    simulation = Simulation(build, {}, store, Recruiting(3), lanes=3)
    list(simulation.run(1))
    batches = store.columns["x"].reshape(3, 4, 2)  # one batch of a client
    params = simulation.state.params
    np.testing.assert_allclose(params["norm/mean"], 0.1 * batches.mean(1).mean(0), rtol=1e-4)
    np.testing.assert_allclose(params["norm/var"], 0.9 + 0.1 * batches.var(1).mean(0), rtol=1e-4)


def test_local_statistics_become_the_clients_own_and_never_leave_it(store):
    """FedBN: enough steps on its own examples, and a client normalises by its own mean."""
    model = pw.nnx(Normalised, error, inputs="x")
    roles = pw.partition(model, {"norm/*": pw.local()})
    build = lambda rates: fed_recon(
        model,
        roles,
        split=split.none(),
        reconstruct=reconstruct.by_steps(Batches(4, 60), 0.1),
        update=update.by_steps(Batches(4), 0.1),
        optimizer=optimizers.Sgd(1.0).on_server(),
    )
    simulation = Simulation(build, {}, store, Recruiting(3), lanes=3)
    list(simulation.run(1))
    assert set(simulation.state.params) == {"out/bias", "out/kernel"}
    client = store.gather([2])
    message = send(roles, simulation.state.params, {}, jax.random.key(0))
    own = Device(simulation.algorithm).personalize(message, client)
    np.testing.assert_allclose(own["norm/mean"], client.columns["x"].mean(0), rtol=0.01)
    np.testing.assert_allclose(own["norm/var"], client.columns["x"].var(0), rtol=0.02)


def train_with(loss, store):
    def predict(params, batch, rng):
        return batch["x"] @ params["w"] + params["b"]

    model = pw.Model(lambda rng: {"w": jnp.ones(2), "b": jnp.zeros(())}, predict, loss)
    setting = pw.Setting(model, pw.partition(model, {"b": pw.local()}), ("x", "y"))
    task = pw.Task("mine", store, store, store, setting)
    return pw.train(task, rounds=2, cohort__size=2, simulation__lanes=2, split__kind="none")


def test_a_loss_that_is_not_a_number_ends_the_run_with_the_reason(store):
    with pytest.raises(UserError, match=r"no client counted in 2 rounds.*4 updates that were not finite"):
        train_with(lambda outputs, batch: outputs * jnp.nan, store)


def test_a_loss_of_another_shape_ends_the_run_with_the_reason(store):
    with pytest.raises(
        UserError, match=r"the loss of a batch of (\d+) examples has shape \(\); expected \(\1,\)"
    ):
        train_with(lambda outputs, batch: jnp.mean(outputs), store)
