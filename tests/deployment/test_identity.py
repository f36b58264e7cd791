"""A run has one identity, in its folder, its journal, its offer and its devices' stores. Two runs with the same
settings are two runs, and no command makes a second one of a run by mistake."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3

import numpy as np
import pytest
import urllib3

from partwise.cli import main
from partwise.deployment import hub as hubs
from partwise.deployment.agent import Agent, run_agent
from partwise.deployment.auth import DeviceKey, KeyRow
from partwise.deployment.federation import found_run, open_run
from partwise.deployment.http_link import HttpLink
from partwise.deployment.journal import shown
from partwise.deployment.journal_place import NOTED
from partwise.deployment.link import UnreachableError
from partwise.deployment.own_store import OwnStore
from partwise.runs.folder import Folder
from partwise.runs.resolve import resolve
from partwise.types import UserError

SMALL = {
    "data.num_clients": 30,
    "data.num_items": 20,
    "data.mean_examples": 12,
    "data.dim": 2,
    "cohort.size": 2,
}
SAME = ("config.toml", "model.json", "vocabularies.json", "heat.safetensors", "first.safetensors")


def founded(folder, journal=None, **more):
    """A small run that was begun."""
    return found_run(*resolve("planted", None, {**SMALL, "rounds": 3, **more}), folder, journal)


@pytest.fixture(params=["sqlite", "sqlite elsewhere", "postgresql"])
def journal(request, tmp_path):
    """What is given as --journal."""
    if request.param == "postgresql":
        return request.getfixturevalue("new_postgres")()
    return None if request.param == "sqlite" else f"sqlite:///{tmp_path}/elsewhere.db"


def another(journal, request, tmp_path):
    """Another, empty journal."""
    if journal and journal.startswith("postgresql"):
        return request.getfixturevalue("new_postgres")()
    return f"sqlite:///{tmp_path}/another.db"


# Two runs


def test_the_same_settings_make_the_same_run_with_another_identity(tmp_path):
    one, two = founded(tmp_path / "one"), founded(tmp_path / "two")
    assert one.run != two.run
    assert one.begun()["settings"] == two.begun()["settings"]
    for name in SAME:
        assert (one.path / name).read_bytes() == (two.path / name).read_bytes()
    assert one.config() == two.config()


@pytest.mark.parametrize("kind", ["agent of a table", "agent in memory"])
def test_devices_of_a_run_that_is_begun_again_begin_anew(federate, tmp_path, caplog, kind):
    """What they report is what devices report that were never in another run, bit for bit."""
    settings, kept = {"algorithm": "fed_per", "rounds": 4, "cohort.size": 24}, OwnStore()

    def trained(folder, own):
        run = federate(folder, settings, population=24)
        store, table = run.prepared.store, tmp_path / "all.csv"
        table.write_text("\n".join(run.lines(np.arange(store.num_clients))) + "\n")
        if kind == "agent of a table":
            agent = run_agent(run.link(), str(table), tmp_path / ("own" if own else "fresh"), most=100)
        else:
            algorithm = run.prepared.build(run.prepared.rates)
            agent = Agent(run.link(), algorithm, store, most=100, own=kept if own else OwnStore()).run()
        assert all(done.accepted for done in agent)
        losses = [record["loss"] for record in run.hub.records()]
        return losses, dict(run.hub.state(4).params)

    (first, _), (again, params), (fresh, others) = (
        trained(name, own) for name, own in (("first", True), ("again", True), ("fresh", False))
    )
    assert first == again == fresh
    for path, leaf in params.items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(others[path]))
    if kind == "agent of a table":
        assert caplog.text.count("is of another run or model: it is set aside") == 1


# One run, one journal


def test_a_run_finds_the_journal_that_it_was_begun_with(tmp_path, journal):
    """And so does one that has moved with its folder, or is restored from a backup."""
    founded(tmp_path / "run", journal)
    first = open_run(tmp_path / "run", journal)
    key = DeviceKey.new()
    first.hub.keys.enroll(KeyRow(key.device, key.public))
    first.hub.close()
    if journal is None:  # as in docs/deploy.md: the journal first, then the rest of the folder
        with (
            contextlib.closing(sqlite3.connect(tmp_path / "run" / "journal.db")) as here,
            contextlib.closing(sqlite3.connect(tmp_path / "backup.db")) as there,
        ):
            here.backup(there)
        shutil.copytree(tmp_path / "run", tmp_path / "moved", ignore=shutil.ignore_patterns("journal.db*"))
        shutil.copy(tmp_path / "backup.db", tmp_path / "moved" / "journal.db")
        shutil.rmtree(tmp_path / "run")
    else:
        shutil.move(tmp_path / "run", tmp_path / "moved")
    again = open_run(tmp_path / "moved")  # nothing is said of the journal
    assert again.offer.run == first.offer.run == again.hub.journal.run
    assert again.hub.keys.get(key.device) is not None
    again.hub.close()


@pytest.mark.parametrize("held", ["an empty journal", "a journal of another run", "no journal"])
def test_another_journal_is_refused_and_nothing_is_made(tmp_path, journal, held, request, capsys):
    run, other = tmp_path / "run", another(journal, request, tmp_path)
    founded(run, journal)
    if held == "a journal of another run":
        founded(tmp_path / "other", other)
    noted, before = (run / NOTED).read_text().strip(), sorted(tmp_path.rglob("*"))
    given = other
    if held == "no journal":  # it is gone, or the database is empty
        (run / NOTED).write_text(shown(other) + "\n")
        given = None
    for command in (
        ["enroll", run, "--key", tmp_path / "k.pem"],
        ["revoke", run, "ann"],
        ["serve", "--out", run],
    ):
        port = ["--port", "0"] if command[0] == "serve" else []
        more = ["--journal", given] if given else []
        assert main([*map(str, command), *more, *port]) == 2
        told = capsys.readouterr().err.replace("\n", " ")
        assert f"he run in '{run}'" in " ".join(told.split())
        assert "If the journal was moved, write" in " ".join(told.split())
    (tmp_path / "k.pem").unlink(missing_ok=True)
    assert sorted(tmp_path.rglob("*")) == before
    (run / NOTED).write_text(noted + "\n")
    open_run(run).hub.close()


def test_a_new_run_needs_a_new_journal(tmp_path, journal):
    founded(tmp_path / "run", journal)
    hub = open_run(tmp_path / "run").hub
    hub.close()
    with pytest.raises(UserError, match=r"is of another run .*give another database with --journal"):
        founded(tmp_path / "again", hub.journal.url)
    assert not Folder(tmp_path / "again").exists()
    founded(tmp_path / "again")  # with another one it can be begun there


def test_a_beginning_that_was_killed_can_be_repeated(tmp_path, monkeypatch, journal):
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "save_config", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            founded(tmp_path / "run", journal)
    folder = founded(tmp_path / "run", journal)
    opened = open_run(tmp_path / "run")
    assert opened.offer.run == folder.run
    opened.hub.close()


def test_passwords_are_not_kept(tmp_path, new_postgres):
    url = new_postgres()
    secret = url.replace("postgres:@", "postgres:hunter2@")
    assert secret != url
    for given in (secret, f"{url}&password=hunter2"):
        assert "hunter2" not in shown(given)
        assert shown(given) == shown(url)
    founded(tmp_path / "run", secret)
    assert not [p for p in (tmp_path / "run").rglob("*") if p.is_file() and b"hunter2" in p.read_bytes()]
    for given in (None, secret, url):
        open_run(tmp_path / "run", given).hub.close()


def test_runs_from_before_journals_were_noted_take_theirs_and_no_other(tmp_path):
    folder = founded(tmp_path / "run", f"sqlite:///{tmp_path}/own.db")
    (folder.path / NOTED).unlink()
    with pytest.raises(UserError, match="there is no journal"):
        open_run(folder.path)
    (folder.path / "versions" / "00000003-0.safetensors").touch()
    with pytest.raises(UserError, match=r"has no rounds.*--journal"):  # as one that was made by mistake
        open_run(folder.path, f"sqlite:///{tmp_path}/own.db")
    (folder.path / "versions" / "00000003-0.safetensors").unlink()
    open_run(folder.path, f"sqlite:///{tmp_path}/own.db").hub.close()
    open_run(folder.path).hub.close()


def test_a_key_works_and_is_revoked_at_the_server_that_runs(tmp_path, serve, wait_until, journal):
    """`enroll` and `revoke` are told nothing of the journal that the server was started with."""
    run = tmp_path / "run"
    founded(run, journal)
    opened = open_run(run, journal)
    with contextlib.closing(opened.hub), serve(opened.hub, opened.offer) as url:
        assert main(["enroll", str(run), "--key", str(tmp_path / "k.pem"), "--label", "ann"]) == 0
        link = HttpLink(url, DeviceKey.load(tmp_path / "k.pem"))
        wait_until(lambda: not refusal(link))
        assert main(["revoke", str(run), "ann"]) == 0
        assert "was revoked" in wait_until(lambda: refusal(link))


def refusal(link):
    try:
        link.offer()
    except UserError as error:
        return str(error)
    return ""


def test_a_second_server_keeps_the_pages_of_the_first(federate, tmp_path, monkeypatch):
    monkeypatch.setattr(hubs, "FORGET", 0.0)
    run = federate(settings={"serving.way": "pregenerated", "rounds": 3})
    files = tmp_path / "served" / "files"
    before = {path.name for path in files.iterdir()}
    second = open_run(tmp_path / "served")  # as `partwise serve --out` does
    for _ in range(3):
        second.hub.tick()
    assert {path.name for path in files.iterdir()} == before
    second.hub.close()
    run.hub.tick()


# Faults of the server's own


def test_a_run_whose_newest_version_is_lost_is_not_served(federate, tmp_path):
    run = federate()
    agent = Agent(run.link(), run.prepared.build(run.prepared.rates), run.prepared.store, most=9)
    assert all(done.accepted for done in agent.run())
    for path in (tmp_path / "served" / "versions").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"version 3 of the model cannot be read.*from one backup"):
        open_run(tmp_path / "served")


def test_a_fault_of_the_server_is_told_as_one(federate, tmp_path, caplog):
    run = federate()
    agent = Agent(run.link(), run.prepared.build(run.prepared.rates), run.prepared.store, most=9)
    assert all(done.accepted for done in agent.run())
    again = open_run(tmp_path / "served", fresh=1e6)
    link, keys = run.link(), {"item": np.arange(2)}
    ready = lambda: urllib3.request("GET", f"{run.url}/healthz").status
    whole = link.model(keys)
    assert ready() == 200
    (newest,) = (tmp_path / "served" / "versions").glob("00000003-*")
    newest.rename(tmp_path / "away")
    for cache in (run.hub._load, run.hub._version):
        cache.cache_clear()
    caplog.clear()
    with pytest.raises(UnreachableError, match="status 500"):
        link.model(keys)
    assert [record.levelname for record in caplog.records if record.name == "partwise.server"] == ["ERROR"]
    answer = urllib3.request("GET", f"{run.url}/healthz")
    assert (answer.status, str(tmp_path).encode() in answer.data) == (503, False)
    (tmp_path / "away").rename(newest)
    assert link.model(keys) == whole
    assert ready() == 200
    again.hub.close()
