"""`partwise watch URL`: what a coordinator tells operators, and nothing that it may not tell."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from partwise.deployment.agent import Agent
from partwise.deployment.auth import new_token

COUNTS = {"devices that wait", "reports of this round", "reports refused"}
PRIVATE = {"privacy.clip": 1.0, "privacy.noise": 1.0, "privacy.delta": 1e-3, "server.weighting": "uniform"}
PRIVATE |= {"cohort.sampling": "poisson", "deploy.population": 24}


def watched(url, token):
    """What the command says, in a process of its own."""
    command = [sys.executable, "-m", "partwise.cli", "watch", url, "--token", str(token), "--json"]
    done = subprocess.run(command, capture_output=True, check=False)
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def operator(tmp_path):
    """A function that lets an operator in, and returns the file of the token."""

    def enrolled(hub):
        token, row = new_token("ada")
        hub.keys.enroll(row)
        (tmp_path / "ada.token").write_text(token)
        return tmp_path / "ada.token"

    return enrolled


def test_a_coordinator_is_watched_from_the_first_round_to_the_last(federate, operator, tmp_path):
    run = federate(settings={"rounds": 2})
    token = operator(run.hub)
    code, told = watched(run.url, token)
    assert code == 0
    assert (told["state"], told["round"], told["rounds"]) == ("serving", 0, 2)
    assert (told["task"], told["algorithm"]) == ("planted", "fed_recon")
    assert set(told["devices"]) >= COUNTS
    agent = Agent(run.link(), run.prepared.build(run.prepared.rates), run.prepared.store)
    reported = [done.accepted for done in agent.run()]
    code, told = watched(run.url, token)
    assert (told["state"], told["round"]) == ("finished", 2)
    records = run.hub.records()
    assert told["loss"] == records[-1]["loss"]
    assert told["bytes"] == sum(each["bytes_down"] + each["bytes_up"] for each in records) > 0
    assert any(reported)
    (tmp_path / "bob.token").write_text("ada.wrong")
    code, told = watched(run.url, tmp_path / "bob.token")
    assert (code, "refused" in told["error"]) == (2, True)


def test_under_a_promise_nobody_is_told_how_many_take_part(federate, operator):
    run = federate(settings=PRIVATE)
    code, told = watched(run.url, operator(run.hub))
    assert (code, told["state"]) == (0, "serving")
    assert not COUNTS & set(told["devices"])
