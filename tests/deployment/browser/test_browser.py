"""The page of examples/browser in a real Chromium: the same reports as a Python device, over the same protocol."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import uvicorn
from starlette.staticfiles import StaticFiles

from partwise.algorithm import init_server
from partwise.algorithms.registry import prepare
from partwise.checkpoint import from_bytes
from partwise.data.repeats import one_each
from partwise.data.store import ClientStore
from partwise.deployment.agent import Agent
from partwise.deployment.auth import DeviceKey, KeyRow, device_of
from partwise.deployment.federation import algorithm_of, found_run, open_run
from partwise.deployment.http_link import HttpLink
from partwise.deployment.http_server import application
from partwise.device import Device
from partwise.randomness import child, client_numbers, client_rng, hash64, words
from partwise.runs.resolve import resolve
from partwise.server.messages import About, send
from partwise.server.round import Server
from partwise.simulation.plain import PlainSimulation

PAGE = Path(__file__).parents[3] / "examples" / "browser"
SMALL = {"data.num_clients": 30, "data.num_items": 20, "data.mean_examples": 12, "data.dim": 3}
DEFAULTS = {}
MOVIELENS = {"data.biases": True, "data.normalize": True, "reconstruct.pull": 1.0, "update.rate": 0.2}
STEPS = {
    "split.kind": "alternate",
    "reconstruct.method": "steps",
    "update.epochs": 3,
    "update.max_steps": 4,
    "server.weighting": "uniform",
}
ZERO = {"data.initial": "zero", "split.kind": "halves", "split.percent": 30, "select.item": "all"}
CASES = [
    pytest.param(DEFAULTS, id="planted"),
    pytest.param(MOVIELENS, id="movielens"),
    pytest.param(STEPS, id="steps", marks=pytest.mark.slow),
    pytest.param(ZERO, id="zero", marks=pytest.mark.slow),
]


class Recording:
    """An ASGI application that keeps every request to the one inside: its path, headers and body."""

    def __init__(self, inside):
        self.inside, self.requests = inside, []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.inside(scope, receive, send)
        parts = [
            scope["path"].encode(),
            scope["query_string"],
            *(b for pair in scope["headers"] for b in pair),
        ]
        self.requests.append(parts)

        async def heard():
            message = await receive()
            parts.append(message.get("body", b""))
            return message

        return await self.inside(scope, heard, send)


@contextlib.contextmanager
def serving(app, port=0):
    """A uvicorn server in a thread; its URL."""
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def with_page(hub, offer):
    """The server's application, which also gives out the page: they have one origin."""
    app = application(hub, offer)
    app.mount("/", StaticFiles(directory=PAGE, html=True))
    return app


@pytest.fixture(scope="module")
def alone(chromium):
    """The page with no run behind it."""
    with serving(StaticFiles(directory=PAGE, html=True)) as url:
        yield chromium.open(url + "/")


def ratings_of(store, place=0):
    """A client's examples as the page keeps them."""
    columns, ids = store.examples(place), store.vocabularies["item"]
    pairs = zip(columns["item"].tolist(), columns["rating"].tolist(), strict=True)
    return [{"item": str(ids[item]), "rating": rating} for item, rating in pairs]


def one_client(task, items, seed=0):
    """A client who rated these items, in this order."""
    ratings = np.random.default_rng(seed).normal(0.5, 1.5, len(items)).astype(np.float32)
    columns = {"item": np.asarray(items, np.int32), "rating": ratings}
    begin, count = np.array([0]), np.array([len(items)])
    return ClientStore(columns, begin, count, np.array(["ann"]), task.train.vocabularies)


def offered(task, config, folder):
    """What devices are told of a run."""
    found_run(task, config, folder)
    hub, offer, _ = open_run(folder)
    hub.close()
    return offer


def started(task, config, folder):
    """A run's offer, a Python device for it, and a model that is not what it starts from."""
    prepared, offer = prepare(task, config), offered(task, config, folder)
    algorithm = prepared.build(prepared.rates)
    params = init_server(algorithm, jax.random.key(0)).params
    draw = np.random.default_rng(1)
    params = {path: draw.normal(0.3, 0.7, leaf.shape).astype(np.float32) for path, leaf in params.items()}
    return task, offer, Device(algorithm), params


@pytest.fixture(scope="module", params=CASES)
def setting(request, tmp_path_factory):
    """As `started`, with other settings."""
    task, config = resolve("planted", None, SMALL | request.param)
    return started(task, config, tmp_path_factory.mktemp("run"))


def golden(setting, store):
    """What a Python device does with these examples: the task's slices, its report and its local part."""
    _, offer, device, params = setting
    algorithm, asked = device.algorithm, device.ask(store)
    about = Server(algorithm, offer.run).about(3, "ann")
    message = send(algorithm.partition, params, asked.keys, jax.random.key(5), about)
    return (
        about,
        asked,
        message,
        device.report(message, store, asked),
        device.personalize(message, store, asked),
    )


IN_PAGE = """(async () => {
  const { choose, planOf, readSlices, rebuild, report } = await import("/learn.js");
  const { offer, about, client, message, ratings } = GIVEN;
  const bytes = Uint8Array.from(atob(message), (c) => c.charCodeAt(0));
  const plan = planOf(offer);
  const { keys, examples } = choose(plan, ratings);
  const received = readSlices(plan, about, keys.length, bytes);
  const { user, userBias } = rebuild(plan, received, examples);
  const sent = report(plan, { about, client }, received, examples);
  return { keys, sent: btoa(String.fromCharCode(...sent)), user: [...user], userBias };
})()"""


def in_page(page, offer, about, message, ratings, client="ann"):
    given = {
        "offer": offer._asdict(),
        "about": about._asdict(),
        "client": client,
        "message": base64.b64encode(message).decode(),
        "ratings": ratings,
    }
    return page.run(IN_PAGE.replace("GIVEN", json.dumps(given)))


@pytest.mark.parametrize(
    "items",
    [[], [4], [7, 2], [*range(20), *range(20)], [3, 3, 3, 1, 3], [5, 19, 0, 5, 11, 2, 2]],
    ids=["none", "one", "two", "forty", "repeated", "seven"],
)
def test_a_report_is_that_of_a_python_device(setting, alone, items):
    compare(alone, setting, one_client(setting[0], items))


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("PARTWISE_DATA"), reason="PARTWISE_DATA is not set")
def test_reports_on_real_ratings_are_those_of_a_python_device(alone, tmp_path):
    task, config = resolve("movielens", None, {"data.size": "100k"})
    setting = started(task, config, tmp_path)
    for place in range(5):
        compare(alone, setting, task.train.select(task.personal.columns).gather([place]))


def compare(page, setting, store):
    """What a page and a Python device report of the same examples."""
    about, asked, message, report, local = golden(setting, store)
    found = in_page(page, setting[1], about, message, ratings_of(store), str(store.client_ids[0]))
    assert found["keys"] == asked.keys["item"].tolist()
    (sent, said), (wanted, header) = from_bytes(base64.b64decode(found["sent"])), from_bytes(report)
    assert said == header
    assert set(sent) == set(wanted)
    for name, leaf in wanted.items():
        scale = max(1.0, float(np.abs(leaf).max(initial=0)))  # of an update times its weight
        assert sent[name].dtype == leaf.dtype
        np.testing.assert_allclose(sent[name], leaf, rtol=0, atol=1e-5 * scale, err_msg=name)
    np.testing.assert_allclose(found["user"], local["user"], rtol=1e-5, atol=1e-5)
    if "user_bias" in local:
        np.testing.assert_allclose(found["userBias"], local["user_bias"], rtol=1e-5, atol=1e-5)
    return found


NAMES = ["ann", "7", "Zo\u00eb \u2603", "x" * 128, "y" * 129, "z" * 200]
ENDS = [1, 2, 3, 7, 50, 1000, 2**16 - 1, 2**16, 2**16 + 1, 100_000, 2**31 - 1]
DRAWN_IN_PAGE = """(async () => {
  const { below, child, clientKey, hash64 } = await import("/random.js");
  const { names, rngs, ends } = GIVEN;
  const of = (rng, name) => {
    const key = child(clientKey(rng, name), "begin");
    return [String(hash64(new TextEncoder().encode(name))), key, ends.map((end) => below(key, end))];
  };
  return names.flatMap((name) => rngs.map((rng) => of(rng, name)));
})()"""


def test_random_numbers_are_those_of_python(alone):
    rngs = [[0, 5], [2**32 - 1, 123_456_789]]
    given = json.dumps({"names": NAMES, "rngs": rngs, "ends": ENDS})
    found = alone.run(DRAWN_IN_PAGE.replace("GIVEN", given))
    wanted = []
    for name in NAMES:
        for rng in rngs:
            number = words(client_numbers(np.array([name]))[0])
            key = child(client_rng(jax.random.wrap_key_data(np.array(rng, np.uint32)), number), "begin")
            drawn = [int(jax.random.randint(key, (), 0, end)) for end in ENDS]
            wanted.append([str(hash64(name)), jax.random.key_data(key).tolist(), drawn])
    assert found == wanted


@pytest.mark.parametrize("setting", [DEFAULTS], ids=["planted"], indirect=True)
def test_clients_begin_with_different_batches(setting, alone):
    """Of 40 examples in 8 batches: each client's report is the Python device's, and most differ."""
    starts = set()
    for name in ("ann", "bob", "7", "eve", "a client with a long name " * 6):
        store = dataclasses.replace(
            one_client(setting[0], [*range(20), *range(20)]), client_ids=np.array([name])
        )
        starts.add(compare(alone, setting, store)["sent"])
    assert len(starts) >= 3


CHOSEN = """(async () => {
  const { choose, planOf } = await import("/learn.js");
  const { offer, ratings } = GIVEN;
  const { keys, examples } = choose(planOf(offer), ratings);
  return examples.map(({ row, target }) => [keys[row], target]);
})()"""


@pytest.mark.parametrize("setting", [DEFAULTS], ids=["planted"], indirect=True)
@pytest.mark.parametrize(("order", "kept"), [("shuffle", "last"), ("time", "mean"), ("as is", "last")])
def test_one_rating_of_an_item_is_used(setting, alone, order, kept):
    """As a Python device makes its client's rows; in the order "as is", and where there is none, all are used."""
    task, offer, _, _ = setting
    store = one_client(task, [5, 19, 0, 5, 11, 2, 2, 5])
    offer = offer._replace(settings={**offer.settings, "data.order": order, "data.duplicates": kept})
    given = json.dumps({"offer": offer._asdict(), "ratings": ratings_of(store)})
    found = alone.run(CHOSEN.replace("GIVEN", given))
    wanted = store if order == "as is" else one_each(store, "item", "rating", kept).store
    assert [item for item, _ in found] == wanted.examples(0)["item"].tolist()
    np.testing.assert_allclose([rating for _, rating in found], wanted.examples(0)["rating"], rtol=1e-6)


ANOTHER_RUN = """(async () => {
  const { takePart } = await import("/device.js");
  const { offer } = GIVEN;
  const task = { kind: "train", client: "ann", about: { run: "b", version: 3, task: "t", model: offer.model } };
  const [offers, joined] = [[{ ...offer, run: "a" }, { ...offer, run: "b" }], []];
  const polls = [{ tasks: [task] }, { ended: true }];
  const link = {
    offer: async () => offers.shift(),
    join: async (clients) => joined.push(clients),
    poll: async () => polls.shift(),
  };
  const heard = [];
  const stop = new AbortController().signal;
  for await (const each of takePart(link, { name: "ann" }, null, stop)) heard.push(each);
  return { heard, joined, left: offers.length };
})()"""


@pytest.mark.parametrize("setting", [DEFAULTS], ids=["planted"], indirect=True)
def test_a_task_of_another_run_begins_anew(setting, alone):
    """Nothing is trained by what was told of the run before."""
    found = alone.run(ANOTHER_RUN.replace("GIVEN", json.dumps({"offer": setting[1]._asdict()})))
    assert [each["accepted"] for each in found["heard"]] == [False]
    assert "another run" in found["heard"][0]["reason"]
    assert (found["joined"], found["left"]) == ([["ann"], ["ann"]], 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"update.optimizer": "adam"}, "update.optimizer = adam, and this page knows sgd"),
        ({"select.item": "top:3"}, "select.item = top:3, and this page knows own, all"),
        ({"data.initial": "random"}, "start 'random' in this run, and this page knows learned and zero"),
        ({"data.dim": 600}, "vectors of 600 numbers are too long"),
        ({"algorithm": "fed_per"}, "algorithm = fed_per, and this page knows fed_recon"),
        ({"deploy.precision": "int8"}, "deploy.precision = int8, and this page knows float32"),
        ({"privacy.keys": 5}, "privacy.keys = 5, and this page knows 0"),
        ({"deploy.held_out": 0.1}, "deploy.held_out = 0.1, and this page knows 0"),
        (
            {"privacy.clip": 1.0, "privacy.noise": 1.0, "server.weighting": "uniform"},
            "privacy.clip = 1, and this page knows none",
        ),
    ],
)
def test_a_run_that_the_page_cannot_follow_is_refused(alone, tmp_path, changes, said):
    task, config = resolve("planted", None, SMALL | changes)
    with pytest.raises(RuntimeError, match=said):
        in_page(alone, offered(task, config, tmp_path), About(), b"", [])


def test_a_setting_that_the_page_has_never_heard_of_is_refused(alone, setting):
    offer = setting[1]
    with pytest.raises(RuntimeError, match="the server speaks protocol 2, and this page knows 1"):
        in_page(alone, offer._replace(protocol=2), About(), b"", [])
    private = offer._replace(settings={**offer.settings, "serving.way": "private"})
    with pytest.raises(RuntimeError, match=r"serving.way = private, and this page knows on_demand"):
        in_page(alone, private, About(), b"", [])
    offer = offer._replace(settings={**offer.settings, "update.momentum": 0.9})
    with pytest.raises(RuntimeError, match=r"update.momentum = 0.9, and this page knows no such setting"):
        in_page(alone, offer, About(), b"", [])


def damaged(message, about):
    """Messages of a server that lies, and what the page says of them."""
    header = message[8 : 8 + int.from_bytes(message[:8], "little")]
    swapped = lambda old, new: message.replace(old, new.ljust(len(old)))
    return {
        "short": (message[:5], "is not what this device asked for"),
        "long": (message + bytes(2 << 20), "is not what this device asked for"),
        "cut": (message[:-4], "must be F32"),
        "no JSON": (message.replace(header, b"x" * len(header)), "is no JSON with names and values"),
        "no length": (b"\xff" * 8 + message[8:], "is no JSON with names and values"),
        "null": (swapped(header, b"null"), "is no JSON with names and values"),
        "no header of ours": (swapped(b"partwise", b"somebody"), "the message's format is undefined"),
        "places before the arrays": (swapped(b'"data_offsets":[0', b'"data_offsets":[-'), "no JSON"),
        "another task": (swapped(about.task.encode(), b"0" * 32), "the message's task is 0000"),
        "another model": (swapped(about.model.encode(), b"0" * 32), "the message's model is 0000"),
        "no randomness": (swapped(b"rng", b"rgn"), "must say its rng as two numbers of 32 bits"),
        "another kind": (swapped(b"slices", b"report"), "the message's kind is report"),
        "another type": (swapped(b'"F32"', b'"F16"'), "must be F32"),
        "another shape": (swapped(b'"shape":[2,3]', b'"shape":[3,2]'), "must be F32"),
        "another array": (swapped(b'"item:rows"', b'"user:rows"'), "an array 'user:rows'"),
    }


@pytest.mark.parametrize("setting", [DEFAULTS], ids=["planted"], indirect=True)
def test_a_message_that_lies_is_refused(setting, alone):
    task, offer, _, _ = setting
    store = one_client(task, [7, 2])
    about, _, message, _, _ = golden(setting, store)
    for name, (bytes_, said) in damaged(message, about).items():
        with pytest.raises(RuntimeError) as caught:
            in_page(alone, offer, about, bytes_, ratings_of(store))
        assert said in str(caught.value), name


# A run over the network


def federation(folder, **changes):
    """A hub for a small run that begins when all its clients are there."""
    settings = SMALL | {"rounds": 12, "cohort.size": 10, "server.schedule": "constant"} | changes
    task, config = resolve("planted", None, settings)
    found_run(task, config, folder)
    hub, offer, _ = open_run(folder, fresh=1e6, poll=0.05)
    return task, config, prepare(task, config), hub, offer


def enroll(hub, page, **known):
    """The operator lets a page take part, by the key that it shows."""
    public = bytes.fromhex(page.text("public"))
    hub.keys.enroll(KeyRow(device_of(public), public, **known))


def keep(page, ratings):
    """A person writes ratings into the page."""
    page.fill("ratings", "\n".join(f"{each['item']},{each['rating']!r}" for each in ratings))
    page.click("save")
    page.wait(f"document.getElementById('kept').textContent.startsWith('{len(ratings)} ratings')")


def ends(page, words):
    """Wait until the page says this."""
    page.wait(f"document.getElementById('status').textContent.includes({json.dumps(words)})")


def fetch(page):
    """Get the newest model, for recommendations."""
    page.click("refresh")
    page.wait("document.getElementById('advice').textContent === 'The newest model is kept here.'")


KEPT = """(async () => {
  const { openStore } = await import("/device.js");
  const { weights } = await (await openStore()).get("model");
  return [...weights.user];
})()"""


def traces(values):
    """How a number could be seen in bytes: as 32 or 64 bits, in either order, or as text."""
    for value in values:
        yield from (struct.pack(form, value) for form in ("<f", ">f", "<d", ">d"))
        yield f"{value:.6f}".encode()[:-1]


@pytest.mark.slow
def test_browsers_and_agents_train_together_and_nothing_local_leaves(chromium, tmp_path):
    _, config, prepared, hub, offer = federation(tmp_path)
    store = prepared.store.gather(range(10))
    recording = Recording(with_page(hub, offer))

    def work(url, places):
        key = DeviceKey.new()
        hub.keys.enroll(KeyRow(key.device, key.public))
        mine = store.gather(places)
        list(Agent(HttpLink(url, key), algorithm_of(offer, mine), mine, most=4).run())

    with serving(recording) as url:
        pages = [chromium.open(url + "/") for _ in range(2)]
        for place, page in enumerate(pages):
            enroll(hub, page)
            keep(page, ratings_of(store, place))
            page.click("start")
        agents = [threading.Thread(target=work, args=(url, each)) for each in (range(2, 6), range(6, 10))]
        for agent in agents:
            agent.start()
        for agent in agents:
            agent.join()
        for page in pages:
            ends(page, "The run has ended after 12 rounds.")
            fetch(page)
        kept = [page.run(KEPT) for page in pages]

    joined = as_joined(store, *pages)
    simulation = PlainSimulation(
        prepared.build, prepared.rates, joined, prepared.recruiting, seed=config.seed
    )
    records = [record for call in simulation.run(12) for record in call]
    for path, leaf in simulation.state.params.items():
        np.testing.assert_allclose(np.asarray(hub.state(12).params[path]), np.asarray(leaf), atol=1e-4)
    losses = [json.loads(hub.version(number + 1).record)["loss"] for number in range(12)]
    np.testing.assert_allclose(losses, [record.loss for record in records], rtol=1e-4)
    assert losses[-1] < 0.7 * losses[0]

    hub.close()
    sent = b"\n".join(part for request in recording.requests for part in request)
    files = b"\n".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for place, each in enumerate(kept):
        mine = np.unique(store.examples(place)["item"]).astype(np.int32)
        assert mine.tobytes() in sent  # what is sent is found
        local = [*(rating["rating"] for rating in ratings_of(store, place)), *each]
        for trace in traces(local):
            assert trace not in sent
            assert trace not in files


def as_joined(store, *pages):
    """The first clients named like the devices of these pages: a client's randomness depends on its name."""
    names = [device_of(bytes.fromhex(page.text("public"))) for page in pages]
    names += store.client_ids[len(names) :].tolist()
    return dataclasses.replace(store, client_ids=np.array(names))


def best_of(hub, store, version):
    """What a Python device recommends to a client, with the slices of a version: [(item, rating)]."""
    algorithm = hub.coordinator.server.algorithm
    device, rng = Device(algorithm), hub.coordinator.rng(version)
    message = lambda asked: send(algorithm.partition, hub.state(version).params, asked.keys, rng)
    local = device.personalize(message(device.ask_whole(store)), store)
    mine = set(store.examples(0)["item"].tolist())
    items = np.array([item for item in range(store.num_keys("item")) if item not in mine], np.int32)
    columns = {"item": items, "rating": np.zeros(len(items), np.float32)}
    others = ClientStore(columns, np.array([0]), np.array([len(items)]), store.client_ids, store.vocabularies)
    outputs = device.predict(message(device.ask_whole(others)), local, others)
    order = np.argsort(-outputs)
    return list(zip(items[order].tolist(), outputs[order].tolist(), strict=True))


def test_a_page_recommends_when_the_server_is_gone(chromium, tmp_path):
    """It is loaded anew, from what the browser keeps."""
    task, _, prepared, hub, offer = federation(tmp_path, **{"cohort.size": 1, "rounds": 5})
    store = prepared.store.gather([3])
    with serving(with_page(hub, offer)) as url:
        page = chromium.open(url + "/")
        page.click("recommend")
        page.wait("document.getElementById('advice').textContent.includes('no model here yet')")
        enroll(hub, page)
        keep(page, ratings_of(store))
        page.click("start")
        ends(page, "The run has ended after 5 rounds.")
        fetch(page)
        page.run("navigator.serviceWorker.ready.then(() => 0)")
    page.visit(url + "/")
    page.click("recommend")
    page.wait("document.getElementById('items').children.length")
    shown = page.run("[...document.getElementById('items').children].map((each) => each.textContent)")
    ids = task.train.vocabularies["item"]
    wanted = best_of(hub, store, 5)[:10]
    assert [each.split(":")[0] for each in shown] == [str(ids[item]) for item, _ in wanted]
    np.testing.assert_allclose(
        [float(each.split(":")[1]) for each in shown], [r for _, r in wanted], atol=6e-3
    )
    hub.close()


PRIVATE = """(async () => {
  const { openStore } = await import("/device.js");
  const { privateKey } = await (await openStore()).get("key");
  return crypto.subtle.exportKey("pkcs8", privateKey);
})()"""


def test_a_page_that_may_not_take_part_says_why(chromium, tmp_path):
    _, _, _, hub, offer = federation(tmp_path)
    with serving(with_page(hub, offer)) as url:
        page = chromium.open(url + "/")
        device = device_of(bytes.fromhex(page.text("public")))
        with pytest.raises(RuntimeError, match="key is not extractable"):
            page.run(PRIVATE)
        page.click("start")
        ends(page, f"device {device} is not enrolled")
        hub.keys.enroll(KeyRow(device, DeviceKey.new().public))
        page.click("start")
        ends(page, f"the signature of device {device} does not fit the request")
        enroll(hub, page, revoked=1.0)
        page.click("start")
        ends(page, f"device {device} was revoked")
        enroll(hub, page)
        page.click("start")
        ends(page, "Waiting for a task.")
        page.click("stop")
        ends(page, "Stopped after 0 rounds.")
    page.click("start")
    ends(page, "does not answer")
    hub.close()


def test_a_server_that_comes_back_is_found_again(chromium, tmp_path):
    _, _, prepared, hub, offer = federation(tmp_path, **{"cohort.size": 1, "rounds": 2})
    with serving(with_page(hub, offer)) as url:
        page = chromium.open(url + "/")
        enroll(hub, page)
        keep(page, ratings_of(prepared.store))
    page.click("start")
    ends(page, "does not answer")
    with serving(with_page(hub, offer), int(url.rpartition(":")[2])):
        ends(page, "The run has ended after 2 rounds.")
    page.click("refresh")
    page.wait("document.getElementById('advice').textContent.startsWith('It could not be fetched')")
    hub.close()


@pytest.fixture(params=["broadcast", "pregenerated"], ids=["whole", "pages"])
def in_files(request, chromium, tmp_path):
    """A run of one page, whose slices are files: the hub, the page, and the folder of files."""
    settings = SMALL | MOVIELENS | {"rounds": 3, "cohort.size": 1, "server.schedule": "constant"}
    task, config = resolve("planted", None, settings | {"serving.way": request.param, "deploy.page_rows": 3})
    folder = found_run(task, config, tmp_path / "run")
    hub, offer, files = open_run(folder.path, fresh=1e6, poll=0.05)
    app = application(hub, offer, files=files)
    app.mount("/", StaticFiles(directory=PAGE, html=True))
    prepared = prepare(task, config)
    recording = Recording(app)
    with serving(recording) as url:
        page = chromium.open(url + "/")
        enroll(hub, page)
        keep(page, ratings_of(prepared.store))
        yield hub, page, files, prepared, recording
    hub.close()


def test_slices_come_from_files(in_files):
    """The server is told the keys only with the report, and the model is the same."""
    hub, page, _, prepared, recording = in_files
    page.click("start")
    ends(page, "The run has ended after 3 rounds.")
    assert not any(b"/slices" in request[0] for request in recording.requests)
    asked = [request[0] for request in recording.requests if request[0].startswith(b"/v1/files/")]
    assert len(asked) == len(set(asked)) >= 3  # what did not change is not asked for again
    store = as_joined(prepared.store.gather([0]), page)
    simulation = PlainSimulation(prepared.build, prepared.rates, store, prepared.recruiting, seed=0)
    list(simulation.run(3))
    for path, leaf in simulation.state.params.items():
        np.testing.assert_allclose(np.asarray(hub.state(3).params[path]), np.asarray(leaf), atol=1e-4)


def test_a_damaged_file_is_asked_for_three_times_and_refused(in_files):
    _, page, folder, _, recording = in_files
    for path in folder.iterdir():
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    page.click("start")
    ends(page, "is damaged: its digest is not its name")
    assert sum(request[0].startswith(b"/v1/files/") for request in recording.requests) == 3


def test_a_file_that_is_gone_is_shown(in_files):
    _, page, folder, _, _ = in_files
    for path in folder.iterdir():
        path.unlink()
    page.click("start")
    ends(page, "Round 1: there is no file")
    page.click("stop")
    ends(page, "Stopped after 0 rounds.")


OTHER_KEYS = """(async () => {
  const { planOf } = await import("/learn.js");
  const { linkTo, openDevice, openStore } = await import("/device.js");
  const device = await openDevice(await openStore());
  const link = linkTo(location.origin, device, new AbortController().signal);
  await link.join([device.name]);
  const { tasks } = await link.poll(20); // the first poll says that this device is there
  await link.slicesOf(planOf(await link.offer()), tasks[0], [1, 2]);
})()"""


def test_a_task_that_is_refused_is_shown(chromium, tmp_path):
    """Here the ratings changed after the task had asked for its slices."""
    _, _, prepared, hub, offer = federation(tmp_path, **{"cohort.size": 1})
    with serving(with_page(hub, offer)) as url:
        page = chromium.open(url + "/")
        enroll(hub, page)
        page.run(OTHER_KEYS)
        keep(page, ratings_of(prepared.store))
        page.click("start")
        ends(page, "Round 1: this task has asked for other keys of 'item' before (keys)")
        page.click("stop")
        ends(page, "Stopped after 0 rounds.")
    hub.close()


def test_what_a_person_writes_wrongly_is_shown(alone):
    for line in ("12", "12,", ",3", "12,much", "12;3"):
        alone.fill("ratings", f"1,2.5\n{line}")
        alone.click("save")
        alone.wait(
            f"document.getElementById('kept').textContent.startsWith({json.dumps(chr(34) + line + chr(34))})"
        )


@pytest.mark.slow
def test_the_two_commands_of_the_readme(chromium, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(PAGE / "serve.py"), str(tmp_path / "run")]
    with subprocess.Popen([*command, "--port", port], stdout=subprocess.PIPE, text=True) as server:
        try:
            told = server.stdout.readline()
            assert told == f"open http://localhost:{port}/\n"
            page = chromium.open(told.split()[1])
            enrolling = [*command, "--enroll", page.text("public")]
            assert "may take part" in subprocess.run(enrolling, capture_output=True, text=True).stdout
            wrong = subprocess.run([*command, "--enroll", "12"], capture_output=True, text=True, check=False)
            assert "a public key has 64 hexadecimal digits" in wrong.stderr
            keep(page, [{"item": "3", "rating": 1.5}, {"item": "no such item", "rating": 2.0}])
            page.click("start")
            ends(page, "The run has ended after 100 rounds.")
            fetch(page)
        finally:
            server.terminate()
    page.click("recommend")
    page.wait("document.getElementById('items').children.length === 10")
