"""A task on a fleet: what it tells, what it writes, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest

import partwise as pw
from partwise.algorithms.registry import prepare
from partwise.cli import main
from partwise.runs.fleet_traffic import Pages, _misses, cached, messages_of
from partwise.runs.folder import Folder
from partwise.runs.resolve import resolve
from partwise.selection.serving import WAYS, serve, sizes_of
from partwise.simulation.fleet.trace import HOURS, read_trace, synthetic_trace, write_trace
from partwise.types import UserError

PLANTED = {"data.num_clients": 60, "data.num_items": 30, "data.mean_examples": 12, "data.dim": 4}
PLANTED |= {"cohort.size": 6}
BUFFER = {"deploy.buffer": 5, "deploy.concurrency": 30}


def simulate(devices=100_000, hours=0.5, **more):
    changes = {**PLANTED, **more.pop("changes", {})}
    return pw.fleet("planted", devices=devices, hours=hours, changes=changes, **more)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A fleet with a buffer and caches, and its folder."""
    folder = tmp_path_factory.mktemp("fleet")
    changes = {**BUFFER, "serving.way": "pregenerated"}
    return simulate(changes=changes, out=folder), folder


def test_what_is_told_agrees_with_itself(written):
    found, _ = written
    result, lines = found.result, found.counts.lines
    day, hour = result["per_day"], result["by_hour"]
    assert day["versions"] == pytest.approx(48 * sum(line["versions"] for line in hour))
    assert day["used"] == pytest.approx(5 * day["versions"])
    assert day["reports"] == pytest.approx(day["used"] + day["unused"])
    assert sum(result["staleness_counts"]) == lines["used"].sum()
    assert sum(each["share_of_used"] for each in result["classes"]) == pytest.approx(1)
    for name in ("bytes_from_server", "bytes_to_server", "bytes_from_cdn"):
        assert day[name] == pytest.approx(48 * sum(line[name] for line in hour))
    assert 0 < result["caches"]["hit_share"] < 1
    assert day["devices_reached"] <= day["tasks"] + 1e-6


def test_a_folder_has_the_json_the_picture_and_the_trace(written):
    found, folder = written
    assert json.loads((folder / "fleet.json").read_text())["per_day"] == pytest.approx(
        found.result["per_day"]
    )
    assert (folder / "fleet.png").read_bytes().startswith(b"\x89PNG")
    again = simulate(changes={**BUFFER, "serving.way": "pregenerated"}, trace=folder / "trace.csv")
    np.testing.assert_array_equal(again.counts.lines, found.counts.lines)


def test_a_seed_is_a_schedule_and_the_number_of_devices_is_not_its_cost(written):
    found, _ = written
    other = simulate(changes={**BUFFER, "seed": 1})
    assert not np.array_equal(other.counts.lines["closed"][:5], found.counts.lines["closed"][:5])
    many = simulate(devices=10**8, changes=BUFFER)
    assert many.result["per_day"]["versions"] == pytest.approx(other.result["per_day"]["versions"], rel=0.2)


@pytest.mark.parametrize("way", WAYS)
def test_messages_are_those_that_serving_counts(way):
    """The sum over clients is what `serve` says of a round of all of them; pages are whole, so more goes down."""
    task, config = resolve("planted", None, {**PLANTED, "serving.way": way, "deploy.page_rows": 4})
    prepared = prepare(task, config)
    found, demands = messages_of(prepared, config), {}
    algorithm = prepared.build(prepared.rates)
    sizes = sizes_of(algorithm.partition, algorithm.choose)
    from partwise.reports.serving_costs import _draw

    everyone = prepared._replace(recruiting=prepared.recruiting._replace(size=prepared.store.num_clients))
    clients, demands = _draw(everyone, algorithm, 0, 0)
    told = serve(sizes, clients, demands)[way]
    assert found.up.sum() == told.bytes_up
    if way == "pregenerated":
        assert found.down.sum() >= told.bytes_down
        pages = found.pages["item"]
        taken = (found.down - sizes.fixed) / pages.num_bytes
        assert taken.sum() == pytest.approx(pages.heat.sum() * clients)
        assert (np.diff(pages.heat) <= 1e-9).mean() > 0.5  # hottest first, nearly: pages have several keys
    else:
        assert found.down.sum() == told.bytes_down
        own = found.down.sum() if found.by_server is None else clients * found.by_server
        assert own + found.each_version == told.from_server


def test_a_cache_misses_as_often_as_one_that_is_simulated():
    rng, versions = np.random.default_rng(0), 50_000
    for asked, changes in ((0.3, 0.2), (2.0, 0.05), (1.0, 1.0), (0.05, 0.5)):
        changed, requests = rng.random(versions) < changes, rng.poisson(asked, versions)
        there, missed = False, 0
        for change, number in zip(changed.tolist(), requests.tolist(), strict=True):
            there = there and not change
            missed += bool(number) and not there
            there = there or bool(number)
        assert _misses(np.array([asked]), np.array([changes]))[0] == pytest.approx(
            missed / versions, rel=0.05
        )
    assert _misses(np.zeros(1), np.zeros(1))[0] == 0


def test_hot_pages_are_cached_and_changes_undo_it():
    pages = lambda change: {"item": Pages(np.linspace(1, 0.001, 1000), 100, change)}
    kept, changed = (cached(pages(change), 100, 2, edges=10) for change in (False, True))
    bands = list(kept["hit_share_by_heat"].values())
    assert bands == sorted(bands, reverse=True)
    assert changed["hit_share"] < kept["hit_share"]
    assert cached({}, 100, 100, 10)["hit_share"] is None
    assert cached(pages(True), 100, 100, 1)["fetched_per_version"] <= 100 * 1000


@pytest.mark.parametrize(
    ("changes", "more", "told"),
    [
        ({"deploy.buffer": 10}, {}, "a buffer of 10 reports is never full with 6 tasks"),
        (
            {"deploy.buffer": 5, "deploy.concurrency": 90},
            {"devices": 100},
            "90 devices are to work at a time",
        ),
        (
            {"deploy.deadline": 0.5},
            {"hours": 0.02},
            r"no version is made.*quorum of 6.*deploy.deadline is 0.5 s",
        ),
        (BUFFER, {"every": 1e8, "devices": 1000}, "no version is made.*buffer of 5"),
        ({"cohort.dropout": 0.1}, {}, "cohort.dropout = 0.1 is not for a fleet: the trace"),
        ({"cohort.sampling": "poisson"}, {}, "cohort.sampling = poisson is not for a fleet"),
        ({}, {"hours": 0}, "'hours' must be between"),
        ({}, {"devices": 0}, "'devices' must be between"),
        (BUFFER, {"rounds": 100_000}, "have only .* simulate more hours"),
        ({}, {"trace": "nowhere.csv"}, "nowhere.csv"),
        (BUFFER | {"simulation.backend": "plain"}, {"rounds": 1}, "simulation.backend = plain is for"),
    ],
)
def test_what_cannot_be_is_refused(changes, more, told):
    with pytest.raises(UserError, match=told):
        simulate(changes=changes, **more)


def test_devices_that_are_never_there_or_seldom(tmp_path):
    """A trace of nobody is refused; one of the night makes versions at night only."""
    trace = dict(synthetic_trace(50))
    write_trace(tmp_path / "never.csv", trace | {name: np.zeros(50) for name in HOURS})
    with pytest.raises(UserError, match=r"never.csv.*no device of the trace is ever available"):
        simulate(trace=tmp_path / "never.csv")
    night = {name: np.full(50, float(hour < 2)) for hour, name in enumerate(HOURS)} | {"zone": np.zeros(50)}
    write_trace(tmp_path / "night.parquet", trace | night)
    assert read_trace(tmp_path / "night.parquet")["hour_1"].all()
    changes = {"deploy.buffer": 50, "deploy.concurrency": 100}
    found = simulate(1000, hours=8, trace=tmp_path / "night.parquet", changes=changes)
    versions = [line["versions"] for line in found.result["by_hour"]]
    assert versions[0] > 5
    assert not any(versions[4:])
    assert found.result["notes"]  # most of those that are there work at once


def test_the_command_prints_one_document_or_a_table(capsys, tmp_path):
    given = ["fleet", "planted", "--devices", "1e5", "--hours", "0.5", "--quiet", "--seed", "3"]
    given += [each for key, value in {**PLANTED, **BUFFER}.items() for each in ("--set", f"{key}={value}")]
    assert main([*given, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["seed"], told["devices"], told["rules"]["buffer"]) == (3, 100_000, 5)
    assert main([*given, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    for words in ("versions of the model", "A used report is", "Devices are made up", "are in"):
        assert words in printed
    assert main([*given, "--hours", "many"]) == 2
    assert "'--hours' must be a number" in capsys.readouterr().err


TRAINED = {"simulation.lanes": 3, "simulation.evaluate_every": 2}


@pytest.mark.slow
def test_what_is_at_work_at_once_as_a_buffer_is_the_synchronous_run_bit_for_bit(tmp_path):
    trace = dict(synthetic_trace(50))
    always = {"dropout": np.zeros(50), "session_seconds": np.full(50, 1e12)}
    write_trace(tmp_path / "trace.csv", trace | always)
    changes = {**TRAINED, "deploy.buffer": 6, "deploy.concurrency": 6}
    found = simulate(trace=tmp_path / "trace.csv", changes=changes, rounds=4)
    run = pw.train("planted", changes={**PLANTED, **TRAINED}, rounds=4)
    assert found.result["staleness"]["max"] == 0
    assert found.run.params.keys() == run.params.keys()
    for path, leaf in run.params.items():
        np.testing.assert_array_equal(found.run.params[path], leaf)
    assert found.run.summary["test"]["rmse"] == run.summary["test"]["rmse"]


def test_a_trained_fleet_is_a_run_with_a_clock(tmp_path):
    found = simulate(changes={**BUFFER, **TRAINED}, rounds=5, out=tmp_path)
    trained, closed = found.result["trained"], found.counts.made["closed"]
    assert [each["version"] for each in trained["curve"]] == [2, 4, 5]
    assert [each["hours"] for each in trained["curve"]] == pytest.approx(
        [closed[i] / 3600 for i in (1, 3, 4)]
    )
    assert (trained["metric"], trained["test"]) == ("rmse", found.run.test["rmse"])
    assert max(int((t - each.versions).max()) for t, each in enumerate(found.counts.buffers)) > 0
    assert pw.load(tmp_path / "run").test["rmse"] == pytest.approx(trained["test"])
    assert (tmp_path / "fleet.png").exists()
    with pytest.raises(UserError, match=r"holds the run of a fleet.*--resume"):
        pw.train(out=tmp_path / "run", resume=True)
    with pytest.raises(UserError, match="already holds a run"):
        simulate(changes={**BUFFER, **TRAINED}, rounds=5, out=tmp_path)


def test_a_training_that_was_killed_goes_on_to_the_same_bytes(tmp_path):
    """Stopped after its second checkpoint, with reports that are late in the older versions that it keeps."""
    given = {"changes": {**BUFFER, **TRAINED, "simulation.checkpoint_every": 1}, "rounds": 6}
    whole = simulate(**given, out=tmp_path / "whole")

    def stop(status):
        if status.round == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(**given, out=tmp_path / "parts", progress=stop)
    assert Folder(tmp_path / "parts" / "run").rounds_done() == 3
    found = simulate(**given, out=tmp_path / "parts", resume=True)
    assert found.result["trained"]["curve"] == whole.result["trained"]["curve"]
    assert found.result["staleness"]["max"] > 0
    one, other = (tmp_path / name / "run" / "model.safetensors" for name in ("whole", "parts"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"devices": 1000}, "was begun with another schedule: go on with the same devices"),
        ({"changes": {**BUFFER, **TRAINED, "server.rate": 0.5}}, "server.rate was .* and is 0.5"),
        ({"out": "elsewhere"}, "holds no run to go on with"),
        ({"out": None}, "only a training that is recorded goes on"),
        ({"rounds": 0}, "only a training that is recorded goes on"),
    ],
)
def test_only_the_same_training_goes_on(tmp_path, monkeypatch, more, told):
    monkeypatch.chdir(tmp_path)
    given = {"changes": {**BUFFER, **TRAINED}, "rounds": 2, "out": "fleet"}
    simulate(**given)
    with pytest.raises(UserError, match=told):
        simulate(**{**given, **more}, resume=True)
