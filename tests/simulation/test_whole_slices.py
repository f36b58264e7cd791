"""Clients that ask for all keys work on whole slices, however many keys there are, and end as with their own."""

from __future__ import annotations

import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.fed_prox import fed_prox
from partwise.client.batches import Batches
from partwise.client.update import by_steps
from partwise.model.partition import keyed, partition
from partwise.parts.declare import find
from partwise.selection.choose import parse_choice
from partwise.server.cohort import Recruiting
from partwise.simulation.fleet.counting import Buffer
from partwise.simulation.late_loop import ScheduledSimulation
from partwise.simulation.loop import Simulation
from partwise.simulation.plain import PlainSimulation
from partwise.tasks.matrix_factorization import matrix_factorization

RATES = {"update": 0.05, "server": 0.5}
CLIENTS, ITEMS = 6, 70  # more than a block of keys, and no whole number of blocks
BUFFERS = [Buffer(np.array([t, t + 2]), np.array([t, max(t - 1, 0)])) for t in range(3)]


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings([4, 9, 2, 6, 7, 5], ITEMS, seed=3)


def steps(optimizer):
    return lambda rates: by_steps(
        Batches(3), find(optimizers.Optimizer, optimizer)(rates["update"]).on_server().transform
    )


UPDATES = {
    "adam": steps("adam"),
    "adagrad": steps("adagrad"),
    "yogi": steps("yogi"),
    "prox": None,
}


def build_for(name, keys):
    model = matrix_factorization(ITEMS, 2, num_users=CLIENTS, scale=0.5)
    rules = {"user": keyed("user"), "item": keyed("item")}
    choose = {"item": parse_choice(keys)}

    def build(rates):
        given = {"optimizer": optimizers.Sgd(rates["server"]).on_server(), "choose": choose}
        if name == "prox":
            return fed_prox(
                model,
                partition(model, rules),
                mu=0.1,
                schedule=Batches(3),
                client_optimizer=rates["update"],
                **given,
            )
        return fed_avg(model, partition(model, rules), update=UPDATES[name](rates), **given)

    return build


RUNS = {
    "compiled": lambda build, store: Simulation(build, RATES, store, Recruiting(4), seed=1, lanes=2),
    "plain": lambda build, store: PlainSimulation(build, RATES, store, Recruiting(4), seed=1),
    "late": lambda build, store: ScheduledSimulation(build, RATES, store, BUFFERS, 0.5, seed=1),
}


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("backend", ["compiled", "late"])
def test_all_keys_end_where_own_keys_do(store, name, backend):
    found = []
    for keys in ("own", "all"):
        simulation = RUNS[backend](build_for(name, keys), store)
        list(simulation.run(3))
        found.append({path: np.asarray(leaf) for path, leaf in simulation.state.params.items()})
    for path, leaf in found[0].items():
        np.testing.assert_allclose(found[1][path], leaf, rtol=1e-4, atol=1e-5)


def test_compiled_and_plain_agree(store):
    found = []
    for backend in ("compiled", "plain"):
        simulation = RUNS[backend](build_for("adam", "all"), store)
        list(simulation.run(2))
        found.append(np.asarray(simulation.state.params["item"]))
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)
