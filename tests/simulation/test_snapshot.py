"""A snapshot is a copy: rounds that follow leave it alone, and who goes on from it repeats them bit for bit."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.scaffold import scaffold
from partwise.client import update
from partwise.client.batches import Batches
from partwise.model.partition import keyed, partition
from partwise.server.cohort import Recruiting
from partwise.simulation.fleet.counting import Buffer
from partwise.simulation.late_loop import ScheduledSimulation
from partwise.simulation.loop import Simulation
from partwise.simulation.many_runs import Sweep
from partwise.simulation.member import Together
from partwise.simulation.plain import PlainSimulation
from partwise.tasks.matrix_factorization import matrix_factorization

CLIENTS, ITEMS = 6, 1001
RATES = {"update": 0.3, "server": 0.1}
ROUNDS = 4  # after the snapshot
BUFFERS = [Buffer(np.array([t % 6, (t + 2) % 6]), np.array([t, max(t - 2, 0)])) for t in range(2 + ROUNDS)]


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings([5] * CLIENTS, ITEMS, seed=3, distinct=4)


def setting():
    model = matrix_factorization(ITEMS, 2, num_users=CLIENTS, scale=0.5)
    return model, partition(model, {"user": keyed("user"), "item": keyed("item")})


def averaging(rates):
    optimizer = optimizers.Adagrad(rates["server"]).on_server()
    return fed_avg(*setting(), update=update.by_steps(Batches(5), rates["update"]), optimizer=optimizer)


def scaffolding(rates):
    given = {"schedule": Batches(5), "rate": rates["update"], "num_clients": CLIENTS}
    return scaffold(*setting(), optimizer=optimizers.Sgd(rates["server"]).on_server(), **given)


def compiled(build, tables):
    return lambda store: Simulation(
        build, RATES, store, Recruiting(3), seed=5, lanes=2, rounds_per_call=2, tables=tables
    )


BACKENDS = {
    **{place: compiled(averaging, place) for place in ("copies", "shards", "host")},
    **{f"{place}, clients keep": compiled(scaffolding, place) for place in ("copies", "shards", "host")},
    "late": lambda store: ScheduledSimulation(averaging, RATES, store, BUFFERS, 0.5, seed=5),
    "plain": lambda store: PlainSimulation(averaging, RATES, store, Recruiting(3), seed=5),
    "side by side": lambda store: Together(
        Sweep(averaging, [RATES], [5], store, Recruiting(3), rounds_per_call=2)
    ).members()[0],
}


def to_bytes(saved):
    return [np.array(leaf).tobytes() for leaf in jax.tree_util.tree_leaves(saved)]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_run_goes_on_from_it_as_if_never_interrupted(name, store):
    run = BACKENDS[name](store)
    list(run.run(2))
    saved, capacity, before = run.snapshot(), dict(run.capacity), to_bytes(run.current())
    list(run.run(ROUNDS))
    after = to_bytes(run.current())
    assert after != before
    assert to_bytes(saved) == before
    for again in (run, BACKENDS[name](store), run):  # as often as one likes, also in another simulation
        again.resume(saved, 2, capacity)
        assert to_bytes(again.current()) == before
        list(again.run(ROUNDS))
        assert to_bytes(again.current()) == after
        assert to_bytes(saved) == before
