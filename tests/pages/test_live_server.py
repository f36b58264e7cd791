"""The server of a live page: for this machine alone, and only to be read."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import pytest

from partwise.pages.follow_run import FolderFollower
from partwise.pages.live_server import LivePage, LiveServer
from partwise.runs.folder import Folder
from partwise.types import UserError


@pytest.fixture
def folder(copy):
    folder = Folder(copy("plain-0", "<b>going"))
    records = folder.records()
    (folder.path / "summary.json").unlink()
    folder.replace_records(records[:10])
    return folder, records[10:]


@pytest.fixture
def server(folder):
    server = LiveServer(LivePage(FolderFollower(folder[0].path)))
    yield server
    server.close()


def ask(url, method="GET", host=None, path=None):
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.netloc, timeout=120)
    connection.request(
        method,
        path or f"{where.path}?{where.query}",
        headers={"Host": where.netloc if host is None else host},
    )
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body.decode(), answer.headers


def test_the_page_and_its_feed(server, folder):
    code, page, headers = ask(server.url)
    assert code == 200
    assert "&lt;b&gt;going" not in page.split("<title>")[1].split("</title>")[0]
    assert "<b>going" not in page
    assert "connect-src 'self'" in page
    assert headers["X-Frame-Options"] == "DENY"
    first = json.loads(ask(f"{server.url}feed?after=0")[1])
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(ask(f"{server.url}feed?after={first['number']}")[1])
    )
    thread.start()
    time.sleep(0.2)
    assert not answers  # it waits
    folder[0].append(folder[1][:5])
    thread.join(120)
    news = json.loads(answers[0])
    assert news["number"] > first["number"]
    training = next(chart for chart in news["data"]["charts"] if chart["key"] == "training")
    assert training["curves"]["0"][0][-1] == 15
    assert re.search(r"15 <small>of 24", news["main"])
    assert json.loads(ask(f"{server.url}status")[1])["round"] == 15


def test_nobody_else_may_ask(server):
    where = urlsplit(server.url)
    assert where.hostname == "127.0.0.1"
    for host in ("evil.example", f"evil.example:{where.port}", "127.0.0.1", "127.0.0.1:1", ""):
        assert ask(server.url, host=host)[0] in (400, 403)
    assert ask(server.url, host=f"localhost:{where.port}")[0] == 200
    for path in (
        "/",
        "/feed",
        "/x/feed",
        where.path + "../status",
        where.path + "journal.db",
        where.path + "%2e%2e/",
    ):
        assert ask(server.url, path=path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server.url, method)[0] == 501
    for after in ("x", "-1", "9" * 30):
        assert ask(f"{server.url}feed?after={after}")[0] == 200


def test_a_port_that_is_taken_is_told(server, folder):
    with pytest.raises(UserError, match="Choose another with --port"):
        LiveServer(LivePage(FolderFollower(folder[0].path)), urlsplit(server.url).port)


def test_the_command_ends_with_ctrl_c(runs):
    command = [sys.executable, "-m", "partwise.cli", "watch", str(runs["plain-0"]), "--no-open"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a test in the background ignores it
    )
    url = process.stdout.readline().strip()
    assert "finished after 24 rounds" in process.stdout.readline()
    assert ask(url)[0] == 200
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
