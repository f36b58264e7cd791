"""Keyed leaves that are not trained: clients are sent their rows, and nothing changes them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from partwise import optimizers
from partwise.algorithms.fed_prox import fed_prox
from partwise.algorithms.fed_select import fed_select
from partwise.algorithms.scaffold import scaffold
from partwise.client import update
from partwise.client.batches import Batches
from partwise.model.partition import keyed, partition, with_psi
from partwise.model.psi import int8
from partwise.model.spec import bag
from partwise.selection.choose import parse_choice
from partwise.selection.serving import sizes_of
from partwise.server.cohort import Recruiting
from partwise.simulation.loop import Simulation
from partwise.tasks.tags import logistic_regression
from partwise.testing import check_algorithm
from partwise.types import UserError

WORDS, TAGS, RATES = 12, 3, {"update": 0.5, "server": 1.0}
ROLES = {"rows": {}, "whole slices": {"whole": True}, "sums": {"summed": True}}


@pytest.fixture(scope="module")
def store(make_store):
    rng = np.random.default_rng(0)
    counts = [5, 1, 7, 3]
    words = rng.integers(-1, WORDS, (sum(counts), 4)).astype(np.int32)
    return make_store(counts, words=words, tags=rng.integers(-1, TAGS, (sum(counts), 2)).astype(np.int32))


def weighed(value=1.0):
    """Logistic regression whose outputs have the mean of a constant of every word as a factor."""
    plain = logistic_regression(WORDS, TAGS)
    init = lambda rng: {**plain.init(rng), "factor": jnp.full((WORDS, 1), value)}

    def predict(params, batch, rng):
        outputs = plain.predict({**params, "factor": None}, batch, rng)
        return outputs + bag(params["factor"], batch["words"]) * value

    return plain._replace(init=init, predict=predict, train_loss=None)


def parts_of(model, trained=False, **role):
    rules = {"weights": keyed("word", **role), "factor": keyed("word", trained=trained, **role)}
    return partition(model, rules, {"word": ("words",)})


def fed(kind, role, trained=False):
    model = weighed()
    parts = parts_of(model, trained, **role)
    given = {"optimizer": optimizers.Adam(0.1).on_server()}

    def build(rates):
        if kind == "scaffold":
            return scaffold(model, parts, schedule=Batches(2), rate=rates["update"], num_clients=4, **given)
        if kind == "prox":
            return fed_prox(
                model, parts, mu=0.3, schedule=Batches(2), client_optimizer=rates["update"], **given
            )
        stepping = optax.adam(0.05) if kind == "adam" else rates["update"]
        choose = {"word": parse_choice("random:6" if kind == "random" else "own")}
        return fed_select(model, parts, choose=choose, update=update.by_steps(Batches(2), stepping), **given)

    return build


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", ["sgd", "adam", "random", "prox", "scaffold"])
def test_nothing_changes_them(store, kind, role):
    run = Simulation(fed(kind, ROLES[role]), RATES, store, Recruiting(3), lanes=2)
    list(run.run(3))
    assert np.all(np.asarray(run.state.params["factor"]) == 1)
    assert np.any(run.state.params["weights"])
    if role == "rows" and kind == "sgd":  # and they would change if they were trained
        other = Simulation(fed(kind, ROLES[role], trained=True), RATES, store, Recruiting(3), lanes=2)
        list(other.run(3))
        assert np.any(np.asarray(other.state.params["factor"]) != 1)


@pytest.mark.parametrize("role", ROLES)
def test_lanes_and_devices_equal_the_plain_loop(store, role):
    check_algorithm(fed("sgd", ROLES[role]), RATES, store, cohort=3, lanes=(1, 2))


@pytest.mark.parametrize("place", ["shards", "host"])
def test_wherever_tables_are(store, place):
    build = lambda rates: fed("sgd", {})(rates)._replace(optimizer=optimizers.Sgd(1.0).on_server())
    found, expected = (
        Simulation(build, RATES, store, Recruiting(3), lanes=2, tables=each) for each in (place, "copies")
    )
    for run in (found, expected):
        list(run.run(3))
    for path, leaf in expected.state.params.items():
        np.testing.assert_array_equal(np.asarray(found.state.params[path]), leaf)


def test_their_updates_do_not_travel_and_their_values_are_not_rounded():
    parts = parts_of(weighed())
    assert parts.trained_paths == ("bias", "weights")
    assert {line.path: line.bytes_up for line in parts.describe()}["factor"] == 0
    assert sizes_of(parts).updates == {"word": 4 * TAGS}
    assert sizes_of(parts).slices == {"word": 4 * TAGS + 4}
    assert [with_psi(parts, int8).roles[path].psi.name for path in ("weights", "factor")] == ["int8", "take"]
    assert parts.digest != parts_of(weighed(), trained=True).digest


def test_a_key_space_of_constants_alone_is_refused():
    model = weighed()
    with pytest.raises(UserError, match=r"no leaf of key space 'tag' is trained \(factor\)"):
        partition(
            model, {"weights": keyed("word"), "factor": keyed("tag", trained=False)}, {"word": ("words",)}
        )
