"""Schedules of fleets against the obvious: one event at a time, from heaps."""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
import pytest

from partwise.simulation.fleet.arrivals import make_arrivals
from partwise.simulation.fleet.buffered import buffered
from partwise.simulation.fleet.counting import by_hour, count_windows, quantile, staleness_of
from partwise.simulation.fleet.devices import fit
from partwise.simulation.fleet.draws import Draws, VersionClients
from partwise.simulation.fleet.flight import ClientWork, World, begin
from partwise.simulation.fleet.synchronous import in_rounds
from partwise.simulation.fleet.tempo import Tempo
from partwise.simulation.fleet.trace import DROPOUT, HOURS, SESSION, synthetic_trace
from partwise.types import UserError

CLIENTS, HOUR = 40, 3600.0


def make_world(num_devices=10_000, hours=0.3, lease=120.0, every=600.0, **columns):
    """A fleet whose trace has these values in place of the made-up ones."""
    trace = dict(synthetic_trace(200, seed=3))
    trace |= {name: np.full(200, float(value)) for name, value in columns.items()}
    devices, horizon = fit(trace), hours * HOUR
    examples = np.random.default_rng(5).integers(1, 400, CLIENTS)
    work = ClientWork(examples, 5e4 + 800.0 * examples, 7e4 + 800.0 * examples)
    return World(devices, make_arrivals(devices, num_devices, every, horizon), work, lease, horizon)


def one_task(world, draws, task, version, client, start):
    """A task that is taken now."""
    done = begin(world, task, version, np.array([client]), np.array([start]), draws.rows(1))
    draws.drop(1)
    return {name: values[0] for name, values in done._asdict().items()}


def buffered_one_by_one(world, tempo):
    """FedBuff from heaps: tasks that are free, and reports on their way. Yields (end, [(task, client, version)],
    clients whose reports are refused) for every version."""
    draws, free, reports = Draws(tempo.seed), [0.0] * tempo.concurrency, []
    version, task, last, buffer, out, count = 0, 0, 0.0, [], {}, 0
    drawn = VersionClients(tempo.seed, CLIENTS, 0, tempo.concurrency)
    while True:
        taken = max(last, world.arrivals.mass_at(free[0])) + draws.rows(1).gap[0] if free else np.inf
        start = world.arrivals.time_at(taken)
        if min(start, reports[0][0] if reports else np.inf) > world.horizon:
            return
        if not reports or start < reports[0][0]:
            heapq.heappop(free)
            one = one_task(world, draws, task, version, drawn.first(count + 1)[count], start)
            out[task], task, last, count = one, task + 1, taken, count + 1
            heapq.heappush(free, one["free"]) if np.isinf(one["report"]) else heapq.heappush(
                reports, (one["report"], one["task"])
            )
            continue
        now, number = heapq.heappop(reports)
        if number not in out:
            continue  # it was too old, and is forgotten
        buffer.append(out.pop(number))
        if len(buffer) < tempo.buffer:
            continue
        version += 1
        old = [one for one in out.values() if version - one["version"] > tempo.stalest and one["free"] >= now]
        out = {one["task"]: one for one in out.values() if version - one["version"] <= tempo.stalest}
        for one in old:
            if np.isinf(one["report"]):
                free.remove(one["free"])  # that of a device that has vanished
        heapq.heapify(free)
        members = sorted((one["task"], one["client"], one["version"]) for one in buffer)
        yield now, members, sorted(one["client"] for one in old if np.isfinite(one["report"]))
        waiting = sum(each <= now for each in free)
        for _ in range(len(old) + len(buffer)):
            heapq.heappush(free, now)
        buffer, count = [], 0
        drawn = VersionClients(tempo.seed, CLIENTS, version, waiting + len(old) + tempo.buffer)


TEMPOS = {
    "many at once": ({}, Tempo(1, 5, 5, 5, 600.0, buffer=5, concurrency=40, stalest=20)),
    "few at once": ({}, Tempo(2, 5, 5, 5, 600.0, buffer=5, concurrency=6, stalest=20)),
    "the old are refused": ({}, Tempo(3, 3, 3, 3, 600.0, buffer=3, concurrency=30, stalest=4)),
    "all at once": ({}, Tempo(4, 8, 8, 8, 600.0, buffer=8, concurrency=8, stalest=0)),
    "many vanish": ({DROPOUT: 0.6}, Tempo(5, 5, 5, 5, 600.0, buffer=5, concurrency=12, stalest=6)),
    "short leases": (
        {DROPOUT: 0.5, "lease": 0.1, SESSION: 60},
        Tempo(6, 20, 20, 20, 600.0, buffer=20, concurrency=30),
    ),
    "few devices": (
        {"num_devices": 300, "every": 900.0},
        Tempo(7, 4, 4, 4, 600.0, buffer=4, concurrency=16, stalest=3),
    ),
    "one at a time": ({"hours": 0.1}, Tempo(8, 1, 1, 1, 600.0, buffer=1, concurrency=10, stalest=9)),
}


@pytest.mark.parametrize("name", TEMPOS)
def test_a_buffered_schedule_is_that_of_events_one_by_one(name):
    changes, tempo = TEMPOS[name]
    world = make_world(**changes)
    plain = list(buffered_one_by_one(world, tempo.check()))
    found = [window for window in buffered(world, tempo) if window.made]
    assert len(found) == len(plain) > 5
    for window, (end, members, refused) in zip(found, plain, strict=True):
        mine = window.members
        assert list(zip(mine.task, mine.client, mine.version, strict=True)) == members
        assert window.closed == pytest.approx(end, rel=1e-9)
        assert sorted(window.unused) == refused
    assert all(before.closed == after.opened for before, after in pairwise(found))


def rounds_one_by_one(world, tempo):
    """Rounds as `deployment.coordinator` decides on them, after each thing that happens. Yields (end, whether a
    version is made, clients of the reports that are used)."""
    draws, now, version, attempt, task = Draws(tempo.seed), 0.0, 0, 0, 0
    while now < world.horizon:
        opened, over, drawn = (
            now,
            now + tempo.deadline,
            VersionClients(tempo.seed, CLIENTS, version + (attempt << 32), tempo.asked),
        )
        events, taken, clients = [(min(over, world.horizon), "over", -1)], world.arrivals.mass_at(opened), []
        for number in range(tempo.asked):
            taken = taken + draws.rows(1).gap[0]
            start = world.arrivals.time_at(taken)
            if start >= world.horizon:
                draws.drop(1)
                continue
            one = one_task(world, draws, task, version, drawn.first(number + 1)[number], start)
            clients.append(one["client"])
            events.append(
                (min(one["report"], one["free"]), "lost" if np.isinf(one["report"]) else "come", number)
            )
        come, lost, verdict = [], 0, "open"
        for time, what, number in sorted(events):
            now = time
            come, lost = come + [number] * (what == "come"), lost + (what == "lost")
            if len(come) >= (tempo.size if tempo.asked > tempo.size else tempo.asked):
                verdict = "close"
            elif what == "over" or len(come) + lost == tempo.asked:
                enough = len(come) >= tempo.quorum and (what != "over" or over <= world.horizon)
                verdict = "close" if enough else "repeat" if what == "over" else "open"
            if verdict != "open":
                break
        yield now, verdict == "close", [clients[each] for each in sorted(come)] if verdict == "close" else []
        version, attempt = (version + 1, 0) if verdict == "close" else (version, attempt + 1)


ROUNDS = {
    "all": ({DROPOUT: 0, SESSION: 1e9}, Tempo(1, 6, 6, 6, 1e6)),
    "over-selection": ({}, Tempo(2, 10, 13, 8, 300.0)),
    "a quorum": ({}, Tempo(3, 10, 10, 6, 1e6)),
    "a deadline": ({}, Tempo(4, 10, 10, 3, 40.0)),
    "often repeated": ({DROPOUT: 0.2}, Tempo(5, 6, 7, 6, 60.0)),
    "few devices": ({"num_devices": 100}, Tempo(6, 5, 8, 2, 120.0)),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_rounds_are_those_of_events_one_by_one(name):
    changes, tempo = ROUNDS[name]
    world = make_world(**changes)
    plain, found = list(rounds_one_by_one(world, tempo.check())), list(in_rounds(world, tempo))
    assert len(found) == len(plain)
    assert sum(window.made for window in found) > 3
    for window, (end, made, clients) in zip(found, plain, strict=True):
        assert window.closed == pytest.approx(end, rel=1e-9)
        assert (window.made, list(window.members.client)) == (made, clients)
        assert (window.members.version == window.number).all()


def test_a_buffer_of_all_that_is_at_work_is_a_synchronous_run():
    """Nothing is stale, and every version is made of the cohort that a round draws."""
    world = make_world(hours=1, **{DROPOUT: 0, SESSION: 1e9})
    in_buffers = [each for each in buffered(world, Tempo(7, 6, 6, 6, 1e6, 6, 6)) if each.made]
    rounds = [each for each in in_rounds(world, Tempo(7, 6, 6, 6, 1e6)) if each.made]
    assert len(in_buffers) == len(rounds) > 10
    for one, other in zip(in_buffers, rounds, strict=True):
        np.testing.assert_array_equal(one.members.client, other.members.client)
        np.testing.assert_array_equal(one.members.version, other.members.version)
        assert one.closed == pytest.approx(other.closed, rel=1e-9)


def test_devices_ask_as_often_as_they_are_there():
    """Counts of a long schedule against the rate: in the dead of the day nobody is there."""
    night = {name: float(hour < 6) for hour, name in enumerate(HOURS)}
    world = make_world(1000, hours=24, every=3600.0, zone=0.0, **night, **{DROPOUT: 0, SESSION: 1e9})
    counts = count_windows(buffered(world, Tempo(1, 20, 20, 20, 1.0, buffer=20, concurrency=400)), world)
    started = [line["started"] for line in by_hour(counts, 24)]
    assert not any(started[7:])
    assert np.mean(started[:6]) == pytest.approx(1000, rel=0.05)


def test_classes_that_are_there_and_fast_report_more():
    world = make_world(10_000, hours=2)
    counts = count_windows(buffered(world, Tempo(1, 50, 50, 50, 1.0, buffer=50, concurrency=200)), world)
    share = dict(zip(world.devices.names, counts.classes / counts.classes.sum(), strict=True))
    assert share["slow"] < world.devices.class_share[world.devices.names.index("slow")]
    assert counts.classes.sum() == counts.made["used"].sum() == counts.staleness.sum()
    assert (counts.classes_started >= counts.classes).all()


def test_what_is_counted():
    assert quantile(np.array([5, 4, 1]), 0.5) == 0
    assert quantile(np.array([5, 4, 1]), 0.99) == 2
    world, tempo = make_world(), TEMPOS["many at once"][1]
    windows = list(buffered(world, tempo))
    counts = count_windows(windows, world, keep=3)
    old = np.concatenate([window.number - window.members.version for window in windows])
    assert staleness_of(counts) == {
        "mean": pytest.approx(old.mean()),
        "p50": np.quantile(old, 0.5, method="inverted_cdf"),
        "p99": np.quantile(old, 0.99, method="inverted_cdf"),
        "max": old.max(),
    }
    assert [list(each.clients) for each in counts.buffers] == [list(w.members.client) for w in windows[:3]]
    hours = by_hour(counts, 0.3)
    assert (len(hours), hours[0]["versions"], hours[0]["used"]) == (1, len(windows) - 1, len(old))
    sent = [*(window.members.client for window in windows), *(window.unused for window in windows)]
    assert hours[0]["bytes_up"] == pytest.approx(world.work.up[np.concatenate(sent)].sum())


@pytest.mark.parametrize(
    ("tempo", "told"),
    [
        (Tempo(0, 5, 5, 5, 1.0, buffer=6, concurrency=5), "a buffer of 6 reports is never full with 5 tasks"),
        (Tempo(0, 5, 5, 6, 1.0), "quorum of 1 to the 5 reports"),
        (Tempo(0, 5, 4, 5, 1.0), "asks no fewer devices"),
    ],
)
def test_a_tempo_that_makes_no_versions_is_refused(tempo, told):
    with pytest.raises(UserError, match=told):
        tempo.check()
