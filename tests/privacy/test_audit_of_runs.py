"""The audit of whole runs: cohorts that are drawn, clients that train, and models that are published. A canary is
not found better than is claimed, and noise that is too small is found out."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")

from partwise import optimizers
from partwise.algorithms.fed_avg import fed_avg
from partwise.client import update
from partwise.client.batches import Batches
from partwise.model.partition import partition
from partwise.model.spec import Metric, Model
from partwise.privacy.accounting import Rounds, epsilon
from partwise.server.cohort import Recruiting, poisson
from partwise.server.mean import mean, uniform
from partwise.server.private_sum import Door, private
from partwise.simulation.loop import Simulation

CLIENTS, COHORT, DIM = 20, 6, 5
STEPS, TRIALS = 4, 4000
DELTA, SURE = 0.01, 1e-6
NOISE = 0.7


def linear() -> Model:
    """A model whose gradient is the client's example, whatever the model is: so rounds are independent."""
    values = lambda outputs, batch: -outputs
    return Model(
        init=lambda rng: {"w": jnp.zeros(DIM)},
        predict=lambda params, batch, rng: batch["x"] @ params["w"],
        loss=values,
        metrics={"gain": Metric(values)},
    )


def published(make_store, noise: float, there: bool) -> np.ndarray:
    """How far the model moved along the canary's direction in many runs of a few rounds. The canary has one
    example, far beyond the clip; if it is not there, it has none."""
    examples = np.random.default_rng(0).normal(size=(CLIENTS, DIM)).astype(np.float32)
    examples[:, 0] = 0  # the attacker knows that nobody else moves the model this way
    examples[0] = 100 * np.eye(1, DIM)
    counts = np.ones(CLIENTS, int)
    counts[0] = there
    model = linear()
    parts = partition(model, {})
    aggregator = private(mean(uniform), Door(clip=0.5, noise=noise, cohort=float(COHORT)))
    build = lambda rates: fed_avg(
        model,
        parts,
        update=update.by_steps(Batches(1), rates["update"]),
        optimizer=optimizers.Sgd(rates["server"]).on_server(),
        aggregator=aggregator,
    )
    store = make_store(counts, x=examples if there else examples[1:])
    recruiting = Recruiting(COHORT, sampling=poisson())
    rates = {"update": 1.0, "server": 1.0}
    runs = Simulation(
        build, rates, store, recruiting, seed=int(there), lanes=1, num_devices=1, rounds_per_call=STEPS
    )
    places = [float(runs.state.params["w"][0]) for _ in runs.run(STEPS * TRIALS)]
    return np.diff([0.0, *places])


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_published_models_tell_no_more_of_a_client_than_is_claimed(make_store, epsilon_bound, broken):
    claim = epsilon(Rounds(NOISE, COHORT, CLIENTS, "poisson"), STEPS, DELTA)
    noise = NOISE / 4 if broken else NOISE
    inside, outside = (published(make_store, noise, there) for there in (True, False))
    bound = epsilon_bound(inside, outside, DELTA, risk=SURE)
    if broken:
        assert bound > claim
    else:
        assert bound <= claim
        assert epsilon_bound(inside, outside, DELTA) > 0.2 * claim > 0.1
