"""When a device may work, and what it tells of itself."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import psutil
import pytest

from partwise.deployment import policy
from partwise.deployment.policy import metered, policy_of, status
from partwise.types import UserError


@pytest.fixture(autouse=True)
def _asks_the_network_anew():
    policy._metered.cache_clear()


def battery(monkeypatch, *found):
    there = SimpleNamespace(percent=found[0], power_plugged=found[1]) if found else None
    monkeypatch.setattr(psutil, "sensors_battery", lambda: there, raising=False)


def network(monkeypatch, tmp_path, says, code=0):
    """A `busctl` that gives this answer."""
    (tmp_path / "busctl").write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
    (tmp_path / "busctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")


def test_without_a_policy_a_device_always_works():
    assert policy_of("")()
    assert policy_of(" , ")()


@pytest.mark.parametrize(
    ("found", "allowed"), [((), True), ((80, True), True), ((80, False), False), ((80, None), False)]
)
def test_charging(monkeypatch, found, allowed):
    battery(monkeypatch, *found)
    assert policy_of("charging")() is allowed


def test_a_platform_without_batteries_is_on_mains(monkeypatch):
    monkeypatch.delattr(psutil, "sensors_battery", raising=False)
    assert policy_of("charging")()
    assert status()["battery"] is None


@pytest.mark.parametrize(
    ("says", "found"),
    [("u 1", True), ("u 2", False), ("u 3", True), ("u 4", False), ("u 0", None), ("", None)],
)
def test_unmetered(monkeypatch, tmp_path, says, found):
    network(monkeypatch, tmp_path, says)
    assert metered() is found
    assert policy_of("unmetered")() is (found is not True)


def test_where_nobody_can_say_the_network_is_unmetered(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert metered() is None
    assert policy_of("unmetered")()


def test_idle(monkeypatch):
    cores = os.cpu_count() or 1
    for load, allowed in ((0.0, True), (0.5 * cores, True), (0.7 * cores, False), (9.0 * cores, False)):
        monkeypatch.setattr(psutil, "getloadavg", lambda load=load: (load, 0, 0))
        assert policy_of("idle")() is allowed


def test_all_that_are_named_must_agree(monkeypatch):
    battery(monkeypatch, 50, True)
    monkeypatch.setattr(psutil, "getloadavg", lambda: (0, 0, 0))
    assert policy_of("charging, idle")()
    battery(monkeypatch, 50, False)
    assert not policy_of("charging, idle")()


def test_ones_own_policy(monkeypatch, tmp_path, caplog):
    (tmp_path / "my_policy.py").write_text("def night(): return 1\ndef fails(): return 1 / 0\nnumber = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert policy_of("my_policy:night")() is True
    assert policy_of("my_policy:night,my_policy:fails")() is False
    assert "the policy 'my_policy:fails' failed, which counts as no: ZeroDivisionError" in caplog.text
    for name, message in (
        ("my_policy:nigth", "cannot be imported"),
        ("no_such_module:night", "cannot be imported"),
        ("my_policy:number", "is a int"),
        (":", "cannot be imported"),
        ("chargin", r"unknown policy 'chargin' \(nearest: charging\)"),
        ("charging;idle", "unknown policy"),
    ):
        with pytest.raises(UserError, match=message):
            policy_of(name)


def test_a_device_tells_what_it_knows(monkeypatch, tmp_path):
    battery(monkeypatch, 80, False)
    network(monkeypatch, tmp_path, "u 4")
    monkeypatch.setattr(psutil, "getloadavg", lambda: (0.5 * (os.cpu_count() or 1), 0, 0))
    assert status() == {"battery": 0.8, "charging": False, "metered": False, "load": 0.5}


def test_without_psutil_a_policy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(UserError, match=r"pip install 'partwise\[deploy\]'"):
        policy_of("charging")()
