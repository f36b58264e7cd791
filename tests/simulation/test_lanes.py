"""Lanes are measured once, remembered if the measurement can be trusted, and read back only if they make sense."""

from __future__ import annotations

import dataclasses
import json

import pytest

from partwise.checkpoint import save_json
from partwise.simulation import lanes
from partwise.simulation.lanes import choose_lanes


@dataclasses.dataclass
class Timed:
    """In place of a simulation: one whose rounds take so long by the number of lanes."""

    lanes: int

    def use_lanes(self, lanes: int) -> None:
        self.lanes = lanes

    def lane_bytes(self) -> int:
        return 1

    def rehearse(self) -> float:
        return {8: 0.5, 32: 0.2, 1: 0.4}[self.lanes]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "partwise" / "lanes"


def others(monkeypatch, *seconds):
    """What other processes have used before and after a measurement."""
    left = list(seconds)
    monkeypatch.setattr(lanes, "_others", lambda: left.pop(0))


def test_a_measurement_on_a_quiet_machine_is_remembered(monkeypatch, cache):
    others(monkeypatch, 100.0, 100.0)
    assert choose_lanes(Timed, 1000, "a").lanes == 32
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(Timed, "rehearse", lambda self: 1 / 0)
    assert choose_lanes(Timed, 1000, "a").lanes == 32


def test_lanes_that_a_small_cohort_has_not_are_not_measured_twice(monkeypatch):
    measured = []

    class Few(Timed):
        def use_lanes(self, lanes: int) -> None:
            self.lanes = min(lanes, 5)

        def rehearse(self) -> float:
            measured.append(self.lanes)
            return {5: 3.0, 1: 2.5}[self.lanes]

    others(monkeypatch, 0.0, 0.0)
    assert choose_lanes(Few, 1000, "a").lanes == 1
    assert measured == [5, 1]


@pytest.mark.parametrize("after", [1e9, float("inf"), float("nan"), 0.0])
def test_a_measurement_beside_others_is_used_and_not_remembered(monkeypatch, cache, after):
    """Nor one of which that is not known: also not where the machine says that less was used than before."""
    others(monkeypatch, 100.0, after)
    assert choose_lanes(Timed, 1000, "a").lanes == 32
    assert not cache.exists()


def test_what_others_use_is_told_or_infinite(monkeypatch):
    assert lanes._others() > 0
    monkeypatch.setattr("pathlib.Path.read_text", lambda self: "cpu none")
    assert lanes._others() == float("inf")


@pytest.mark.parametrize(
    "content",
    [b'{"lanes": -3}', b"[]", b'{"lanes": "many"}', b'{"lanes": true}', b"\xff", b"", b"null", None],
)
def test_a_broken_cache_is_measured_anew(monkeypatch, cache, content):
    file = lanes._file("a")
    file.parent.mkdir(parents=True)
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    others(monkeypatch, 0.0, 0.0)
    assert choose_lanes(Timed, 1000, "a").lanes == 32


@pytest.mark.parametrize("number", [-3, 0, 10**9, 2.5, "8", None])
def test_a_cache_that_makes_no_sense_is_measured_anew(monkeypatch, cache, number):
    save_json(lanes._file("a"), {"lanes": number})
    others(monkeypatch, 0.0, 0.0)
    assert choose_lanes(Timed, 1000, "a").lanes == 32
    assert json.loads(lanes._file("a").read_text())["lanes"] == 32
