"""Frozen leaves that clients have already: neither sent nor counted, and the model is the same as if they were."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise.algorithm import init_server
from partwise.algorithms.fed_avg import fed_avg
from partwise.client.batches import Batches
from partwise.client.update import by_steps
from partwise.deployment.files import FolderPlace
from partwise.deployment.page_reader import Reader
from partwise.deployment.pages import write_order, write_pages, write_whole
from partwise.device import Device
from partwise.model.partition import frozen, keyed, partition
from partwise.model.spec import Model
from partwise.optimizers import Sgd
from partwise.randomness import INIT_ROUND, round_rng
from partwise.selection.serving import WAYS
from partwise.server.cohort import Recruiting
from partwise.server.messages import About, open_message, read_slices, send
from partwise.server.round import Server
from partwise.simulation.loop import Simulation
from partwise.simulation.plain import PlainSimulation, plain_round
from partwise.types import UserError

ITEMS, SIZE = 5, 1000
FIXED = np.linspace(-1, 1, SIZE, dtype=np.float32)


def model(random=False, fixed=FIXED):
    def init(rng):
        made = jax.random.normal(rng, (SIZE,)) if random else jnp.asarray(fixed)
        return {"item": jnp.zeros((ITEMS, 2)), "fixed": made, "shift": jnp.zeros(3)}

    def predict(params, batch, rng):
        return params["item"][batch["item"]].sum(1) + params["shift"].sum() + params["fixed"][batch["item"]]

    return Model(init, predict, lambda outputs, batch: (outputs - batch["rating"]) ** 2)


def build_for(there, **options):
    made = model(**options)
    parts = partition(made, {"item": keyed("item"), "fixed": frozen(there=there)})
    return lambda rates: fed_avg(
        made, parts, update=by_steps(Batches(4), rates["update"]), optimizer=Sgd(rates["server"]).on_server()
    )


RATES = {"update": 0.1, "server": 1.0}


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings([4, 7, 2, 5], ITEMS, seed=2)


@pytest.mark.parametrize("backend", [Simulation, PlainSimulation])
def test_they_are_not_counted_and_change_nothing_else(backend, store):
    found = []
    for there in (False, True):
        run = backend(build_for(there), RATES, store, Recruiting(3), seed=1)
        records = [record for call in run.run(2) for record in call]
        found.append((records, {path: np.asarray(leaf) for path, leaf in run.state.params.items()}))
    for path, leaf in found[0][1].items():
        np.testing.assert_array_equal(found[1][1][path], leaf)
    for sent, had in zip(found[0][0], found[1][0], strict=True):
        assert sent.bytes_up == had.bytes_up
        for way in WAYS:
            assert sent.serving[way]["bytes_down"] - had.serving[way]["bytes_down"] == 3 * FIXED.nbytes


def test_messages_have_the_bytes_that_are_counted(store):
    algorithm = build_for(True)(RATES)
    state, rng = init_server(algorithm, round_rng(1, INIT_ROUND)), jax.random.key(0)
    device, keys = Device(algorithm), {"item": np.array([0, 3])}
    message = send(algorithm.partition, state.params, keys, rng)
    assert sum(each.nbytes for each in open_message("slices", message)[0].values()) == (2 * 2 + 3) * 4
    np.testing.assert_array_equal(read_slices(algorithm.partition, message, keys).params["fixed"], FIXED)
    done = plain_round(Server(algorithm), device, state, store, [0, 1], rng).closed
    assert done.bytes_down < FIXED.nbytes
    assert build_for(False)(RATES).partition.digest != algorithm.partition.digest


class Direct:
    """The files of a folder, without a network between."""

    def __init__(self, place):
        self.place = place

    def get_many(self, bounds):
        return {name: self.place.read(name) for name in bounds}


def test_files_of_slices_leave_them_out_too(tmp_path):
    parts = build_for(True)(RATES).partition
    server = init_server(build_for(True)(RATES), round_rng(1, INIT_ROUND)).params
    params = {path: np.asarray(leaf) for path, leaf in server.items()}
    place, belongs = FolderPlace(tmp_path / "files"), About("run", 0, model=parts.digest)
    rng = jax.random.key_data(jax.random.key(0))
    orders = {"item": write_order(place, np.arange(ITEMS), 2)}
    names = (
        write_whole(place, parts, params, rng, belongs),
        write_pages(place, parts, params, rng, belongs, orders).name,
    )
    assert max(path.stat().st_size for path in (tmp_path / "files").rglob("*.*")) < FIXED.nbytes
    for name in names:
        found = Reader(Direct(place), None, parts).slices(name, {"item": np.array([1, 4])})
        np.testing.assert_array_equal(found.params["fixed"], FIXED)
        assert set(found.params) == set(parts.server_paths)


def test_what_clients_cannot_have_is_refused(store):
    for backend in (Simulation, PlainSimulation):
        with pytest.raises(
            UserError, match=r"'fixed' is frozen.there=True., and the model draws it at random"
        ):
            backend(build_for(True, random=True), RATES, store, Recruiting(3))
    parts = build_for(True)(RATES).partition
    with pytest.raises(UserError, match="are not those that a client's model makes"):
        parts.check_there({"fixed": FIXED + 1})


def test_a_device_with_other_values_is_refused():
    """They come with the program, and a device may have an older one."""
    here, same, other = (build_for(True, fixed=fixed)(RATES) for fixed in (FIXED, FIXED.copy(), FIXED + 1))
    assert here.partition.digest == same.partition.digest
    state, keys = init_server(here, round_rng(1, INIT_ROUND)), {"item": np.array([0, 3])}
    message = send(here.partition, state.params, keys, jax.random.key(0))
    np.testing.assert_array_equal(read_slices(same.partition, message, keys).params["fixed"], FIXED)
    with pytest.raises(UserError, match="another model"):
        read_slices(other.partition, message, keys)
    sent = [build_for(False, fixed=fixed)(RATES).partition.digest for fixed in (FIXED, FIXED + 1)]
    assert sent[0] == sent[1]
