"""Heat is counted over the clients that can take part with a weight, however they are left out and weighed.

Every example names key 0, and every client moves this row by 1. Other keys are held by some. With a cohort of all
clients, the mean corrected by heat must be the mean over the holders, which is found in another way.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from partwise.algorithms.count_heat import NAME, count_setting, counted_in, counting
from partwise.algorithms.registry import configuration, prepare, training_split
from partwise.config.guarded_heat import guarded_heats
from partwise.config.parts import HEATS, counted_heats, round_weights
from partwise.config.protection import protection
from partwise.data.heat import coefficients
from partwise.data.heat_gaussian import scaled_heats
from partwise.deployment.promise import known_heats
from partwise.model.partition import keyed, partition
from partwise.model.spec import Model, lookup, one_per_example
from partwise.runs.backends import make_simulation
from partwise.selection.key_heat import count_heats
from partwise.tasks.base import Setting, Task

COUNTS = [0, 1, 2, 3, 4, 5, 7, 9, 12, 0, 6, 20]
KEYS = 8
BASE = {
    "rounds": 1,
    "cohort.size": len(COUNTS),
    "simulation.lanes": 4,
    "server.optimizer": "sgd",
    "server.rate": 1.0,
    "update.optimizer": "sgd",
    "update.rate": 1.0,
    "update.epochs": 1,
    "update.max_steps": 1,
    "update.batch_size": 64,
}
SPLITS = {
    "all examples": {"algorithm": "fed_avg"},
    "alternate": {"algorithm": "fed_recon", "split.kind": "alternate", "split.batch_size": 5},
    "halves": {"algorithm": "fed_recon", "split.kind": "halves", "split.percent": 80},
    "last": {"algorithm": "fed_recon", "split.kind": "last", "split.count": 2},
    "random": {"algorithm": "fed_recon", "split.kind": "random", "split.batch_size": 2},
}


def make_task(make_store, weight=one_per_example):
    """Every example names key 0 and another one; the loss is less the larger these rows are."""
    rng, total = np.random.default_rng(0), sum(COUNTS)
    items = np.stack([np.zeros(total), rng.integers(1, KEYS, total)], axis=1).astype(np.int32)
    store = make_store(COUNTS, items=items, words=rng.integers(0, 4, total).astype(np.float32))
    model = Model(
        lambda rng: {"table": jnp.zeros(KEYS)},
        lambda params, batch, rng: -lookup(params["table"], batch["items"]).sum(axis=1),
        lambda outputs, batch: outputs * weight(batch),
        weight=weight,
    )
    setting = Setting(
        model, partition(model, {"table": keyed("item")}, {"item": ("items",)}), ("items", "words")
    )
    return Task("planted", store, store, store, setting, setting)


def words(batch):
    """Some examples weigh nothing, so a client may have a query set and no weight."""
    return batch["words"]


def thirds(batch):
    """Weights that are no whole numbers."""
    return batch["words"] / 3


def real_words(batch):
    """Weights that read which examples of a batch are real."""
    return jnp.where(batch["mask"], batch["words"], 7)


def moved(task, changes):
    config = configuration("planted", BASE | changes)
    simulation = make_simulation(prepare(task, config), config)
    (records,) = simulation.run(1)
    return np.asarray(simulation.state.params["table"]), records[0]


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize(
    ("kind", "fewest", "weight"),
    [
        ("all examples", 0, words),
        ("all examples", 4, one_per_example),
        ("all examples", 4, real_words),
        ("alternate", 0, one_per_example),
        ("alternate", 8, thirds),
        ("halves", 2, words),
        ("last", 0, thirds),
        ("random", 4, one_per_example),
    ],
)
def test_a_row_that_everyone_moves_by_one_moves_by_one(kind, fewest, weighting, weight, make_store):
    task = make_task(make_store, weight)
    changes = SPLITS[kind] | {"cohort.min_examples": fewest, "server.weighting": weighting}
    table, record = moved(task, changes | {"server.mean": "heat"})
    assert table[0] == pytest.approx(1, rel=1e-5)
    np.testing.assert_allclose(table, moved(task, changes | {"server.mean": "holders"})[0], rtol=1e-5)
    config = configuration("planted", BASE | changes)
    weights = round_weights(task.personal.model, config, task.train, training_split(config))
    assert record.clients == np.sum(weights > 0)


def check_factors(heats, expected):
    for space, heat in expected.items():
        np.testing.assert_allclose(coefficients(heats[space]), coefficients(heat), rtol=1e-3)


@pytest.mark.parametrize("kind", ["all examples", "alternate"])
def test_all_ways_of_counting_agree(kind, make_store):
    """In a simulation, by a server that is deployed, by the clients themselves, and with next to no noise."""
    task = make_task(make_store)
    changes = SPLITS[kind] | {"cohort.min_examples": 3, "server.weighting": "uniform", "server.mean": "heat"}
    config = configuration("planted", BASE | changes)
    divided = training_split(config)
    prepared = prepare(task, config)
    expected = counted_heats(task.personal, config, task.train, divided)
    able = int(expected["item"].total)
    assert able == sum(count >= (3 if kind == "all examples" else 6) for count in COUNTS)
    check_factors(known_heats(config, prepared.build(prepared.rates), task.train), expected)

    by_clients = counting(task, config).changed(
        {f"privacy.{name}": None for name in ("epsilon", "noise", "clip")}
    )
    simulation = make_simulation(prepare(task, by_clients), by_clients)
    list(simulation.run(1))
    parts = count_setting(task.personal).partition
    counted = counted_in(simulation.state.params, parts, task.train.num_clients)
    assert by_clients.algorithm == NAME
    check_factors(scaled_heats(counted, 0.0), expected)

    weights = round_weights(task.personal.model, config, task.train, divided)
    for heat, cost in (("gaussian", {"heat_noise": 1e-3}), ("response", {"heat_epsilon": 40.0})):
        private = {"clip": 1.0, "noise": 1.0, "heat": heat, **cost}
        given = config.changed({f"privacy.{name}": value for name, value in private.items()})
        promised = protection(given, task.train.num_clients)
        assert promised is not None
        found = guarded_heats(task.personal.partition, given, task.train, weights, promised, 0)
        # The total is public, and rounds counts; `response` raises counts below its noise.
        factors = coefficients(found["item"])
        np.testing.assert_allclose(factors, coefficients(expected["item"]), rtol=0.1)
        assert factors[0] == pytest.approx(1, rel=0.1)


def test_heat_that_was_counted_before_is_used_as_it_is(make_store):
    task = make_task(make_store)
    config = configuration("planted", BASE | {"algorithm": "fed_avg", "server.mean": "heat"})
    heats = count_heats(task.train, task.personal.partition)
    known = task._replace(train=type(task.train)(**{**vars(task.train), "info": {HEATS: heats}}))
    assert counted_heats(task.personal, config, known.train) is heats
