"""Many clients of a site in lanes: their sum is that of devices, whoever they are and however it is added up."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithm import init_server
from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.fed_recon import fed_recon
from partwise.algorithms.fed_select import fed_select
from partwise.algorithms.scaffold import scaffold
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.device import Device
from partwise.model.partition import keyed, local, partition, shared
from partwise.model.psi import float16, int8, take
from partwise.selection.choose import parse_choice
from partwise.selection.key_heat import count_heats
from partwise.server.encoding import fixed_point
from partwise.server.heat_mean import estimated_sub_mean, sub_mean
from partwise.server.mean import mean, uniform
from partwise.server.messages import About, read_invitation, read_slices, send
from partwise.server.report_form import ReportForm
from partwise.server.round import Accepted, Server
from partwise.server.total import add, zero_total
from partwise.simulation import loop
from partwise.simulation.plain import plain_round
from partwise.simulation.site import Site
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.types import UserError

NUM_ITEMS, DIM = 40, 3
COUNTS = [12, 0, 13, 1, 60, 16, 12, 3, 11]  # one is empty, one is large
RATES = {"recon": 0.1, "update": 0.2, "server": 0.8}
RNG = jax.random.key(4)
SEED, ROUND = 3, 2
PLACES = [4, 1, 0, 7, 3]


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings(COUNTS, NUM_ITEMS, seed=8, distinct=8)


@pytest.fixture(scope="module")
def broken(store, make_store):
    """The large client has a rating that is not a number."""
    rating = store.columns["rating"].copy()
    rating[store.starts[4] + 5] = np.nan
    return make_store(COUNTS, **{**store.columns, "rating": rating})


@pytest.fixture(scope="module")
def make(biased_model, store):
    """A name -> rates -> algorithm."""
    with_users = matrix_factorization(NUM_ITEMS, DIM, num_users=len(COUNTS), scale=0.5)
    two_spaces = partition(with_users, {"user": keyed("user"), "item": keyed("item")})
    heats = count_heats(store, two_spaces)

    def recon(psi):
        model = biased_model(NUM_ITEMS, DIM)
        rules = {"user": local("learned"), "item/*": keyed("item", psi=psi), "base": shared(twin="add")}
        parts = partition(model, rules)
        return lambda rates: fed_recon(
            model,
            parts,
            split=split.alternate(2),
            reconstruct=reconstruct.by_steps(Batches(2, 2, 7), rates["recon"]),
            update=update.by_steps(Batches(3), rates["update"]),
            optimizer=optimizers.Sgd(rates["server"]).on_server(),
        )

    def average(aggregator, algorithm=fed_avg, **options):
        return lambda rates: algorithm(
            with_users,
            two_spaces,
            update=update.by_steps(Batches(4), rates["update"]),
            optimizer=optimizers.Sgd(rates["server"]).on_server(),
            aggregator=aggregator,
            **options,
        )

    def select(item, aggregator):
        return average(
            aggregator, fed_select, choose={"item": parse_choice(item), "user": parse_choice("own")}
        )

    def control(item):
        return lambda rates: scaffold(
            with_users,
            two_spaces,
            schedule=Batches(4),
            rate=rates["update"],
            num_clients=len(COUNTS),
            optimizer=optimizers.Sgd(rates["server"]).on_server(),
            choose={"item": parse_choice(item)},
        )

    return {
        "recon": recon(take),
        "float16": recon(float16),
        "int8": recon(int8),
        "random": select("random:9", mean()),
        "sample": select("sample:4", mean()),
        "all": select("all", mean(uniform)),
        "holders": average(mean(over_holders=("item", "user"))),
        "heat": average(sub_mean(heats)),
        "seen": average(estimated_sub_mean(("item",))),
        "scaffold": control("own"),
        "scaffold of random keys": control("random:5"),
        "whole numbers": average(fixed_point(mean(over_holders=("item",)), 8)),
        "whole numbers, random": select("random:9", fixed_point(mean(), 8)),
    }


def params_of(algorithm):
    return {path: np.asarray(x) for path, x in init_server(algorithm, jax.random.key(0)).params.items()}


def given(algorithm, keys):
    """The slices of these keys, decoded."""
    return read_slices(algorithm.partition, send(algorithm.partition, params_of(algorithm), keys, RNG), keys)


def total_of(algorithm, contributions):
    total = zero_total(algorithm.aggregator, algorithm.partition, params_of(algorithm))
    for sent, keys in contributions:
        if sent.valid:
            total = add(algorithm.partition, total, sent, keys)
    return jax.tree_util.tree_map(np.asarray, total)


def by_devices(algorithm, store, places, kept=None, device=None):
    """The contributions of clients one after the other, by place, and what they keep."""
    device, form = device or Device(algorithm), ReportForm(algorithm.aggregator, algorithm.partition)
    sent, keeps = {}, {}
    for place in places:
        examples = store.gather([place])
        asked = device.ask(examples, SEED, ROUND)
        slices = given(algorithm, asked.keys)
        report, keep = device.report_and_keep(slices, examples, asked, (kept or {}).get(place))
        sent[place] = form.read(report, asked.keys)
        if keep:
            keeps[place] = keep
    return sent, keeps


def assert_same(found, expected, exactly=False):
    same = np.testing.assert_array_equal if exactly else np.testing.assert_allclose
    options = {} if exactly else {"rtol": 1e-5, "atol": 1e-5}
    assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(expected)
    jax.tree_util.tree_map(lambda a, b: same(a, b, **options), found, expected)


ALIKE = ["recon", "int8", "random", "holders", "whole numbers"]
ALIKE_TOO = ["float16", "sample", "all", "heat", "seen", "whole numbers, random"]
slow = lambda names: [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", [*ALIKE, *slow(ALIKE_TOO)])
def test_the_sum_is_that_of_devices(make, store, name):
    """With an empty client and one that is much larger, on one lane and on several, on one device and on two."""
    algorithm, exactly = make[name](RATES), "whole" in name
    alone, _ = by_devices(algorithm, store, PLACES)
    expected = total_of(algorithm, alone.values())
    for settings in ({"lanes": 3, "num_devices": 1}, {"lanes": 1}):
        site = Site(make[name], RATES, store, **settings)
        asked = site.ask(PLACES, SEED, ROUND)
        for space, keys in asked.keys.items():
            union = np.unique(np.concatenate([each[space] for _, each in alone.values()]))
            np.testing.assert_array_equal(keys, union)
        done = site.total(given(algorithm, asked.keys), asked)
        assert (done.broken, bool(done.sent.valid)) == ((), True)
        assert set(done.sent.held) == set(algorithm.aggregator.held)
        assert_same(total_of(algorithm, [(done.sent, asked.keys)]), expected, exactly)


@pytest.mark.parametrize("name", ["recon", "random", "whole numbers"])
def test_each_contribution_is_that_of_a_device(make, store, name):
    algorithm, site = make[name](RATES), Site(make[name], RATES, store, lanes=2)
    alone, _ = by_devices(algorithm, store, PLACES)
    asked = site.ask(PLACES, SEED, ROUND)
    done = site.each(given(algorithm, asked.keys), asked)
    assert set(done.sent) == set(PLACES)
    for place, (sent, keys) in alone.items():
        for space in keys:
            np.testing.assert_array_equal(done.keys[place][space], keys[space])
        assert_same(done.sent[place], sent, "whole" in name)


@pytest.mark.parametrize("name", ["random", *slow(["recon", "whole numbers"])])
def test_clients_that_are_not_resident_give_the_same(make, store, monkeypatch, name):
    algorithm, places = make[name](RATES), [7, 4, 2]
    sums = []
    for size in (loop.RESIDENT_BYTES, 0):
        monkeypatch.setattr(loop, "RESIDENT_BYTES", size)
        site = Site(make[name], RATES, store, lanes=2)
        asked = site.ask(places, SEED, ROUND)
        slices = given(algorithm, asked.keys)
        sums.append((site.total(slices, asked).sent, site.each(slices, asked).sent))
    assert_same(*sums, exactly="whole" in name)


@pytest.mark.parametrize("name", ["holders", "random"])
def test_one_client_is_a_device(make, store, name):
    """So its report has the form of a device's: without the weights of rows."""
    algorithm, site = make[name](RATES), Site(make[name], RATES, store)
    for place in (2, 1):
        sent, keys = by_devices(algorithm, store, [place])[0][place]
        asked = site.ask([place], SEED, ROUND)
        done = site.total(given(algorithm, asked.keys), asked)
        assert_same(dict(asked.keys), dict(keys), exactly=True)
        assert_same(done.sent, sent)
        assert done.sent.held == {}


@pytest.mark.parametrize("name", ["holders", "whole numbers", *slow(["recon"])])
def test_a_client_that_is_not_finite_is_left_out_and_named(make, broken, name):
    algorithm, site = make[name](RATES), Site(make[name], RATES, broken, lanes=3)
    alone, _ = by_devices(algorithm, broken, PLACES)
    assert [place for place, (sent, _) in alone.items() if not sent.valid] == [4]
    asked = site.ask(PLACES, SEED, ROUND)
    slices = given(algorithm, asked.keys)
    done = site.total(slices, asked)
    assert (done.broken, bool(done.sent.valid)) == ((4,), True)
    assert_same(
        total_of(algorithm, [(done.sent, asked.keys)]), total_of(algorithm, alone.values()), "whole" in name
    )
    assert not site.each(slices, asked).sent[4].valid
    asked = site.ask([1, 4])
    done = site.total(given(algorithm, asked.keys), asked)
    assert not done.sent.valid  # nobody is left to be summed, so only this is sent
    assert done.broken == (4,)


def test_what_clients_keep_is_what_devices_keep(make, broken):
    """SCAFFOLD over three rounds. Who is empty or broken keeps what it had; so does who is not there."""
    algorithm, site = make["scaffold"](RATES), Site(make["scaffold"], RATES, broken, lanes=2)
    device, here, there, summed = Device(algorithm), {}, {}, {}
    here[4] = there[4] = {path: np.ones_like(x) for path, x in _zeros(algorithm, device, broken, 4).items()}
    for places in ([4, 1, 0, 7, 3], [5, 4, 0, 8], [7, 0]):
        sent, keeps = by_devices(algorithm, broken, places, there, device)
        there |= keeps
        asked = site.ask(places, SEED, ROUND)
        slices = given(algorithm, asked.keys)
        done, each = site.total(slices, asked, here), site.each(slices, asked, here)
        assert_same(each.kept, done.kept)
        here, summed = here | done.kept, total_of(algorithm, [(done.sent, asked.keys)])
        assert_same(summed, total_of(algorithm, sent.values()))
        assert_same(here, there)
    assert 1 not in here
    assert all((each == 1).all() for each in here[4].values())


def _zeros(algorithm, device, store, place):
    """What a client keeps has these shapes."""
    keys = device.ask(store.gather([place])).keys
    return {path: given(algorithm, keys).params[path] for path in algorithm.keeps}


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("name", ["random", *slow(["recon", "seen"])])
def test_another_round_with_other_clients_does_not_compile(make, store, monkeypatch, name, resident):
    monkeypatch.setattr(loop, "RESIDENT_BYTES", loop.RESIDENT_BYTES if resident else 0)
    algorithm, site = make[name](RATES), Site(make[name], RATES, store, lanes=2)
    for number, places in enumerate(([4, 0, 2, 6], [5, 1, 3], [8, 2], [7])):
        asked = site.ask(places, SEED, number)
        slices = given(algorithm, asked.keys)
        site.total(slices, asked)
        site.each(slices, asked)
    assert (site._total._cache_size(), site._each._cache_size()) == (1, 1)


@pytest.mark.parametrize("name", ["holders", "whole numbers", *slow(["recon", "random", "seen", "heat"])])
def test_a_round_of_two_sites_is_a_round_of_all_their_clients(make, store, name):
    """The server's round with bytes, twice, against one report per client."""
    algorithm = make[name](RATES)
    server, device = Server(algorithm, "run"), Device(algorithm)
    form = ReportForm(algorithm.aggregator, algorithm.partition)
    site = Site(make[name], RATES, store, lanes=2)
    members = {"north": [4, 1, 0, 7], "south": [2, 8, 3]}
    summed = alone = init_server(algorithm, jax.random.key(0))
    for number in range(2):
        now = server.begin(summed, number, RNG, SEED)
        sizes = {site: len(places) for site, places in members.items()}
        for name_, data in zip(members, now.invite(members, sizes), strict=True):
            task = read_invitation(data)
            asked = site.ask(members[name_], task.seed, task.round)
            message = now.serve(task.about.task, asked.keys)
            sent = site.total(message, asked).sent
            assert now.accept(form.write(task.about, sent)) == Accepted(name_, valid=True)
        closed = now.close()
        everyone = [*members["north"], *members["south"]]
        plain = plain_round(server, device, alone, store, everyone, RNG, SEED, number).closed
        assert (int(closed.total.clients), closed.empty) == (int(plain.total.clients), plain.empty)
        assert int(closed.total.clients) + closed.empty == len(everyone)
        assert_same(closed.total, plain.total, "whole" in name)
        assert_same(closed.state, plain.state, "whole" in name)
        summed, alone = closed.state, plain.state


@pytest.mark.parametrize("places", [[], [9], [-1], [2, 2], [0.5], [[1]], 3])
def test_places_that_are_not_clients_are_refused(make, store, places):
    site = Site(make["recon"], RATES, store)
    with pytest.raises(UserError, match="positions 0 to 8"):
        site.ask(places)


def test_mistakes(make, store):
    site, algorithm = Site(make["scaffold"], RATES, store), make["scaffold"](RATES)
    asked = site.ask([0, 2])
    slices = given(algorithm, asked.keys)
    short = slices._replace(params={**slices.params, "item": slices.params["item"][1:]})
    with pytest.raises(UserError, match=r"rows of 'item', and \d+ were asked for"):
        site.total(short, asked)
    with pytest.raises(UserError, match=r"lacks|too large|must be"):
        site.total(send(algorithm.partition, params_of(algorithm), site.ask([4]).keys, RNG, About()), asked)
    with pytest.raises(UserError, match="forget what it kept"):
        site.total(slices, asked, {0: {path: np.zeros((1, DIM)) for path in algorithm.keeps}})
    with pytest.raises(UserError, match=r"select\.item = own, all or top:m"):
        Site(make["scaffold of random keys"], RATES, store)
