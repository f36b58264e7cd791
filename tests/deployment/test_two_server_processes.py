"""Two servers and eight devices as processes of their own: the model is the simulated one whatever is killed, and
neither what travels nor any file of a server has a client's keys, its local part, or its update."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba", reason="the extra `privacy` is not installed")

from partwise.deployment.federation import open_run
from partwise.deployment.helper import TOKEN_FILE
from partwise.deployment.helper_link import HttpHelper
from partwise.device import Device
from partwise.randomness import round_rng
from partwise.server.cohort import recruit
from partwise.server.messages import send
from partwise.server.round import Server
from partwise.server.word_form import WordForm
from partwise.simulation import plain as simulation
from partwise.simulation.plain import PlainSimulation

pytestmark = pytest.mark.slow

ROUNDS, DEVICES = 8, 8
COMMON = {
    "cohort.size": 6,
    "rounds": ROUNDS,
    "server.schedule": "constant",
    "server.weighting": "uniform",
    "privacy.clip": 1.0,
    "privacy.noise": 0.0,
    "privacy.sums": "two_servers",
    "serving.way": "private",
    "data.num_clients": 40,
}
RECON = {**COMMON, "data.num_items": 40, "data.mean_examples": 12, "data.dim": 4, "privacy.keys": 10}
SUB_AVG = {
    **COMMON,
    "algorithm": "fed_sub_avg",
    "data.num_words": 60,
    "data.num_tags": 5,
    "data.mean_examples": 6,
    "data.words_per_example": 5,
    "privacy.heat": "gaussian",
    "privacy.heat_epsilon": 8.0,
    "server.cap": 5.0,
}


def start_helper(run, port=0):
    """The helper's process, and what the first server is told of it."""
    tls = ["--certificate", run.certificates.server, "--key", run.certificates.key]
    place = run.folder / "helper"
    process = run.start("helper", "--out", place, "--port", port, "--least", "2", *tls)
    while not process.told("https"):
        assert process.popen.poll() is None, process.log.read_text()
        time.sleep(0.05)
    url = process.told("https")[0]
    told = ["--helper", url, "--helper-token", str(place / TOKEN_FILE)]
    return process._replace(url=url), [*told, "--helper-authority", str(run.certificates.authority)]


def look(run, helper):
    """A hub that looks at the run."""
    link = HttpHelper(helper.url, run.folder / "helper" / TOKEN_FILE, run.certificates.authority)
    hub, *_ = open_run(run.folder / "run", helper=link)
    run.stack.callback(hub.close)
    return hub


def check_simulated(run, hub):
    algorithm, secret = hub.coordinator.server.algorithm, hub.coordinator.rules.drawing
    plain = PlainSimulation(
        lambda rates: algorithm,
        run.prepared.rates,
        run.prepared.store,
        run.prepared.recruiting,
        seed=run.config.seed,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            simulation, "recruit", lambda wanted, counts, _, number: recruit(wanted, counts, secret, number)
        )
        list(plain.run(ROUNDS))
    for path, leaf in plain.state.params.items():
        np.testing.assert_array_equal(np.asarray(hub.state(ROUNDS).params[path]), np.asarray(leaf))


@pytest.mark.parametrize(("task", "settings"), [("planted", RECON), ("tags-planted", SUB_AVG)])
def test_killed_servers_go_on_to_the_same_model(fleet, wait_until, task, settings):
    """Both servers are killed twice, at moments that nobody chose."""
    run = fleet(task, settings)
    helper, told = start_helper(run)
    server = run.serve(*told)
    port = server.url.rpartition(":")[2]
    devices = run.join(server.url, DEVICES)
    for number in (2, 5):
        wait_until(lambda text=f"version {number}:", log=server.log: text in log.read_text(), 300)
        os.kill(helper.popen.pid, signal.SIGKILL)
        helper.popen.wait()
        time.sleep(0.5)
        helper, _ = start_helper(run, helper.url.rpartition(":")[2])
        time.sleep(0.5)
        os.kill(server.popen.pid, signal.SIGKILL)
        server.popen.wait()
        server = run.serve("--port", port, *told)
    run.finish(devices, 600)
    check_simulated(run, look(run, helper))


def secrets_of(run, hub):
    """Bytes that may be nowhere: by client of the first round its keys, its local part, and its update."""
    algorithm, number = hub.coordinator.server.algorithm, 0
    device, store = Device(algorithm), run.prepared.store
    words, server = WordForm(algorithm.aggregator, algorithm.partition), Server(algorithm)
    secret, state = hub.coordinator.rules.drawing, hub.state(0)
    found = {"keys": [], "local": [], "update": []}
    for place in recruit(run.prepared.recruiting, store.counts, secret, number).clients.tolist():
        examples = store.gather([place])
        asked, rng = device.ask(examples, run.config.seed, number), round_rng(run.config.seed, number)
        message = send(algorithm.partition, state.params, asked.keys, rng, server.about(number, "x"))
        given = device._given(message, examples, asked)
        sent = device._contribute(device._before(None, given.tables), given, {}, np.int32(number)).sent
        rows = {path: device._own_rows(path, leaf, asked) for path, leaf in sent.update.items()}
        mine = words.of(sent._replace(update=rows))
        for keys in asked.keys.values():
            # Four keys in a row are in the ids of all items too.
            if len(keys) >= 4 and keys[-1] - keys[0] >= len(keys):
                found["keys"] += [keys.astype(kind).tobytes() for kind in (np.int32, np.int64)]
        found["update"] += [row.tobytes() for table in mine.tables.values() for row in table if row.any()]
        local = device.personalize(message, examples, asked)
        found["local"] += [np.asarray(leaf).tobytes() for leaf in local.values()]
    return found


def test_nothing_of_a_client_is_in_traffic_or_in_files(fleet, tap):
    run = fleet("planted", RECON)
    helper, told = start_helper(run)
    server = run.serve(*told, tls=False)  # so that the tap can read what travels
    wire = tap(server.url)
    devices = [device.popen for device in run.join(wire.url, DEVICES)]
    for device in devices:
        assert device.wait(400) == 0
    hub = look(run, helper)
    check_simulated(run, hub)
    places = [run.folder / "run", run.folder / "helper"]
    files = {
        path.name: path.read_bytes() for place in places for path in Path(place).rglob("*") if path.is_file()
    }
    travelled = b"".join(bytes(each) for each in (*wire.up, *wire.down))
    unpacked = b"".join(m.content for _, *both in wire.exchanges() for m in both)
    control, looked_for = hub.state(ROUNDS).params["item"], secrets_of(run, hub)
    assert any(np.asarray(control)[3].tobytes() in each for each in files.values())  # it finds what is there
    assert all(len(each) > 5 for each in looked_for.values())
    for what, patterns in looked_for.items():
        for place, content in {**files, "wire": travelled, "messages": unpacked}.items():
            assert not [pattern for pattern in patterns if pattern in content], (what, place)
    sizes = {len(m.content) for kind, m, _ in wire.exchanges() if kind == "reports"}
    assert max(sizes) - min(sizes) <= 1  # the version has one more digit
    patterns = sum(map(len, looked_for.values()))
    print(
        f"{len(travelled):,} bytes of traffic, {sum(map(len, files.values())):,} of files, {patterns} patterns"
    )
