"""Files of slices that are gone: of a version that was deleted while a device was away, or lost by their host."""

from __future__ import annotations

import logging
import time

import pytest

from partwise.deployment.agent import _begin
from partwise.deployment.coordinator import Wait
from partwise.deployment.http_link import HttpLink
from partwise.deployment.own_store import OwnStore
from partwise.deployment.resident import Pace, Resident

ANN = "user,item,rating\nann,1,2.0\nann,2,5.0\n"


@pytest.fixture(autouse=True)
def _says_everything(caplog):
    caplog.set_level(logging.INFO, "partwise.agent")
    caplog.set_level(logging.INFO, "partwise.server")


def resident(link, data, **pace):
    """An agent that waits only shortly, and its waits."""
    waits = []
    sleep = lambda seconds: (waits.append(seconds), time.sleep(min(seconds, 0.02)))
    begin = lambda: _begin(link, str(data), None, OwnStore(), 10)
    return Resident(link, begin, Pace(sleep=sleep, **pace)), waits


@pytest.mark.parametrize("way", ["broadcast", "pregenerated"])
def test_a_device_that_comes_back_to_files_that_are_gone_asks_anew_at_once(
    federate, wait_until, tmp_path, caplog, way
):
    settings = {"serving.way": way, "deploy.keep": 1, "rounds": 12}
    run = federate(settings=settings, lease=0.2)
    (tmp_path / "ann.csv").write_text(ANN)
    (tmp_path / "bob.csv").write_text(ANN.replace("ann", "bob"))
    link = run.link()
    other = resident(link, tmp_path / "bob.csv")[0].run()
    key, polls = run.key(), []
    link.join(["bob"])
    link.poll(True, 1)  # so that a round opens

    class Away(HttpLink):
        """A device that sleeps after its first task was given, while the other one goes on."""

        def poll(self, *said):
            given = super().poll(*said)
            if isinstance(given, Wait):
                return given
            polls.append(len(waits))
            if len(polls) == 1:
                begun, coordinator = run.hub.round().number, run.hub.coordinator
                while run.hub.round().number < begun + 4:
                    next(other)
                coordinator.rules = coordinator.rules._replace(lease=1e6)  # however busy the machine is
                wait_until(lambda: run.hub.round().phase != "closing")
                run.hub._forget(time.time())
            return given

    agent, waits = resident(Away(run.url, key, hold=0.2), tmp_path / "ann.csv")
    done = []
    for each in agent.run():
        done.append(each)
        if len(done) == 2:
            break
    assert [each.reason for each in done] == ["gone", ""]
    assert "came to nothing (gone): its version is not kept any more" in caplog.text
    assert "declines task" not in caplog.text
    assert polls[1] == polls[0]  # without a wait in between


def test_files_that_should_be_there_and_are_not_are_declined(federate, tmp_path, caplog):
    run = federate(settings={"serving.way": "pregenerated", "cohort.size": 1}, lease=1e6, deadline=1e6)
    (tmp_path / "ann.csv").write_text(ANN)
    for path in (tmp_path / "served" / "files").iterdir():
        path.unlink()
    agent, waits = resident(run.link(), tmp_path / "ann.csv", stopped=lambda: len(done) == 2)
    done = []
    for each in agent.run():
        done.append(each)
    assert [each.reason for each in done] == ["gone", "gone"]
    [declined] = [line for line in caplog.text.splitlines() if "declines task" in line]
    assert declined.endswith("(gone)")
    assert waits[-1] > 0.2  # and then it waits
