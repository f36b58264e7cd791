"""Two servers of which neither sees a client's update or its keys: the model is a simulation's, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import threading

import jax
import numpy as np
import pytest

pytest.importorskip("numba", reason="the extra `privacy` is not installed")

from partwise.algorithms.registry import prepare
from partwise.checkpoint import to_bytes
from partwise.deployment import helper as helper_module
from partwise.deployment import pair as first_server
from partwise.deployment.agent import Agent
from partwise.deployment.federation import found_run, open_run
from partwise.deployment.helper import Helper, write_reports
from partwise.deployment.helper_link import HttpHelper
from partwise.deployment.helper_server import helper_application
from partwise.deployment.http_link import HttpLink
from partwise.deployment.offered import algorithm_of
from partwise.deployment.secret import secret_of
from partwise.privacy.selection_bits import POINTS, STRINGS, way_of
from partwise.privacy.sum_words import SumWords
from partwise.privacy.two_servers import for_helper, make_parts, with_noise
from partwise.runs.resolve import resolve
from partwise.server.cohort import Cohort
from partwise.server.round import Server
from partwise.simulation import plain as simulation
from partwise.simulation.plain import PlainSimulation
from partwise.types import UserError

PLANTED = {"data.num_clients": 30, "data.num_items": 20, "data.mean_examples": 12, "data.dim": 2}
SECRET = {
    **PLANTED,
    "cohort.size": 6,
    "rounds": 3,
    "server.schedule": "constant",
    "server.weighting": "uniform",
    "privacy.clip": 1.0,
    "privacy.noise": 0.0,
    "privacy.keys": 8,
    "privacy.sums": "two_servers",
    "serving.way": "private",
}


@pytest.fixture
def pair(tmp_path, serve_app, serve):
    """A function that founds a run and serves it by two servers; hub, offer, URL, helper. All have one helper."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def helped():
            helper = Helper(tmp_path / "helper", least=2)
            stack.callback(helper.close)
            return helper, stack.enter_context(serve_app(helper_application(helper)))

        def start(settings, task="planted", out="run"):
            helper, second = helped()
            found, config = resolve(task, None, settings)
            found = found._replace(train=found.train.take(np.argsort(found.train.client_ids.astype(str))))
            folder = found_run(found, config, tmp_path / out)
            link = HttpHelper(second, tmp_path / "helper" / "helper.token")
            hub, offer, _ = open_run(tmp_path / out, helper=link, fresh=1e6, poll=0.02)
            stack.callback(hub.close)
            url = stack.enter_context(serve(hub, offer))
            return prepare(found, folder.config()), folder.config(), hub, offer, url, helper

        yield start


def take_part(url, offer, hub, enroll, store, number=3):
    """Devices in threads that share the clients, until the run ends."""
    threads = []
    for share in np.array_split(np.arange(store.num_clients), number):
        link, mine = HttpLink(url, enroll(hub), hold=0.2), store.gather(share)
        agent = Agent(link, algorithm_of(offer, mine), mine, most=100)
        threads.append(threading.Thread(target=lambda agent=agent: list(agent.run()), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()


def simulated(prepared, config, hub, noise=None):
    """The plain backend, with the cohorts that the server drew in secret, and its noise."""
    places = {str(name): place for place, name in enumerate(prepared.store.client_ids.tolist())}
    cohorts = [[places[name] for name in counted(hub, number)] for number in range(config.rounds)]
    algorithm = hub.coordinator.server.algorithm  # with the heat that was counted in secret
    plain = PlainSimulation(
        lambda rates: algorithm, prepared.rates, prepared.store, prepared.recruiting, seed=config.seed
    )
    plain._server = Server(plain.algorithm, noise=noise) if noise else plain._server
    with pytest.MonkeyPatch.context() as patch:
        cohort = lambda wanted, counts, seed, number: Cohort(np.array(cohorts[number]), 0, 0, 0)
        patch.setattr(simulation, "recruit", cohort)
        list(plain.run(config.rounds))
    return plain.state.params


def counted(hub, number):
    """The clients in the sum of a round."""
    attempt = hub.records()[number]["attempt"]
    tasks = hub.clerk.do(lambda book: book.tasks("train", number, attempt))
    return [task.client for task in tasks if task.counted is not None]


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({}, STRINGS),
        ({"cohort.sampling": "apart:3"}, STRINGS),
        pytest.param({"data.num_items": 6500, "privacy.keys": 4}, POINTS, marks=pytest.mark.slow),
    ],
)
def test_the_model_is_the_simulated_one_bit_for_bit(pair, enroll, changes, way):
    prepared, config, hub, offer, url, _ = pair(SECRET | changes)
    assert way_of(hub.coordinator.server.sealed.agreement.layout("item")) is way
    take_part(url, offer, hub, enroll, prepared.store)
    assert hub.round().phase == "ended"
    if "cohort.sampling" in changes:
        assert len(set(counted(hub, 0) + counted(hub, 1) + counted(hub, 2))) == 18
    for path, leaf in simulated(prepared, config, hub).items():
        np.testing.assert_array_equal(np.asarray(hub.state(config.rounds).params[path]), np.asarray(leaf))


def test_a_run_that_is_begun_again_has_sums_of_its_own(pair, enroll):
    """The helper answers once for every version of a run, and this is another one."""
    for out in ("run", "again"):
        prepared, config, hub, offer, url, _ = pair(SECRET, out=out)
        take_part(url, offer, hub, enroll, prepared.store)
        for path, leaf in simulated(prepared, config, hub).items():
            np.testing.assert_array_equal(np.asarray(hub.state(config.rounds).params[path]), np.asarray(leaf))


HEATED = {
    **{name: each for name, each in SECRET.items() if not name.startswith(("data.", "privacy.keys"))},
    "algorithm": "fed_sub_avg",
    "data.num_clients": 30,
    "data.num_words": 60,
    "data.num_tags": 5,
    "data.mean_examples": 6,
    "data.words_per_example": 5,
    "privacy.heat": "gaussian",
    "privacy.heat_epsilon": 8.0,
    "server.cap": 5.0,
}


def test_submodels_are_averaged_with_heat_that_was_counted_in_secret(pair, enroll):
    prepared, config, hub, offer, url, _ = pair(HEATED, "tags-planted")
    factors = hub.state(0).aggregator["factors"]
    assert all(1 <= float(each.min()) <= float(each.max()) <= 5 for each in factors.values())
    take_part(url, offer, hub, enroll, prepared.store)
    for path, leaf in simulated(prepared, config, hub).items():
        np.testing.assert_array_equal(np.asarray(hub.state(config.rounds).params[path]), np.asarray(leaf))


def test_with_noise_it_is_the_simulated_one_with_the_same_noise(pair, enroll, monkeypatch):
    drawn = []

    def remembered(agreement, share):
        quiet = with_noise(agreement, share)
        drawn.append(
            (
                agreement.run,
                quiet.dense - share.dense,
                {s: quiet.tables[s] - share.tables[s] for s in share.tables},
            )
        )
        return quiet

    monkeypatch.setattr(first_server, "with_noise", remembered)
    monkeypatch.setattr(helper_module, "with_noise", remembered)
    prepared, config, hub, offer, url, _ = pair(SECRET | {"privacy.noise": 0.5})
    take_part(url, offer, hub, enroll, prepared.store)
    rounds = [drawn[2 * number : 2 * number + 2] for number in range(config.rounds)]
    assert len(drawn) == 2 * config.rounds
    words = hub.pair._words

    def noise(total, carried):
        (_, dense, tables), (_, more, others) = rounds.pop(0)
        added_noise = words.total(
            SumWords(dense + more, {space: rows + others[space] for space, rows in tables.items()})
        )
        added_up = jax.tree_util.tree_map(
            lambda a, b: a + b, total, added_noise._replace(weight=total.weight * 0)
        )
        return added_up, carried

    found = simulated(prepared, config, hub, noise)
    for path, leaf in found.items():
        np.testing.assert_array_equal(np.asarray(hub.state(config.rounds).params[path]), np.asarray(leaf))
    deviations = [
        np.concatenate([d[1][:-2], *(t.reshape(-1) for t in d[2].values())]).view(np.int32).std()
        for d in drawn
    ]
    np.testing.assert_allclose(deviations, hub.pair.agreement.noise, rtol=0.5)


def test_cohorts_of_random_size_that_are_too_small_are_drawn_again(pair, enroll):
    more = {"cohort.sampling": "poisson", "cohort.size": 3, "rounds": 5, "privacy.noise": 0.7}
    prepared, config, hub, offer, url, _ = pair(SECRET | more)
    assert hub.pair.agreement.least == hub.coordinator.rules.least == 2
    take_part(url, offer, hub, enroll, prepared.store)
    records = hub.records()
    assert len(records) == config.rounds
    for record in records:
        assert [record[name] for name in ("reports", "missing", "broken", "bytes_up")] == [None] * 4
        assert 0 < record["privacy"]["epsilon"] < 100
    epsilons = [record["privacy"]["epsilon"] for record in records]
    assert epsilons == sorted(epsilons)


def test_the_helper_answers_a_sum_once(pair):
    _, _, hub, _, _, helper = pair(SECRET)
    body = lambda tasks: write_reports(hub.pair.agreement, [for_helper(each) for each in tasks])
    words = hub.pair._words
    rows = {space: np.zeros((0, number), np.uint32) for space, number in words.num_words.items()}
    mine = SumWords(np.arange(words.num_dense, dtype=np.uint32), rows)
    keys = {space: np.zeros(0, int) for space in rows}
    agreement = hub.pair.agreement
    reports = [make_parts(agreement, helper.public, 0, f"task-{place}", mine, keys) for place in range(7)]
    run = agreement.run
    with pytest.raises(UserError, match="too few: sums here are of 6"):
        helper.share(run, 0, body(reports[:5]))
    answer = helper.share(run, 0, body(reports[:6]))
    assert helper.share(run, 0, body(reports[:6])) == answer
    with pytest.raises(UserError, match="asked for before, of other reports"):
        helper.share(run, 0, body(reports))
    helper.close()
    again = Helper(helper.folder, least=2)  # it was killed
    assert (again.public, again.token) == (helper.public, helper.token)
    assert again.share(run, 0, body(reports[:6])) == answer
    with pytest.raises(UserError, match="asked for before, of other reports"):
        again.share(run, 0, body(reports))
    with pytest.raises(UserError, match="other values before"):
        again.agree(agreement._replace(noise=1.0).to_json().encode())
    with pytest.raises(UserError, match="sums of 2 reports or more"):
        again.agree(agreement._replace(run="other", least=1).to_json().encode())
    with pytest.raises(UserError, match="knows no run 'nobody'"):
        again.share("nobody", 0, b"")


def test_a_version_has_the_rows_that_the_helper_was_given_first(pair):
    """Answers to one question of two tables would differ by the rows that a client asked for."""
    _, _, hub, _, _, helper = pair(SECRET)
    run, form = hub.pair.agreement.run, hub.pair.agreement.tables["item"]
    rows = np.zeros((form.num_keys, form.row_bytes), np.uint8)
    helper.put_rows(run, 7, to_bytes({"item": rows}))
    helper.put_rows(run, 7, to_bytes({"item": rows}))
    changed = rows.copy()
    changed[3, 1] = 1
    with pytest.raises(UserError, match="had other rows before: the same question"):
        helper.put_rows(run, 7, to_bytes({"item": changed}))
    helper.put_rows(run, 8, to_bytes({"item": changed}))
    helper.close()
    again = Helper(helper.folder)  # it was killed
    with pytest.raises(UserError, match="had other rows before"):
        again.put_rows(run, 7, to_bytes({"item": changed}))
    again.put_rows(run, 7, to_bytes({"item": rows}))
    again.close()


def test_the_helper_gets_the_rows_of_versions_that_stay(pair, enroll, monkeypatch):
    """A version that is not in the book can still become another one, with other noise."""
    prepared, config, hub, offer, url, _ = pair(SECRET | {"privacy.noise": 0.5})
    publish, seen = hub.pair.publish, []

    def watched(number, params):
        seen.append(number)
        for path, leaf in hub.state(number).params.items():  # it is in the book
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(params[path]))
        publish(number, params)

    monkeypatch.setattr(hub.pair, "publish", watched)
    take_part(url, offer, hub, enroll, prepared.store)
    assert seen == [*range(1, config.rounds + 1)]


def test_nobody_without_the_token_is_answered(pair, tmp_path):
    _, _, hub, *_ = pair(SECRET)
    (tmp_path / "token").write_text("guess")
    with pytest.raises(UserError, match="answers the server that has its token"):
        HttpHelper(hub.pair._helper.url, tmp_path / "token").agree(hub.pair.agreement)


def test_a_device_trusts_the_key_that_it_was_told(pair):
    prepared, _, _, offer, *_ = pair(SECRET)
    algorithm = algorithm_of(offer, prepared.store.gather([0]))
    assert secret_of(offer, algorithm, offer.helper.upper()).privately
    with pytest.raises(UserError, match="do not take part"):
        secret_of(offer, algorithm, "00" * 32)
    with pytest.raises(UserError, match="this run has no helper"):
        secret_of(offer._replace(settings={**offer.settings, "privacy.sums": "plain"}), algorithm, "00" * 32)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"privacy.clip": None, "privacy.noise": None}, "give privacy.clip"),
        ({"privacy.sums": "plain"}, "private needs two servers"),
        ({"privacy.sums": "three"}, "did you mean|privacy.sums"),
        ({"deploy.reports": "sum"}, "deploy.reports=clients"),
        ({"deploy.held_out": 0.1}, "deploy.held_out must be 0"),
        ({"privacy.noise_cohort": 20}, "nobody would be protected"),
        ({"server.weighting": "examples"}, "server.weighting=uniform"),
    ],
)
def test_what_two_servers_cannot_keep_is_refused(tmp_path, changes, told):
    task, config = resolve(
        "planted", None, {name: each for name, each in (SECRET | changes).items() if each is not None}
    )
    with pytest.raises(UserError, match=told):
        found_run(task, config, tmp_path / "run")


def test_a_server_without_its_helper_does_not_begin(tmp_path):
    task, config = resolve("planted", None, SECRET)
    found_run(task, config, tmp_path / "run")
    with pytest.raises(UserError, match="--helper URL"):
        open_run(tmp_path / "run")
