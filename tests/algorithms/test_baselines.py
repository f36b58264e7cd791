"""FedProx and SCAFFOLD: rounds written out as their papers have them, one client and one step at a time."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.fed_prox import fed_prox
from partwise.algorithms.scaffold import historical, scaffold
from partwise.client.batches import Batches
from partwise.client.update import by_steps
from partwise.device import Device
from partwise.selection.choose import parse_choice
from partwise.server.cohort import Recruiting, recruit
from partwise.server.mean import mean, uniform
from partwise.simulation.loop import Simulation
from partwise.simulation.many_runs import Sweep
from partwise.simulation.plain import PlainSimulation
from partwise.simulation.site import Site
from partwise.testing import check_algorithm
from partwise.types import UserError

BATCH, RATE, COHORT = 2, 0.1, 3
RATES = {"update": RATE, "server": 0.7}


def gradients(theta, item, y):
    """Of the mean squared error of bias + sum of the item's row; theta: (bias, table)."""
    bias, table = theta
    error = 2 * (bias + table[item].sum(1) - y) / len(y)
    rows = np.zeros_like(table)
    np.add.at(rows, item, error[:, None])
    return np.array([error.sum(), rows], dtype=object)


def batches(store, position):
    columns = store.examples(position)
    for first in range(0, len(columns["y"]), BATCH):
        yield columns["item"][first : first + BATCH], columns["y"][first : first + BATCH]


def part(theta, held):
    """Zero outside the client's rows."""
    bias, table = theta
    mask = np.isin(np.arange(len(table)), held)[:, None]
    return np.array([bias, np.where(mask, table, 0)], dtype=object)


def cohorts(store, rounds, seed=1):
    counts = store.counts
    return [recruit(Recruiting(COHORT), counts, seed, t).clients for t in range(rounds)]


def start(store):
    return np.array([0.5, np.linspace(-1.0, 1.0, 10).reshape(5, 2)], dtype=object)


def run(build, store, rounds, **options):
    simulation = Simulation(build, RATES, store, Recruiting(COHORT), seed=1, **options)
    list(simulation.run(rounds))
    return simulation


def assert_same(params, theta):
    np.testing.assert_allclose(params["bias"], theta[0], rtol=1e-4)
    np.testing.assert_allclose(params["table"], theta[1], rtol=1e-4, atol=1e-6)


def proximal(model, parts, mu):
    return lambda rates: fed_prox(
        model,
        parts,
        mu=mu,
        schedule=Batches(BATCH, 2),
        client_optimizer=rates["update"],
        optimizer=optimizers.Sgd(rates["server"]).on_server(),
        aggregator=mean(uniform),
    )


def controlled(model, parts, num_clients=5, choose=None):
    return lambda rates: scaffold(
        model,
        parts,
        schedule=Batches(BATCH),
        rate=rates["update"],
        num_clients=num_clients,
        optimizer=optimizers.Sgd(rates["server"]).on_server(),
        choose=choose,
    )


def test_fed_prox_by_hand(sparse_model, sparse_parts, sparse_store):
    """Two epochs; rows that a batch does not name are pulled back too."""
    mu, theta = 0.8, start(sparse_store)
    for cohort in cohorts(sparse_store, 2):
        changes = []
        for position in cohort:
            y = theta.copy()
            held = np.unique(sparse_store.examples(position)["item"])
            for item, target in [*batches(sparse_store, position)] * 2:
                y = y - RATE * (gradients(y, item, target) + mu * part(y - theta, held))
            changes.append(part(y - theta, held))
        theta = theta + RATES["server"] * sum(changes) / COHORT
    assert_same(run(proximal(sparse_model, sparse_parts, mu), sparse_store, 2).state.params, theta)


def test_fed_prox_without_pull_is_fed_avg(sparse_model, sparse_parts, sparse_store):
    plain = lambda rates: fed_avg(
        sparse_model,
        sparse_parts,
        update=by_steps(Batches(BATCH, 2), rates["update"]),
        optimizer=optimizers.Sgd(rates["server"]).on_server(),
        aggregator=mean(uniform),
    )
    expected = run(plain, sparse_store, 2).state.params
    for path, leaf in run(proximal(sparse_model, sparse_parts, 0.0), sparse_store, 2).state.params.items():
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-6)


def test_scaffold_by_hand(sparse_model, sparse_parts, sparse_store):
    """Algorithm 1, option II, on each client's own rows; four rounds, in which clients come back."""
    theta, zero = start(sparse_store), 0 * start(sparse_store)
    c, own = zero, dict.fromkeys(range(5), zero)
    for cohort in cohorts(sparse_store, 4):
        changes, moves = [], []
        for position in cohort:
            held = np.unique(sparse_store.examples(position)["item"])
            y, steps = theta.copy(), 0
            for item, target in batches(sparse_store, position):
                y = y - RATE * (gradients(y, item, target) + part(c, held) - own[position])
                steps += 1
            after = own[position] - part(c, held) + part(theta - y, held) / (steps * RATE)
            changes.append(part(y - theta, held))
            moves.append(after - own[position])
            own[position] = after
        theta = theta + RATES["server"] * sum(changes) / COHORT
        c = c + sum(moves) / 5
    found = run(controlled(sparse_model, sparse_parts), sparse_store, 4)
    assert_same(found.state.params, theta)
    np.testing.assert_allclose(found.state.params["control/table"], c[1], rtol=1e-4, atol=1e-6)
    kept = found.kept.take(np.arange(5), {"control/table": 3, "control/bias": 0})
    np.testing.assert_allclose(kept["control/bias"], [own[i][0] for i in range(5)], rtol=1e-4, atol=1e-6)
    held = np.unique(sparse_store.examples(2)["item"])
    np.testing.assert_allclose(kept["control/table"][2], own[2][1][held], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("keys", ["own", "all"])
def test_scaffold_lanes_equal_the_plain_loop(sparse_model, sparse_parts, sparse_store, keys):
    """Clients come back to what they kept; also where that is of a whole table."""
    build = controlled(sparse_model, sparse_parts, choose={"item": parse_choice(keys)})
    check_algorithm(build, RATES, sparse_store, cohort=3, rounds=4, lanes=(2,))


def test_scaffold_staged_and_cut_equals_resident(sparse_model, sparse_parts, sparse_store, monkeypatch):
    build = controlled(sparse_model, sparse_parts)
    resident = run(build, sparse_store, 4)
    monkeypatch.setattr("partwise.simulation.loop.RESIDENT_BYTES", 0)
    monkeypatch.setattr(Simulation, "_whole_tables", lambda self: False)
    staged = run(build, sparse_store, 4)
    for path, leaf in resident.state.params.items():
        np.testing.assert_allclose(staged.state.params[path], leaf, rtol=1e-5, atol=1e-6)
    for path, array in resident.kept.arrays.items():
        np.testing.assert_allclose(staged.kept.arrays[path], array, rtol=1e-5, atol=1e-6)


def test_a_rehearsal_keeps_nothing(sparse_model, sparse_parts, sparse_store):
    simulation = Simulation(
        controlled(sparse_model, sparse_parts), RATES, sparse_store, Recruiting(3), seed=1
    )
    simulation.rehearse()
    assert not any(array.any() for array in simulation.kept.arrays.values())


def test_scaffold_needs_the_same_keys_in_every_round(sparse_model, sparse_parts, sparse_store):
    build = controlled(sparse_model, sparse_parts, choose={"item": parse_choice("sample:2")})
    for refuses in (
        lambda: Simulation(build, RATES, sparse_store, Recruiting(3)),
        lambda: PlainSimulation(build, RATES, sparse_store, Recruiting(3)),
        lambda: Site(build, RATES, sparse_store),
        lambda: Device(build(RATES)),
    ):
        with pytest.raises(UserError, match=r"same keys in every round: select\.item = own"):
            refuses()


def test_what_pads_a_slice_does_not_reach_the_control_variates(sparse_model, sparse_parts, sparse_store):
    """Clients have one to three keys, so most slices are padded."""
    found = []
    for fill in (0.0, -1e9):
        role = replace(sparse_parts.roles["table"], fill=fill)
        parts = replace(sparse_parts, roles={**sparse_parts.roles, "table": role})
        simulation = run(controlled(sparse_model, parts), sparse_store, 4)
        found.append((dict(simulation.state.params), simulation.kept.arrays))
    for one, other in zip(*map(jax.tree_util.tree_leaves, found), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_round_without_a_rate_changes_nothing(sparse_model, sparse_parts, sparse_store):
    """A schedule may reach 0; the rounds before and after are as if the one between had not been."""

    def build(rates):
        return scaffold(
            sparse_model,
            sparse_parts,
            schedule=Batches(BATCH),
            rate=lambda number: rates["update"] * (number != 1),
            num_clients=5,
            optimizer=optimizers.Sgd(rates["server"]).on_server(),
        )

    simulation = Simulation(build, RATES, sparse_store, Recruiting(3), seed=1, rounds_per_call=1)
    states = []
    for _ in range(3):
        list(simulation.run(1))
        states.append(jax.tree_util.tree_leaves(simulation.snapshot()))
    for before, after in zip(*states[:2], strict=True):
        np.testing.assert_array_equal(before, after)
    assert any((a != b).any() for a, b in zip(*states[1:], strict=True))
    assert all(np.isfinite(leaf).all() for leaf in states[2])
    with pytest.raises(UserError, match=r"update.rate is 0: give a rate above 0"):
        Simulation(
            controlled(sparse_model, sparse_parts), RATES | {"update": 0.0}, sparse_store, Recruiting(3)
        )


def test_a_sweep_keeps_nothing(sparse_model, sparse_parts, sparse_store):
    with pytest.raises(UserError, match="one by one"):
        Sweep(controlled(sparse_model, sparse_parts), [RATES], [0], sparse_store, Recruiting(3))


def test_historical_updates_by_hand(sparse_model, sparse_parts, sparse_store):
    """h <- (1 - K/N) h + (K/N) mean, over the sum of its weights; all rows go on moving."""
    build = lambda rates: fed_avg(
        sparse_model,
        sparse_parts,
        update=by_steps(Batches(BATCH), rates["update"]),
        optimizer=historical(optimizers.Sgd(rates["server"]).on_server(), COHORT, 5),
        aggregator=mean(uniform),
    )
    theta, h, weight = start(sparse_store), 0 * start(sparse_store), 0.0
    for cohort in cohorts(sparse_store, 3):
        changes = []
        for position in cohort:
            y = theta.copy()
            for item, target in batches(sparse_store, position):
                y = y - RATE * gradients(y, item, target)
            changes.append(y - theta)
        h, weight = 0.4 * h + 0.6 * sum(changes) / COHORT, 0.4 * weight + 0.6
        theta = theta + RATES["server"] * h / weight
    assert_same(run(build, sparse_store, 3).state.params, theta)
