"""Heat counted over a network: the counts are those of the data, and a server without data trains with them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba", reason="the extra `privacy` is not installed")

from partwise.algorithms.count_heat import count_setting, counted_in
from partwise.algorithms.registry import prepare
from partwise.cli import main
from partwise.config.parts import HEATS
from partwise.data.heat import coefficients
from partwise.data.heat_gaussian import scaled_heats
from partwise.deployment.agent import Agent
from partwise.deployment.federation import found_run, only_known, open_run
from partwise.deployment.helper import TOKEN_FILE, Helper
from partwise.deployment.helper_link import HttpHelper
from partwise.deployment.helper_server import helper_application
from partwise.deployment.http_link import HttpLink
from partwise.deployment.offered import algorithm_of
from partwise.runs.client_file import source_of
from partwise.runs.folder import Folder
from partwise.runs.resolve import resolve
from partwise.selection.key_heat import count_heats
from partwise.simulation.plain import PlainSimulation

TAGS = {
    "data.num_clients": 15,
    "data.num_words": 30,
    "data.num_tags": 5,
    "data.mean_examples": 6,
    "data.words_per_example": 4,
}
TRAIN = {**TAGS, "algorithm": "fed_sub_avg", "rounds": 2, "cohort.size": 4, "server.cap": 5.0}


@pytest.fixture
def federation(tmp_path, serve_app, serve, enroll, wait_until):
    """A function that founds a run, serves it, and lets two devices with all clients take part until it ends."""
    with contextlib.ExitStack() as stack:

        def run(task, config, out, store):
            helper = None
            if config.privacy.sums == "two_servers":
                desk = Helper(tmp_path / f"{out}-helper", least=2)
                stack.callback(desk.close)
                url = stack.enter_context(serve_app(helper_application(desk)))
                helper = HttpHelper(url, desk.folder / TOKEN_FILE)
            folder = found_run(task, config, tmp_path / out)
            hub, offer, files = open_run(
                folder.path, helper=helper, fresh=1e6, poll=0.02, population=store.num_clients
            )  # all are there before a round opens, as in a simulation
            stack.callback(hub.close)
            url = stack.enter_context(serve(hub, offer, files=files))
            threads = []
            for share in np.array_split(np.arange(store.num_clients), 2):
                mine = store.gather(share)
                link = HttpLink(url, enroll(hub), hold=0.2)
                agent = Agent(link, algorithm_of(offer, mine), mine, most=100)
                threads.append(threading.Thread(target=lambda agent=agent: list(agent.run()), daemon=True))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(300)
                assert not thread.is_alive()
            wait_until((folder.path / "model.safetensors").exists)  # written after devices hear of the end
            return folder, hub

        yield run


def by_name(task):
    """The task with its clients in the order in which a server has them."""
    return task._replace(train=task.train.take(np.argsort(task.train.client_ids.astype(str))))


def without_data(task):
    """The task as a server knows it that has no examples of any client."""
    return task._replace(train=only_known(source_of(task.train), task.train.num_clients, {}))


@pytest.mark.parametrize("sums", ["plain", "masked", "two_servers"])
def test_the_counts_are_those_of_the_data_and_of_a_simulation(federation, sums):
    task, config = resolve("tags-planted", None, {**TAGS, "algorithm": "count_heat", "privacy.sums": sums})
    task = by_name(task)
    prepared = prepare(task, config)
    folder, _ = federation(without_data(task), config, "counts", prepared.store)
    parts, total = count_setting(task.personal).partition, task.train.num_clients
    counted = counted_in(folder.model(), parts, total)
    assert counted.clients == total
    heat = count_heats(task.train, task.personal.partition)["word"]
    np.testing.assert_array_equal(scaled_heats(counted, 0.0)["word"].counts, heat.counts)
    plain = PlainSimulation(prepared.build, {}, prepared.store, prepared.recruiting, seed=config.seed)
    list(plain.run(1))
    for path, leaf in plain.state.params.items():
        np.testing.assert_array_equal(folder.model()[path], leaf)


def test_a_server_without_data_trains_with_what_devices_have_counted(federation, tmp_path):
    """The model is that of a simulation that counts in the data."""
    task, config = resolve(
        "tags-planted", None, {**TAGS, "algorithm": "count_heat", "privacy.sums": "masked"}
    )
    store = prepare(by_name(task), config).store
    federation(without_data(by_name(task)), config, "counts", store)
    known, config = resolve(
        without_data(by_name(task)),
        None,
        {
            **{name: value for name, value in TRAIN.items() if not name.startswith("data.")},
            "server.counts": str(tmp_path / "counts"),
            "deploy.population": store.num_clients,  # or the first round would be of whoever joins first
        },
    )
    folder, hub = federation(known, config, "run", store)
    assert str(tmp_path) not in (tmp_path / "run" / "config.toml").read_text()  # which devices are told
    heat = count_heats(task.train, task.personal.partition)["word"]
    factors = hub.coordinator.server.algorithm.aggregator.init(task.personal.partition)["factors"]["word"]
    np.testing.assert_array_equal(factors, coefficients(heat, cap=5.0))
    task, config = resolve("tags-planted", None, TRAIN)
    prepared = prepare(by_name(task), config)
    assert HEATS not in task.train.info
    plain = PlainSimulation(
        prepared.build, prepared.rates, prepared.store, prepared.recruiting, seed=config.seed
    )
    list(plain.run(config.rounds))
    for path, leaf in plain.state.params.items():
        np.testing.assert_array_equal(folder.model()[path], leaf)


@pytest.mark.slow
@pytest.mark.parametrize("sums", ["masked", "two_servers"])
def test_a_trial_counts_before_it_trains(tmp_path, sums, capsys):
    """Real processes, in one command; epsilon has both runs in it."""
    changes = {
        **TRAIN,
        "privacy.sums": sums,
        "privacy.clip": 1.0,
        "privacy.epsilon": 8.0,
        "privacy.heat": "gaussian",
        "privacy.heat_epsilon": 2.0,
        "privacy.heat_keys": 10,
        "cohort.sampling": "poisson",
        "serving.way": "broadcast",
    }
    given = [text for key, value in changes.items() for text in ("--set", f"{key}={value}")]
    out = tmp_path / "run"
    assert main(["deploy", "tags-planted", "--devices", "2", "--out", str(out), *given, "--json"]) == 0
    counting, training = Folder(Path(out) / "counts").config(), Folder(out).config()
    assert (counting.algorithm, counting.privacy.epsilon, counting.rounds) == ("count_heat", 2.0, 1)
    assert training.privacy.heat_noise == counting.privacy.noise
    assert 7.9 < Folder(out).records()[-1]["privacy"]["epsilon"] <= 8.0
    assert '"heat: counts of the holders of keys"' in capsys.readouterr().out
