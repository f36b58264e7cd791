"""Operators and devices are different people: tokens, keys, limits, the audit log, what Prometheus reads."""

from __future__ import annotations

import base64
import json
import time

import pytest
import urllib3

from partwise.deployment.auth import DeviceKey, new_token
from partwise.deployment.federation import found_run, open_run
from partwise.deployment.http_link import HttpLink
from partwise.deployment.link import UnreachableError
from partwise.runs.resolve import resolve
from partwise.types import UserError

POOL = urllib3.PoolManager(timeout=120)

SMALL = {
    "data.num_clients": 12,
    "data.num_items": 20,
    "data.mean_examples": 12,
    "data.dim": 2,
    "cohort.size": 3,
    "rounds": 2,
}
OPERATOR_ROUTES = [
    ("GET", "/metrics"),
    ("GET", "/v1/operator/status"),
    ("GET", "/v1/operator/keys"),
    ("POST", "/v1/operator/enroll"),
    ("POST", "/v1/operator/revoke"),
    ("GET", "/v1/operator/audit"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    task, config = resolve("planted", None, SMALL)
    found_run(task, config, folder / "here")
    opened = open_run(folder / "here")
    yield opened
    opened.hub.close()


@pytest.fixture(scope="module")
def url(run, serve):
    with serve(run.hub, run.offer) as url:
        yield url


@pytest.fixture(scope="module")
def token(run):
    token, row = new_token("ada")
    run.hub.keys.enroll(row)
    return token


def ask(url, path, token="", body=None, method=None, **headers):
    """Status and body of the answer to an operator's request."""
    if token:
        headers["authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    answer = POOL.request(
        method or ("GET" if body is None else "POST"), url + path, body=data, headers=headers
    )
    return answer.status, answer.data


def test_all_routes_are_known_here(run, serve):
    """A new route of operators must be in the list that is tried below."""
    from partwise.deployment.http_server import application

    routes = {
        (method, route.path) for route in application(run.hub, run.offer).routes for method in route.methods
    }
    mine = {(method, path) for method, path in routes if "operator" in path or path == "/metrics"}
    assert {pair for pair in mine if pair[0] != "HEAD"} == set(OPERATOR_ROUTES)


@pytest.mark.parametrize(("method", "path"), OPERATOR_ROUTES)
def test_no_key_of_a_device_reaches_an_operators_route(run, url, enroll, token, method, path):
    key = enroll(run.hub)
    signed = key.headers(method, path, b"")
    tries = [{}, signed, {"authorization": f"Bearer {key.device}.x"}, {"authorization": "Bearer ada.wrong"}]
    tries += [
        {"authorization": f"Basic {token}"},
        {"authorization": "Bearer operator:ada"},
        {"authorization": token},
    ]
    for headers in tries:
        status, data = ask(url, path, method=method, **{**signed, **headers})
        assert (status, json.loads(data)["reason"]) == (401, "token")


def test_a_token_reaches_no_route_of_devices(run, url, token):
    assert ask(url, "/v1/run", token)[0] == 401
    for path in ("/v1/join", "/v1/poll", "/v1/reports", "/v1/tasks/t/slices", "/v1/model/slices"):
        assert ask(url, path, token, body={})[0] == 401


def test_an_operator_enrolls_and_revokes_and_it_is_written_down(run, url, token):
    key = DeviceKey.new()
    link = HttpLink(url, key)
    with pytest.raises(UserError, match="not enrolled"):
        link.offer()
    public = base64.b64encode(key.public).decode()
    status, data = ask(url, "/v1/operator/enroll", token, {"public": public, "label": "ann's phone"})
    assert (status, json.loads(data)["device"]) == (200, key.device)
    assert link.offer().run == run.offer.run
    assert ask(url, "/v1/operator/revoke", token, {"name": "ann's phone"})[0] == 200
    with pytest.raises(UserError, match="was revoked"):
        link.offer()
    told = [act["what"] for act in json.loads(ask(url, "/v1/operator/audit", token)[1])["audit"]]
    assert [words.split()[0] for words in told[:3]] == ["read", "revoked", "enrolled"]
    assert all(key.device in words for words in told[1:3])


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/operator/enroll", {"public": "short"}, "32 bytes"),
        ("/v1/operator/enroll", {"public": "§"}, "32 bytes"),
        ("/v1/operator/enroll", {"public": base64.b64encode(bytes(32)).decode(), "days": -1}, "days"),
        ("/v1/operator/enroll", {"public": 3}, "must be of type str"),
        ("/v1/operator/revoke", {"name": "nobody"}, "not enrolled"),
    ],
)
def test_what_an_operator_gets_wrong_is_said(url, token, path, body, words):
    status, data = ask(url, path, token, body)
    assert status == 400
    assert words in json.loads(data)["what"]


def test_a_revoked_operator_is_one_no_longer(run, url):
    token, row = new_token("eve")
    run.hub.keys.enroll(row)
    assert ask(url, "/v1/operator/status", token)[0] == 200
    run.hub.keys.revoke("eve")
    assert ask(url, "/v1/operator/status", token)[0] == 403
    with pytest.raises(UserError, match="letters, digits"):
        new_token("no spaces here")


def test_another_process_sees_what_was_revoked(run, url, enroll, tmp_path):
    """Keys are changed in the journal by another one; the server looks several times a second."""
    from partwise.deployment.journal import Journal
    from partwise.deployment.key_ring import KeyRing

    key = enroll(run.hub, label="shared")
    assert HttpLink(url, key).offer()
    other = Journal(run.hub.journal.url, run.offer.run)
    KeyRing(other).revoke("shared")
    other.close()
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            HttpLink(url, key).offer()
        except UserError:
            return
        time.sleep(0.05)
    pytest.fail("a revoked key still works")


def test_status_and_metrics(run, url, token, enroll):
    HttpLink(url, enroll(run.hub)).join(["somebody"])
    status = json.loads(ask(url, "/v1/operator/status", token)[1])
    assert (status["number"], status["phase"], status["rounds"]) == (0, "waiting", 2)
    assert status["tasks"] == {"asked": 0, "reported": 0, "lost": 0}
    assert (status["waiting"], status["refused"], status["errors"]) == (0, {}, 0)
    assert status["settings"]["task"] == "planted"
    assert json.loads(ask(url, "/v1/operator/status?after=1", token)[1])["versions"] == []
    code, answer = ask(url, "/v1/operator/status?after=-1", token)
    assert (code, b"number of a version" in answer) == (400, True)
    text = ask(url, "/metrics", token)[1].decode()
    assert 'partwise_requests_total{path="/v1/join",status="200"}' in text
    assert "partwise_version 0.0" in text


def test_too_many_requests_are_refused_for_this_device_alone(run, serve, enroll):
    few = run.offer._replace(settings={**run.offer.settings, "deploy.requests": 5})
    with serve(run.hub, few) as url:
        busy, calm = HttpLink(url, enroll(run.hub)), HttpLink(url, enroll(run.hub))
        for _ in range(5):
            busy.offer()
        with pytest.raises(UnreachableError, match="429"):
            busy.offer()
        assert calm.offer()


def test_where_tls_is_required_plain_http_is_refused(run, serve, enroll, token):
    with serve(run.hub, run.offer, tls=True) as url:
        with pytest.raises(UserError, match="over https only"):
            HttpLink(url, enroll(run.hub)).offer()
        assert ask(url, "/v1/operator/status", token)[0] == 403
