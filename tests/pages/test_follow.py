"""Following a run: by its files as they grow, or by what its coordinator says."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from partwise.cli import main
from partwise.pages import follow_run
from partwise.pages.follow_coordinator import CoordinatorFollower
from partwise.pages.follow_run import FolderFollower
from partwise.pages.moment import live_strip, status
from partwise.pages.page import make_view
from partwise.runs.folder import Folder
from partwise.runs.lock import FILE, has_writer
from partwise.runs.records import to_line
from partwise.types import UserError


@pytest.fixture
def going(copy):
    """A run of which 10 rounds of 24 are written, and its other records. Its writer seems to be this process."""
    folder = Folder(copy("plain-0", "going"))
    records = folder.records()
    for name in ("summary.json", "model.safetensors"):
        (folder.path / name).unlink()
    folder.replace_records(records[:10])
    (folder.path / FILE).write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    return folder, records[10:]


def test_only_what_is_new_is_read(going, monkeypatch):
    folder, more = going
    follower, read = FolderFollower(folder.path), []
    monkeypatch.setattr(
        follow_run, "to_record", lambda line, number, run: read.append(line) or json.loads(line)
    )
    run, moment = follower.look()
    assert (len(read), len(run.series.rounds), moment.state) == (10, 10, "training")
    folder.append(more[:3])
    run, _ = follower.look()
    assert (len(read), len(run.series.rounds)) == (13, 13)
    follower.look()
    assert len(read) == 13


def test_a_line_that_is_still_being_written_is_no_damage(going):
    folder, more = going
    follower, line = FolderFollower(folder.path), to_line(more[0], folder.run)
    with open(folder.metrics, "ab") as file:
        file.write(line[:50])
    run, moment = follower.look()
    assert (len(run.series.rounds), moment.state) == (10, "training")
    with open(folder.metrics, "ab") as file:
        file.write(line[50:])
    assert len(follower.look()[0].series.rounds) == 11


def test_a_run_that_goes_on_from_an_earlier_round_is_followed(going):
    folder, more = going
    follower = FolderFollower(folder.path)
    assert len(follower.look()[0].series.rounds) == 10
    with open(folder.metrics, "r+b") as file:  # as `--resume` drops the rounds after the last checkpoint
        lines = file.readlines()[:6]
        file.seek(0)
        file.truncate()
        file.writelines(lines)
    assert len(follower.look()[0].series.rounds) == 6
    folder.append([more[0] | {"round": number, "train": {"loss": 7.0}} for number in range(7, 15)])
    assert follower.look()[0].series.losses[5:] != follower.look()[0].series.losses[:1]
    assert len(follower.look()[0].series.rounds) == 14
    with open(folder.metrics, "r+b") as file:  # and writes more, before anybody looks
        lines = file.readlines()[:6]
        file.seek(0)
        file.truncate()
        file.writelines(lines)
    folder.append([more[0] | {"round": number, "train": {"loss": 123456.5}} for number in range(7, 25)])
    assert follower.look()[0].series.losses[6:] == [123456.5] * 18


def test_states(going):
    folder, more = going
    written = folder.metrics.stat().st_mtime
    state = lambda **how: FolderFollower(folder.path, **how).look()[1].state
    assert state() == "training"
    assert state(clock=lambda: written + 3600) == "stalled"
    lock = (folder.path / FILE).read_text()
    (folder.path / FILE).unlink()
    stopped = FolderFollower(folder.path).look()[1]
    assert stopped.state == "stopped"
    assert f"partwise train --resume --out {folder.path}" in stopped.words
    folder.save_failure("the training has diverged")
    assert FolderFollower(folder.path).look()[1] == ("failed", "the training has diverged", {})
    folder.clear_failure()
    (folder.path / FILE).write_text(lock)
    folder.append(more)
    assert state() == "evaluating"
    folder.metrics.unlink()
    assert state() == "starting"
    (folder.path / "config.toml").unlink()
    assert state() == "starting"
    (folder.path / FILE).unlink()
    with pytest.raises(UserError, match="holds no run"):
        FolderFollower(folder.path)


def test_before_the_first_round_only_what_is_known_is_shown(going):
    folder, _ = going
    folder.metrics.unlink()
    pages = []
    for begun in (True, False):
        if not begun:
            (folder.path / "config.toml").unlink()
        run, moment = FolderFollower(folder.path).look()
        assert moment.words == "compiling; no round is recorded yet"
        pages.append(make_view([run], live_strip(run, moment)))
    assert pages[0].title == "fed_recon on planted"
    assert "0 <small>of 24</small>" in pages[0].main
    assert pages[1].title == "going"
    for page in pages:
        assert not any(words in page.main for words in ("a run", "0 of 0", "not told", "0 B", "Costs", ": -"))


def test_the_end_and_the_damage_of_a_run(runs, copy):
    run, moment = FolderFollower(runs["plain-0"]).look()
    assert (moment.state, run.summary["seed"]) == ("finished", 0)
    folder = Folder(copy("plain-0"))
    data = bytearray(folder.metrics.read_bytes())
    data[len(data) // 2] ^= 1
    folder.metrics.write_bytes(bytes(data))
    follower = FolderFollower(folder.path)
    for _ in range(2):
        run, moment = follower.look()
        assert moment.state == "damaged"
        assert "metrics.jsonl' is damaged: line" in moment.words
        assert 8 < len(run.series.rounds) < 16
    (folder.path / "start.json").write_text("")
    run, moment = FolderFollower(folder.path).look()
    assert moment.state == "damaged"
    assert "start.json" in moment.words
    assert "metrics.jsonl" not in moment.words


def test_a_writer_is_known_by_its_lock_file(tmp_path):
    tell = lambda **who: (tmp_path / FILE).write_text(json.dumps({"host": socket.gethostname(), **who}))
    assert not has_writer(tmp_path)
    tell(pid=os.getpid())
    assert has_writer(tmp_path)
    tell(pid=2**22 + 1)
    assert not has_writer(tmp_path)
    tell(pid=2**22 + 1, host="elsewhere")
    assert has_writer(tmp_path)
    (tmp_path / FILE).write_text("")
    assert not has_writer(tmp_path)


def test_status_for_scripts(going, runs, capsys):
    folder, _ = going
    assert main(["watch", str(folder.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["round"], told["rounds"]) == ("training", 10, 24)
    assert told["seconds_left"] == pytest.approx(0.14)
    assert told["evaluation"]["round"] == 6
    assert told["bytes"] == 10 * 17600
    assert told["dropped"] == 10
    assert main(["watch", str(runs["private"]), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["bytes"], told["seconds_left"]) == ("finished", None, None)
    assert 7 < told["epsilon"] <= 8
    assert {told[name] for name in ("dropped", "empty", "too_small", "broken", "outliers")} == {None}


def test_mistakes(tmp_path, capsys):
    for command, words in (
        (["watch", str(tmp_path)], "holds no run"),
        (["watch", str(tmp_path), "--port", "70000"], "--port must be from 0"),
        (["watch", "https://127.0.0.1:1"], "needs an operator's token"),
        (["watch", "ftp://x"], "'ftp://x' is no URL of a server, which begins with http:// or https://"),
    ):
        assert main(command) == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_a_server_of_something_else_is_told(tmp_path, capsys):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "6")
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *args):
            pass

    (tmp_path / "token").write_text("ada.secret")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert main(["watch", url, "--token", str(tmp_path / "token")]) == 2
        server.shutdown()
    assert "not as the server of a run" in " ".join(capsys.readouterr().err.split())
    assert main(["watch", url, "--token", str(tmp_path / "token")]) == 2
    assert "does not answer" in " ".join(capsys.readouterr().err.split())


class Coordinator:
    """What a coordinator would say."""

    def __init__(self, versions):
        self.versions, self.asked = versions, []
        self.said = {"phase": "open", "attempt": 0, "opened": time.time(), "rounds": 900, "errors": 0}
        self.said |= {"settings": {"task": "planted", "algorithm": "fed_recon", "rounds": 900}}
        self.said |= {"waiting": 4, "tasks": {"asked": 8, "reported": 5, "lost": 1}, "refused": {"task": 2}}

    def __call__(self, after):
        self.asked.append(after)
        if self.versions is None:
            raise UserError("it does not answer")
        return {**self.said, "number": len(self.versions), "versions": self.versions[after : after + 500]}


def version(number, **more):
    told = {"seconds": 2.0, "clients": 8, "loss": 1 / number, "broken": [], "missing": 1}
    return {"round": number, **told, "bytes_down": 10, "bytes_up": 5, **more}


def test_a_coordinator_is_followed():
    coordinator = Coordinator([version(number) for number in range(1, 701)])
    follower = CoordinatorFollower("https://example.org:8443/", coordinator)
    assert coordinator.asked == [0, 500]
    run, moment = follower.look()
    assert coordinator.asked[2:] == [680]  # not all of them again
    assert (run.name, len(run.series.rounds), moment.state) == ("example.org:8443", 700, "serving")
    assert dict(moment.devices)["reports of this round"] == "5 of 8, 1 lost"
    coordinator.versions[690]["metrics"] = {"rmse": 0.7, "clients": 3}  # an evaluation may end later
    coordinator.versions.append(version(701))
    run, moment = follower.look()
    assert [(look.round, look.metrics) for look in run.series.looks] == [(691, {"rmse": 0.7})]
    assert status(run, moment)["seconds_left"] == pytest.approx(199 * 2)
    assert status(run, moment)["bytes"] == 701 * 15
    coordinator.said["opened"] -= 3600
    assert follower.look()[1].state == "stalled"
    coordinator.versions, kept = None, coordinator.versions
    run, moment = follower.look()
    assert (moment.state, len(run.series.rounds)) == ("unreachable", 701)
    coordinator.versions = kept
    coordinator.said["phase"] = "ended"
    assert follower.look()[1].state == "finished"


def test_what_a_coordinator_does_not_tell_is_not_shown():
    coordinator = Coordinator(
        [version(1, clients=7.3, bytes_down=None, bytes_up=None, missing=None, broken=None)]
    )
    coordinator.said |= {"waiting": None, "tasks": None, "refused": None}
    run, moment = CoordinatorFollower("https://example.org", coordinator).look()
    assert dict(moment.devices) == {"errors of the server": "0"}
    assert status(run, moment)["bytes"] is None
