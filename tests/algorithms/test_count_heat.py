"""Heat counted by clients: without noise it is the count of the data, with noise it is bounded and unbiased."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise.algorithms.count_heat import _counted, count_keys, count_setting, counted_in, sums
from partwise.algorithms.registry import prepare
from partwise.client.batches import Examples
from partwise.client.state import Client
from partwise.config.protection import protection
from partwise.config.secure_sums import SUMS
from partwise.data.heat_gaussian import scaled_heats
from partwise.model.partition import keyed, partition
from partwise.model.spec import Model
from partwise.runs.backends import make_simulation
from partwise.runs.resolve import resolve
from partwise.selection.key_heat import count_heats
from partwise.selection.slices import Keys
from partwise.server.cohort import Recruiting
from partwise.server.private_sum import Door, private
from partwise.server.total import zero_total
from partwise.simulation.loop import Simulation
from partwise.simulation.plain import PlainSimulation
from partwise.tasks import next_word
from partwise.tasks.base import Setting
from partwise.testing import check_algorithm
from partwise.types import UserError

PLANTED = {"data.num_clients": 40, "data.num_items": 20, "data.mean_examples": 12, "data.dim": 2}
TAGS = {"data.num_clients": 30, "data.num_words": 60, "data.num_tags": 5, "data.words_per_example": 5}
WORDS = {
    "data.num_clients": 20,
    "data.num_words": 30,
    "data.units": 4,
    "data.embedding": 4,
    "data.words": "keyed",
}
SMALL = {"planted": PLANTED, "tags-planted": TAGS, "next-word-planted": WORDS}
COUNT = {"algorithm": "count_heat", "simulation.lanes": 4}
ITEMS, WORD_KEYS, BLOCK = 6, 4, 3


@pytest.fixture(scope="module")
def spaces():
    """A setting with two key spaces, one of them in two columns, with three ids to a key."""
    model = Model(
        lambda rng: {"table": jnp.zeros((ITEMS, 2)), "words": jnp.zeros(WORD_KEYS * BLOCK)},
        lambda params, batch, rng: jnp.zeros(len(batch["item"])),
        lambda outputs, batch: outputs,
    )
    rules = {"table": keyed("item"), "words": keyed("word", block=BLOCK)}
    parts = partition(model, rules, columns={"item": ("item",), "word": ("word", "title")})
    return Setting(model, parts, ("item", "word", "title"))


@pytest.fixture(scope="module")
def people(make_store):
    """Clients of 1 to 9 examples; words may be missing, and the second client has none at all."""
    rng, counts = np.random.default_rng(0), [3, 2, 9, 1, 5, 4, 7]
    total = sum(counts)
    words = rng.integers(-1, WORD_KEYS * BLOCK, (total, 4)).astype(np.int32)
    title = rng.integers(-1, WORD_KEYS * BLOCK, (total, 1)).astype(np.int32)
    words[3:5], title[3:5] = -1, -1
    return make_store(counts, item=rng.integers(0, ITEMS, total).astype(np.int32), word=words, title=title)


def counted_by(task, config):
    """What the clients of a task have counted, in a simulation."""
    simulation = make_simulation(prepare(task, config), config)
    list(simulation.run(config.rounds))
    return counted_in(simulation.state.params, count_setting(task.personal).partition, task.train.num_clients)


def check_same(found, expected):
    assert set(found) == set(expected)
    for space, heat in expected.items():
        np.testing.assert_array_equal(found[space].counts, heat.counts)
        assert (found[space].total, found[space].by) == (heat.total, "clients")


@pytest.mark.parametrize(
    ("task", "sums"),
    [
        *(("planted", sums) for sums in SUMS),
        *((task, "plain") for task in ("tags-planted", "next-word-planted", "movielens-liked")),
        ("tags-planted", "two_servers"),
    ],
)
def test_without_noise_it_is_the_count_of_the_data(task, sums, liked_folder):
    """A secure sum has the same numbers."""
    data = str(liked_folder) if task == "movielens-liked" else None
    changes = SMALL.get(task, {}) | COUNT | {"privacy.sums": sums}
    task, config = resolve(task, data, changes)
    assert config.rounds == 1
    assert (config.privacy.clip is None) == (sums == "plain")
    found = scaled_heats(counted_by(task, config), 0.0)
    check_same(found, count_heats(task.train, task.personal.partition))


def test_a_key_space_that_examples_do_not_name_is_left_out():
    setting, _ = next_word.settings(num_ids=12, num_words=10, width=8, heads=2, units=6, length=4)
    assert set(setting.partition.spaces) == {"word", "unit"}
    assert count_setting(setting).partition.all_keys == {"word": 12}


@pytest.mark.parametrize("backend", [Simulation, PlainSimulation])
def test_several_spaces_blocks_and_clients_without_keys(spaces, people, backend):
    counted = count_setting(spaces)
    simulation = backend(
        lambda rates: count_keys(counted, sums()), {}, people, Recruiting(people.num_clients), seed=3
    )
    (records,) = simulation.run(1)
    assert records[0].clients == people.num_clients
    found = counted_in(simulation.state.params, counted.partition, people.num_clients)
    assert found.clients == people.num_clients  # the one without words too
    check_same(scaled_heats(found, 0.0), count_heats(people, spaces.partition))


@pytest.mark.parametrize("most", [None, 3])
def test_lanes_equal_the_plain_loop(spaces, people, most):
    counted = count_setting(spaces)
    check_algorithm(
        lambda rates: count_keys(counted, sums(), most), {}, people, cohort=5, rounds=1, lanes=(2,), tol=1e-6
    )


def holder(counts, capacities, rng):
    """A client that has so many keys of each space, with room for more."""
    keys = {
        space: Keys(None, jnp.asarray(0), jnp.asarray(count), capacities[space])
        for space, count in counts.items()
    }
    examples = Examples({}, {}, keys, jnp.asarray(0), jnp.asarray(1), jnp.asarray(1), 1)
    return Client(None, None, None, examples, rng)


@pytest.mark.parametrize("most", [4, 12])
def test_a_client_counts_for_so_many_keys_and_each_with_the_same_chance(most):
    """Over 2,000 draws; room for more keys changes none of them."""
    counts, held = {"item": 9, "word": 3}, 12
    rngs = jax.random.split(jax.random.key(0), 2000)
    room = lambda more: {space: count + more for space, count in counts.items()}
    draw = lambda rng, more: _counted(holder(counts, room(more), rng), most)
    drawn = {more: jax.jit(jax.vmap(partial(draw, more=more)))(rngs) for more in (0, 5)}
    for space, count in counts.items():
        np.testing.assert_array_equal(drawn[5][0][space][:, :count], drawn[0][0][space])
        assert not drawn[5][0][space][:, count:].any()
    marks = np.concatenate([np.asarray(each) for each in drawn[0][0].values()], axis=1)
    assert (marks.sum(1) == min(most, held)).all()
    share = min(1.0, most / held)
    np.testing.assert_allclose(drawn[0][1], share)
    spread = math.sqrt(share * (1 - share) / len(rngs))
    np.testing.assert_allclose(marks.mean(0), share, atol=4.5 * spread)
    norms = np.sqrt(marks.sum(1) + np.asarray(drawn[0][1]) ** 2)
    assert norms.max() <= math.sqrt(most + 1)


def test_the_noise_is_unbiased_and_of_the_stated_size(spaces):
    """Over 1,000 sums: every count has the same noise, those of keys that nobody holds too."""
    counted, door = count_setting(spaces), Door(math.sqrt(11), 0.8, 7)
    params = {path: jnp.zeros(leaf.shape) for path, leaf in counted.partition.server_shapes.items()}
    aggregator = private(sums(), door)
    total = zero_total(aggregator, counted.partition, params)
    noisy = jax.vmap(lambda rng: aggregator.reveal(total, {}, rng)[0].update)
    found = noisy(jax.random.split(jax.random.key(1), 1000))
    for leaf in found.values():
        assert abs(leaf.mean()) < 4.5 * door.deviation / math.sqrt(leaf.size)
        assert leaf.std() == pytest.approx(door.deviation, rel=0.12)


def test_noise_follows_from_the_budget():
    """The number of keys that a client adds decides the clip; one round over all clients costs all of epsilon."""
    task, config = resolve(
        "planted", None, {**PLANTED, **COUNT, "privacy.epsilon": 2.0, "privacy.heat_keys": 5}
    )
    promised = protection(config, task.train.num_clients)
    assert config.privacy.clip == pytest.approx(math.sqrt(6))
    assert 1.9 < promised.ledger.epsilon(1) <= 2.0
    assert promised.rounds.relation == "one client added or removed"
    counted, num_keys = counted_by(task, config), task.personal.partition.num_keys("item")
    assert len(np.unique(counted.counts["item"])) == num_keys  # no two are the same: all have noise
    heat = scaled_heats(counted, promised.door.deviation)["item"]
    assert heat.counts.min() >= math.floor(2 * promised.door.deviation)
    assert heat.counts.max() <= heat.total == task.train.num_clients


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rounds": 3}, "rounds = 3 would have no effect: with count_heat everybody is counted, once"),
        ({"cohort.size": 3}, "everybody is counted"),
        ({"server.rate": 0.5}, "nothing is trained"),
        ({"privacy.clip": 1.0}, "privacy.heat_keys says what a client can add"),
        ({"privacy.heat": "gaussian"}, "privacy.epsilon is what the count costs"),
        ({"privacy.heat_keys": 3}, "without noise, all keys are counted"),
        ({"privacy.heat_epsilon": 3.0}, "privacy.epsilon is what the count costs"),
        ({"privacy.noise_cohort": 1000, "privacy.epsilon": 1.0}, "everybody is counted"),
        ({"serving.way": "pregenerated"}, "clients fetch nothing that depends on them"),
        ({"select.item": "top:3"}, "chooses keys"),
    ],
)
def test_what_a_count_does_not_read_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        resolve("planted", None, {**PLANTED, **COUNT, **changes})


def test_a_task_without_keys_has_nothing_to_count(spaces):
    parts = partition(spaces.model, {})
    with pytest.raises(UserError, match="this task has none: use one with keyed leaves"):
        count_setting(spaces._replace(partition=parts))


def test_settling_twice_changes_nothing():
    """A recorded run is settled again whenever it is read."""
    task, config = resolve("planted", None, {**PLANTED, **COUNT, "privacy.epsilon": 1.0})
    _, again = resolve(task, None, {}, recorded=config.flat())
    assert again == config
    assert config.cohort.size == task.train.num_clients
    _, more = resolve(task, None, {**COUNT, "deploy.population": 500})
    assert more.cohort.size == 500
