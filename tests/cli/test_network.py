"""The commands of a federation, as a person types them, from enroll to revoke, and deploy."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from partwise.cli import main
from partwise.deployment.auth import DeviceKey
from partwise.deployment.certificates import make_certificates

SETTINGS = ["--set", "data.num_clients=30", "--set", "data.num_items=20", "--set", "data.mean_examples=12"]
SETTINGS += ["--set", "data.dim=2", "--set", "deploy.population=24", "--cohort", "4", "--rounds", "2"]
JOIN = ["join", "https://127.0.0.1:1", "--data", "x.csv", "--key", "KEY"]


def start(log, *arguments):
    """A partwise process whose output goes to a file."""
    with open(log, "wb") as file:
        command = [sys.executable, "-m", "partwise.cli", *map(str, arguments)]
        return subprocess.Popen(command, stdout=file, stderr=file)


def url_in(log, process):
    """The URL that a server says it has."""
    for _ in range(6000):
        found = [line for line in log.read_text().splitlines() if line.startswith("https://")]
        if found:
            return found[0]
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def printed(capsys, *arguments):
    """What a command prints with --json, and its exit code."""
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def table(tmp_path):
    """Ratings of all clients, as a CSV with the ids of the run."""
    from partwise.runs.resolve import resolve

    task, _ = resolve(
        "planted", None, {"data.num_clients": 30, "data.num_items": 20, "data.mean_examples": 12}
    )
    store = task.train.gather()
    owner = np.repeat(store.client_ids, store.counts)
    items = store.vocabularies["item"][store.columns["item"]]
    rows = zip(owner, items, store.columns["rating"], strict=True)
    lines = [f"{user},{item},{rating}" for user, item, rating in rows]
    path = tmp_path / "ratings.csv"
    path.write_text("user,item,rating\n" + "\n".join(lines) + "\n")
    return path, str(store.client_ids[0])


@pytest.mark.slow
def test_the_journey_of_a_device(tmp_path, table, capsys, monkeypatch):
    path, client = table
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = make_certificates(tmp_path / "certificates")
    run, log = tmp_path / "run", tmp_path / "server.log"
    tls = ["--certificate", files.server, "--key", files.key]
    server = start(log, "serve", "planted", *SETTINGS, "--out", run, "--port", 0, *tls)
    try:
        url = url_in(log, server)
        key = ["--key", tmp_path / "device.pem"]
        code, told = printed(capsys, "enroll", run, *key, "--label", "site")
        assert code == 0
        join = [
            "join",
            url,
            "--data",
            path,
            *key,
            "--authority",
            files.authority,
            "--store",
            tmp_path / "own",
        ]
        device = start(tmp_path / "device.log", *join, "--most", 10)
        assert device.wait(900) == 0, (tmp_path / "device.log").read_text()
        assert "8 reports accepted, 0 not" in (tmp_path / "device.log").read_text()
        personal = ["--client", path, "--id", client]
        local = tmp_path / "ann.safetensors"
        made = ["personalize", url, *personal, "--out", local, *key, "--authority", files.authority]
        assert printed(capsys, *made)[0] == 0
        use = ["predict", url, "--local", local, *personal]
        code, online = printed(capsys, *use)
        assert code == 0
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) in (0, 143)
    assert printed(capsys, *use) == (0, online)  # without the server
    assert printed(capsys, "personalize", run, *personal, "--out", tmp_path / "other.safetensors")[0] == 0
    code, offline = printed(capsys, "predict", run, "--local", tmp_path / "other.safetensors", *personal)
    assert offline == online  # the model that was fetched is the one in the server's folder
    assert os.stat(local).st_mode & 0o077 == 0
    assert printed(capsys, "revoke", run, "site")[0] == 0
    assert told["device"]


@pytest.mark.slow
def test_deploy_trains_a_whole_federation(tmp_path, capsys):
    code, told = printed(capsys, "deploy", "planted", *SETTINGS, "--devices", 2, "--out", tmp_path / "run")
    assert code == 0
    assert (told["devices"], told["reports"], told["rounds"]) == (2, 8, 2)
    assert np.isfinite(told["test"]["rmse"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "planted", "--out", "run", "--host", "0.0.0.0"], "without TLS"),
        (["serve", "planted", "--out", "run", "--certificate", "none.pem"], "belong together"),
        (
            ["serve", "planted", "--out", "run", "--certificate", "no.pem", "--key", "no.key"],
            "no file 'no.pem'",
        ),
        (
            ["serve", "planted", "--out", "run", "--certificate", "server.pem", "--key", "key.pem"],
            "not a certificate and its key",
        ),
        (["serve", "planted", "--out", "run", "--port", "99999"], "from 1 to 65,535"),
        (["serve", "planted", "--out", "run", "--port", "TAKEN"], "cannot listen on 127.0.0.1"),
        (
            ["serve", "planted", "--out", "run", "--host", "no.host.invalid", "--proxy"],
            "cannot listen on no.host",
        ),
        (["serve", "--out", "run"], "holds no run yet"),
        (["join", "https://127.0.0.1:1", "--data", "x.csv", "--key", "none.pem"], "none.pem"),
        (["join", "ftp://here", "--data", "x.csv", "--key", "KEY"], "must begin with https://"),
        (
            ["join", "https://127.0.0.1:1", "--data", "x.csv", "--key", "KEY", "--authority", "no.pem"],
            "'no.pem' holds",
        ),
        (
            ["join", "https://127.0.0.1:1", "--data", "x.csv", "--key", "KEY", "--authority", "KEY"],
            "'key.pem' holds",
        ),
        (["enroll", "nowhere"], "holds no run"),
        (["enroll", "nowhere", "--operator", "ada"], "holds no run"),
        (["enroll", "nowhere", "--days", "-3"], "--days must be more than 0"),
        (["enroll", "nowhere", "--days", "nan"], "--days must be more than 0"),
        (
            ["enroll", "https://127.0.0.1:1", "--key", "KEY", "--token", "KEY"],
            "'key.pem' holds no operator's token",
        ),
        (["enroll", "https://127.0.0.1:1", "--key", "KEY"], "operator's token"),
        (["enroll", "https://127.0.0.1:1", "--operator", "ada"], "on the server's host"),
        (["revoke", "nowhere", "ann"], "holds no run"),
        (["deploy", "planted", "--devices", "0"], "0 devices cannot share"),
        (["deploy", "planted", "--out", "there"], "'there' holds a run already: choose another folder"),
        (["deploy", "planted", "--set", "deploy.buffer=99", "--devices", "1"], "never full"),
        (["deploy", "planted", "--algorithm", "fed_avg", "--devices", "1"], "a device does not know"),
        (["personalize", "https://127.0.0.1:1", "--client", "x.csv", "--out", "l"], "device's key"),
        (["predict", "https://127.0.0.1:1", "--local", "l", "--client", "x.csv"], "no model was fetched"),
    ],
)
def test_what_a_person_gets_wrong(arguments, words, capsys, place):
    arguments = [{"KEY": "key.pem", "TAKEN": str(place)}.get(text, text) for text in arguments]
    assert main(arguments) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not Path("run").exists()  # the same command, mended, begins the run
    assert not Path("ada.token").exists()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a key, a certificate and what looks like a run, and a port in use."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    DeviceKey.new().save("key.pem")
    make_certificates(".")
    Path("there").mkdir()
    Path("there/config.toml").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]
