"""Runs through Flower: letters and replies, the hub's rules, and real SuperLinks with nodes of both kinds."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import threading

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from flwr.app import ConfigRecord, Error, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from partwise.algorithms.registry import prepare
from partwise.cli import main
from partwise.deployment import flower_trial
from partwise.deployment.agent import run_agent
from partwise.deployment.coordinator import Wait
from partwise.deployment.federation import found_run, open_run
from partwise.deployment.flower_app import OneLetter
from partwise.deployment.flower_hub import FlowerHub
from partwise.deployment.flower_letters import (
    Letter,
    Reply,
    names_digest,
    read_letter,
    read_reply,
    write_letter,
    write_reply,
)
from partwise.deployment.flower_link import FlowerLink
from partwise.deployment.flower_node import node_at
from partwise.deployment.flower_trial import QUIET, through_flower
from partwise.deployment.trial import deal
from partwise.runs.folder import Folder
from partwise.runs.resolve import resolve
from partwise.simulation.plain import PlainSimulation
from partwise.types import UserError

ROUNDS = {
    "data.num_clients": 30,
    "cohort.size": 5,
    "rounds": 3,
    "serving.way": "broadcast",
    "deploy.fresh": 1e6,
}
SMALL = {**ROUNDS, "data.num_items": 20, "data.mean_examples": 12, "data.dim": 2}
POSTS = {"data.num_words": 60, "data.num_tags": 5, "data.mean_examples": 6, "data.words_per_example": 5}
POSTS = {**ROUNDS, **POSTS, "algorithm": "fed_avg"}


@pytest.fixture(autouse=True)
def _inside_a_run():
    """Messages can be made only in a run of Flower's."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


class PostOffice:
    """A grid in memory, whose nodes are threads with a `FlowerLink`."""

    def __init__(self, nodes):
        self.boxes = {number: queue.Queue() for number in nodes}
        self.replies, self.letters, self.pushed = {}, [], 0
        self.lost = lambda number: False  # whether a reply is lost

    def get_node_ids(self):
        return list(self.boxes)

    def push_messages(self, messages):
        names = []
        for message in messages:
            name = f"letter {self.pushed}"
            self.pushed += 1
            self.letters.append((message.metadata.dst_node_id, read_letter(message.content)))
            self.boxes[message.metadata.dst_node_id].put((name, message.content))
            names.append(name)
        return names

    def pull_messages(self, names):
        return [self.replies.pop(name) for name in names if name in self.replies]

    def mail(self, number):
        return PostBox(self, number)


class PostBox:
    """The mail of one of its nodes."""

    def __init__(self, office, number):
        self.office, self.number, self.letter = office, number, ""

    def take(self):
        try:
            self.letter, content = self.office.boxes[self.number].get(timeout=0.5)
        except queue.Empty:
            return Wait(0.01)
        return read_letter(content)

    def answer(self, reply):
        failed = self.office.lost(self.number)
        content = Error(5, "the node has left") if failed else write_reply(reply)
        self.office.replies[self.letter] = Answered(self.letter, content)


class Answered:
    """A reply as the grid hands it out."""

    def __init__(self, letter, content):
        self.metadata = self
        self.reply_to_message_id, self.content, self.error = letter, content, content

    def has_error(self):
        return isinstance(self.content, Error)


def founded(tmp_path, task="planted", settings=SMALL, **more):
    """A run whose clients are sorted by name, as a coordinator draws them, and what is needed to compare it."""
    task, config = resolve(task, None, {**settings, **more})
    task = task._replace(train=task.train.take(np.argsort(task.train.client_ids.astype(str))))
    config = config.changed({"deploy.population": task.train.num_clients})
    prepared = prepare(task, config)
    return config, prepared, found_run(task, config, tmp_path / "run")


def plain_model(config, prepared):
    plain = PlainSimulation(
        prepared.build, prepared.rates, prepared.store, prepared.recruiting, seed=config.seed
    )
    for _ in plain.run(config.rounds):
        pass
    return plain.state.params


def federated(folder, store, office, tmp_path):
    """Run it with a thread for every node. Returns the hub."""
    places, opened = deal(folder, store, len(office.boxes)), open_run(folder.path, poll=0.01)

    def node(number, place):
        link = FlowerLink(office.mail(number))
        for _ in run_agent(link, f"store:{place / 'examples'}", place / "own", most=100):
            pass
        link.close()

    threads = [
        threading.Thread(target=node, args=each, daemon=True)
        for each in zip(office.boxes, places, strict=True)
    ]
    for thread in threads:
        thread.start()
    FlowerHub(opened, office).run()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    return opened.hub


def assert_equal(hub, rounds, params):
    for path, leaf in params.items():
        np.testing.assert_array_equal(np.asarray(hub.state(rounds).params[path]), np.asarray(leaf))


@pytest.mark.parametrize(("task", "settings"), [("planted", SMALL), ("tags-planted", POSTS)])
def test_the_model_is_the_plain_backends(tmp_path, task, settings):
    config, prepared, folder = founded(tmp_path, task, settings)
    office = PostOffice([7, 12])
    hub = federated(folder, prepared.store, office, tmp_path)
    assert_equal(hub, 3, plain_model(config, prepared))
    # one greeting, at most one letter of work a round, one farewell: nothing is asked twice
    assert len(office.letters) <= 2 * 5
    hub.close()


def test_replies_that_are_lost_are_work_that_is_done_again(tmp_path):
    config, prepared, folder = founded(tmp_path)
    office, failures = PostOffice([1, 2]), []

    def lost(number):
        failures.append(number)
        return len(failures) in (1, 4)

    office.lost = lost
    hub = federated(folder, prepared.store, office, tmp_path)
    assert_equal(hub, 3, plain_model(config, prepared))
    hub.close()


def test_a_node_that_comes_back_as_a_new_one_has_its_clients(tmp_path):
    _, prepared, folder = founded(tmp_path)
    opened = open_run(folder.path)
    names, office = [str(name) for name in prepared.store.client_ids], PostOffice([1, 2])
    hub = FlowerHub(opened, office)

    def turn(number):
        mail = office.mail(number)
        assert isinstance(mail.take(), Letter)
        mail.answer(Reply(names))
        hub._turn()

    hub._turn()
    turn(1)
    turn(2)  # node 1 is there, so it keeps them
    present = lambda: {row.device for row in opened.hub.clerk.do(lambda book: book.present(0.0))}
    assert present() == {"flower-1"}
    del office.boxes[1]
    hub._looked = hub._nodes[2].not_before = float("-inf")
    hub._turn()
    turn(2)
    assert present() == {"flower-2"}
    opened.hub.close()


def test_a_client_of_another_node_keeps_no_other_from_joining(tmp_path):
    _, prepared, folder = founded(tmp_path)
    opened = open_run(folder.path)
    names, office = [str(name) for name in prepared.store.client_ids], PostOffice([1, 2])
    hub = FlowerHub(opened, office)

    def turn(number, names):
        mail = office.mail(number)
        read = mail.take()
        mail.answer(Reply(names))
        hub._turn()
        return read.joined

    def joined():
        return {row.name: row.device for row in opened.hub.clerk.do(lambda book: book.present(0.0))}

    hub._turn()
    turn(1, names[:5])
    turn(2, names)
    assert joined() == {name: f"flower-{1 if name in names[:5] else 2}" for name in names}
    del office.boxes[1]
    hub._looked = float("-inf")
    hub._turn()
    assert turn(2, names) == names_digest(names[5:])  # so a node tells of all again
    assert joined() == dict.fromkeys(names, "flower-2")
    opened.hub.close()


def test_nothing_but_files_of_the_version_is_in_letters(tmp_path):
    _, prepared, folder = founded(tmp_path)
    office = PostOffice([1])
    federated(folder, prepared.store, office, tmp_path).close()
    work = [letter for _, letter in office.letters if not isinstance(letter.answer, Wait)]
    assert len(work) == 3
    for letter in work:
        assert set(letter.files) == {job.slices for job in letter.answer.jobs}
    assert {letter.joined for letter in work} == {names_digest(map(str, prepared.store.client_ids))}


@pytest.mark.parametrize("way", ["on_demand", "pregenerated"])
def test_slices_must_be_in_letters_or_at_a_url(tmp_path, way):
    *_, folder = founded(tmp_path, **{"serving.way": way})
    opened = open_run(folder.path)
    with pytest.raises(UserError, match="broadcast"):
        FlowerHub(opened, PostOffice([]))
    opened.hub.close()


def letter(tmp_path):
    *_, folder = founded(tmp_path)
    opened = open_run(folder.path)
    opened.hub.close()
    return Letter(opened.offer, Wait(1.0), names_digest(["a"]), {"x.safetensors": b"\x00\x01"})


def test_letters_and_replies_come_back_as_they_were(tmp_path):
    written = letter(tmp_path)
    read = read_letter(write_letter(written))
    assert (read.answer, read.joined, read.files) == (written.answer, written.joined, written.files)
    assert read.offer._asdict() == json.loads(json.dumps(written.offer._asdict()))
    reply = Reply(["a", "ü"], False, 3, {"battery": 0.5}, (b"one", b"\x00"))
    assert read_reply(write_reply(reply)) == reply


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"partwise": ConfigRecord({})}),
        RecordDict({"partwise": ConfigRecord({"said": b"{", "reports": [b""]})}),
        RecordDict({"partwise": ConfigRecord({"said": b"[]", "reports": [b""]})}),
        RecordDict({"partwise": ConfigRecord({"said": b'{"clients": [1], "most": 1, "ready": true}'})}),
        RecordDict(
            {
                "partwise": ConfigRecord(
                    {
                        "said": b'{"clients": null, "most": 1, "ready": true, "status": {}}',
                        "reports": ["text"],
                    }
                )
            }
        ),
    ],
)
def test_other_messages_are_refused(content):
    with pytest.raises(UserError):
        read_reply(content)
    with pytest.raises(UserError):
        read_letter(content)


def test_a_letter_of_another_protocol_says_so(tmp_path):
    written = letter(tmp_path)
    with pytest.raises(UserError, match="same version"):
        read_letter(write_letter(written._replace(offer=written.offer._replace(protocol=99))))


def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path):
    link = FlowerLink(OneLetter(letter(tmp_path)))
    link.offer()
    for name in ("x.safetensors", "missing.safetensors"):
        with pytest.raises(UserError, match="not in the letter"):
            link.files("").get_many({name: 100})


@pytest.mark.parametrize(
    "url", ["flower://x:1", "flower+https://", "flower+https://host", "flower+http://:80"]
)
def test_urls_of_superlinks(url):
    with pytest.raises(UserError, match=r"flower\+https://example.org:8000"), node_at(url):
        pass


def test_keys_of_nodes(tmp_path):
    with pytest.raises(UserError, match="TLS only"), node_at("flower+http://host:1", key="x"):
        pass
    (tmp_path / "key").write_text("no key")
    with pytest.raises(UserError, match="OpenSSH"), node_at("flower+https://host:1", key=tmp_path / "key"):
        pass


# Real processes


@pytest.mark.slow
def test_a_real_superlink_with_resident_nodes(fleet):
    """FedAvg, 20 rounds, four nodes: the plain backend's model, bit for bit."""
    run = fleet("tags-planted", {**POSTS, "rounds": 20})
    folder = Folder(run.folder / "run")
    started = through_flower(run.stack, folder, deal(folder, run.prepared.store, 4))
    assert started.server.wait(900) == 0, (run.folder / "run" / "server.log").read_text()
    for node in started.devices:
        assert node.wait(300) == 0
    records = run.check_plain()
    assert [each["attempt"] for each in records] == [0] * 20


@pytest.mark.slow
def test_a_stock_supernode(fleet, unused_port, wait_until):
    """Flower's own SuperNode starts a process for every letter; what it reports is the same."""
    run = fleet("planted", {**SMALL, "rounds": 2, "cohort.size": 4})
    folder = Folder(run.folder / "run")
    (place,) = deal(folder, run.prepared.store, 1)
    env = {**os.environ, **QUIET, "FLWR_HOME": str(run.folder / "home")}
    (run.folder / "home").mkdir()
    connection = f'[superlink.here]\naddress = "127.0.0.1:{unused_port}"\ninsecure = true\n'
    (run.folder / "home" / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n{connection}')

    def start(name, *command):
        with open(run.folder / f"{name}.log", "wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
        run.stack.callback(process.wait)
        run.stack.callback(process.terminate)
        return process

    address = f"127.0.0.1:{unused_port}"
    plain = ["--insecure", "--disable-runtime-dependency-installation"]
    start("superlink", "flower-superlink", "--host", "127.0.0.1", "--port", str(unused_port), *plain)
    wait_until(lambda: flower_trial._listens(unused_port))
    own = {"data": f"store:{place}/examples", "store": f"{place}/own", "most": 100}
    given = " ".join(f"{name}={json.dumps(value)}" for name, value in own.items())
    start("supernode", "flower-supernode", "--insecure", "--superlink", address, "--node-config", given)
    assert main(["serve", "--out", str(folder.path), "--engine", "flower"]) == 0
    server = start("run", "flwr", "run", str(folder.path / "app"), "here", "--stream")
    assert server.wait(900) == 0, (run.folder / "run.log").read_text()
    assert (folder.path / "model.safetensors").exists(), (run.folder / "run.log").read_text()
    run.check_plain()


def test_the_command_refuses_what_flower_cannot_do(tmp_path, capsys):
    given = ["deploy", "planted", "--engine", "flower", "--set", "serving.way=on_demand"]
    assert main([*given, "--out", str(tmp_path / "run")]) == 2
    assert "broadcast" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_flowers_programs_find_each_other_in_an_environment_that_nobody_activated(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert shutil.which("flower-superexec", path=flower_trial._path())
