"""Masked sums over a network: the server adds up what it cannot read, and the model is the simulated one."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy import stats

from partwise.config.protection import protection
from partwise.config.secure_sums import noise_share
from partwise.deployment import masked_sums
from partwise.deployment.agent import Agent
from partwise.deployment.federation import found_run
from partwise.deployment.http_link import HttpLink
from partwise.deployment.jobs import ADVERTISE, MASK, SHARE, UNMASK, Work
from partwise.deployment.link import UnreachableError
from partwise.deployment.offered import algorithm_of
from partwise.privacy.masked_client import MaskedClient
from partwise.privacy.masked_letters import STAMP_BYTES, stamped
from partwise.privacy.masked_server import unmasked
from partwise.runs.resolve import resolve
from partwise.server import masked_form, skellam_sum
from partwise.server.cohort import Cohort
from partwise.server.masked_form import MaskingForm, masked_context
from partwise.server.messages import about
from partwise.server.round import Accepted
from partwise.server.word_form import WordForm
from partwise.simulation import plain as simulation
from partwise.simulation.plain import PlainSimulation
from partwise.types import UserError

MASKING = {
    "data.num_clients": 12,
    "data.num_items": 12,
    "data.mean_examples": 10,
    "data.dim": 2,
    "cohort.size": 6,
    "rounds": 2,
    "server.schedule": "constant",
    "server.weighting": "uniform",
    "privacy.clip": 1.0,
    "privacy.noise": 0.0,
    "privacy.sums": "masked",
    "serving.way": "broadcast",
}


class Masked(NamedTuple):
    """A run with masked sums on a real server."""

    prepared: Any
    config: Any
    hub: Any
    offer: Any
    url: str
    server: Any  # what stops it
    again: Any  # starts another one in the same folder

    @property
    def store(self):
        return self.prepared.store

    @property
    def algorithm_parts(self):
        algorithm = self.hub.coordinator.server.algorithm
        return algorithm.aggregator, algorithm.partition

    def check(self) -> None:
        """That the model is the plain backend's over those who are counted, bit for bit."""
        assert self.hub.round().phase == "ended"
        places = {str(name): place for place, name in enumerate(self.store.client_ids.tolist())}
        cohorts = [[places[name] for name in self.counted(number)] for number in range(self.config.rounds)]
        plain = PlainSimulation(
            self.prepared.build,
            self.prepared.rates,
            self.store,
            self.prepared.recruiting,
            seed=self.config.seed,
        )
        with pytest.MonkeyPatch.context() as patch:
            cohort = lambda wanted, counts, seed, number: Cohort(np.array(cohorts[number]), 0, 0, 0)
            patch.setattr(simulation, "recruit", cohort)
            list(plain.run(self.config.rounds))
        for path, leaf in plain.state.params.items():
            found = np.asarray(self.hub.state(self.config.rounds).params[path])
            np.testing.assert_array_equal(found, np.asarray(leaf))

    def tasks(self, number, attempt=None):
        attempt = self.attempt(number) if attempt is None else attempt
        return self.hub.clerk.do(lambda book: book.tasks("train", number, attempt))

    def attempt(self, number):
        return self.hub.records()[number]["attempt"]

    def counted(self, number):
        """The clients in the sum of a round."""
        return [task.client for task in self.tasks(number) if task.counted is not None]


@pytest.fixture
def masked(founded):
    """A function that founds a run and serves it."""
    return lambda settings=(), **rules: founded(Masked, MASKING | dict(settings), **rules)


def agents(run, links):
    """A device for each link; they share the clients."""
    found = []
    for share, link in zip(np.array_split(np.arange(run.store.num_clients), len(links)), links, strict=True):
        mine = run.store.gather(share)
        found.append(Agent(link, algorithm_of(run.offer, mine), mine))
    return found


def take_part(devices):
    """Devices in threads, until the run ends."""
    threads = [threading.Thread(target=lambda each=each: list(each.run()), daemon=True) for each in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()


def links(run, enroll, number):
    return [HttpLink(run.url, enroll(run.hub), hold=0.2) for _ in range(number)]


@pytest.mark.slow  # the next test compares the model too, with clients that are lost
def test_the_model_is_the_simulated_one_bit_for_bit(masked, enroll):
    run = masked()
    take_part(agents(run, links(run, enroll, 2)))
    assert [len(run.counted(number)) for number in range(2)] == [6, 6]
    assert [run.attempt(number) for number in range(2)] == [0, 0]
    run.check()
    assert run.hub.clerk.do(lambda book: book.connection.exec_driver_sql("SELECT * FROM letters").all()) == []


class LossyLink(HttpLink):
    """In the rounds 0 to 3, one client's letter of the stage of the same number never leaves the device. In round
    4, the server is killed between two stages."""

    def __init__(self, *given, kill=lambda: None, **named):
        super().__init__(*given, **named)
        self.kill, self.done, self.versions, self.lost = kill, set(), {}, set()

    def poll(self, *given):
        found = super().poll(*given)
        for job in found.jobs if isinstance(found, Work) else ():
            self.versions[job.invitation.about.task] = job.invitation.about.version
        return found

    def is_lost(self, task, stage):
        version = self.versions[task]
        if version != stage or version in self.done:
            return False
        self.done.add(version)
        self.lost.add(task)
        return True

    def send_letter(self, task, stage, letter):
        if self.is_lost(task, stage):
            return None
        if (self.versions[task], stage) == (4, SHARE) and 4 not in self.done:
            self.done.add(4)
            self.kill()
            raise UnreachableError("the server is gone")
        return super().send_letter(task, stage, letter)

    def report(self, report):
        lost = self.is_lost(about(report).task, MASK)
        return Accepted("", valid=True) if lost else super().report(report)


def waited_for(run):
    """The round, and its tasks whose letters the server still waits for."""

    def look(book):
        row = book.round()
        sent = book.writers(row.number, row.attempt, row.stage)
        states = ("reported",) if row.stage == UNMASK else ("open", "leased")
        tasks = book.tasks("train", row.number, row.attempt)
        return row, {task.id for task in tasks if task.state in states and task.id not in sent}

    return run.hub.clerk.do(look)


def test_clients_drop_out_at_every_stage_and_a_server_is_killed(masked, enroll):
    """Time goes on when only lost letters are waited for."""
    skipped, ended = [0.0], set()
    clock = lambda: time.time() + skipped[0]
    run = masked({"rounds": 5, "deploy.quorum": 0.5}, lease=1000.0, deadline=1e6, clock=clock)
    everyone, running, starting = [], [run], threading.Lock()

    def kill():
        with starting:
            running[-1].server.close()
            running.append(run.again())
            for link in everyone:
                link.url = running[-1].url

    everyone += [LossyLink(run.url, enroll(run.hub), hold=0.2, kill=kill), *links(run, enroll, 1)]
    devices = threading.Thread(target=take_part, args=(agents(run, everyone),))
    devices.start()
    while devices.is_alive():
        with starting:
            row, waiting = waited_for(running[-1])
            here = (row.number, row.attempt, row.stage)
            if waiting and waiting <= everyone[0].lost and here not in ended:
                ended.add(here)  # once: by the next look, the next stage may have begun
                skipped[0] += 1001.0
        devices.join(0.05)
    now = running[-1]
    assert len(running) == 2
    assert everyone[0].done == {0, 1, 2, 3, 4}
    assert [now.attempt(number) for number in range(5)] == [0] * 5
    assert [len(now.counted(number)) for number in range(5)] == [5, 5, 5, 6, 6]
    now.check()


def test_a_forged_share_costs_the_attempt_and_is_told(masked, wait_until, caplog):
    run = masked({"cohort.size": 3})
    hub, num_words = run.hub, run.hub.coordinator.server.sealed.lines.num_words
    hub.join("device", ["a", "b", "c", *map(str, run.store.client_ids)]).result()
    jobs = wait_until(lambda: getattr(hub.poll("device", most=9).result(), "jobs", None))
    tasks = sorted(job.invitation.about.task for job in jobs)
    context = masked_context(run.offer.run, 0)
    clients = {task: MaskedClient(context, task) for task in tasks}
    ended = lambda task, stage: wait_until(lambda: _bytes(hub.answer("device", task, stage).result()))
    for task in tasks:
        assert hub.letter("device", task, ADVERTISE, clients[task].advertise()).result() is None
    for task in tasks:
        letter = clients[task].share(ended(task, ADVERTISE))
        assert hub.letter("device", task, SHARE, letter).result() is None
    form = MaskingForm(WordForm(*run.algorithm_parts))
    for task in tasks:
        letter = clients[task].mask(ended(task, SHARE), np.zeros(num_words, np.uint32))
        here = next(job.invitation.about for job in jobs if job.invitation.about.task == task)
        assert hub.report("device", form.report(here, letter)).result().valid
    for task in tasks:
        letter = clients[task].unmask(ended(task, MASK))
        if task == tasks[0]:  # shares of the first ones are used
            body = letter[STAMP_BYTES : 2 * STAMP_BYTES] + bytes(16) + letter[2 * STAMP_BYTES + 16 :]
            letter = stamped(context, "unmask", task, body)
        assert hub.letter("device", task, UNMASK, letter).result() is None
    wait_until(lambda: hub.round().attempt == 1)
    assert hub.round().number == 0
    assert "tried again" in caplog.text
    assert "do not fit together" in caplog.text
    assert hub.letter("device", tasks[0], UNMASK, letter).result().reason == "closed"


def _bytes(found):
    return found if isinstance(found, bytes) else None


SKELLAM = {
    "privacy.mechanism": "skellam",
    "privacy.noise": 2.0,
    "cohort.sampling": "poisson:12",
    "data.num_items": 60,
}


def share_of(run):
    found = noise_share(protection(run.config, run.config.deploy.population))
    assert found is not None
    return found


def test_without_what_is_drawn_the_model_of_skellam_noise_is_the_simulated_one(masked, enroll, monkeypatch):
    """Every client draws one share of the noise, for all its words. The server draws those of who did not come."""
    drawn = []

    def nothing(count, variance, random):
        drawn.append((count, variance))
        return np.zeros(count, np.uint32)

    monkeypatch.setattr(masked_form, "skellam_words", nothing)
    monkeypatch.setattr(skellam_sum, "skellam", lambda rng, shape, variance: np.zeros(shape, np.int32))
    run = masked(SKELLAM | {"rounds": 1})
    take_part(agents(run, links(run, enroll, 2)))
    run.check()
    share, num_words = share_of(run), run.hub.coordinator.server.sealed.lines.num_words
    assert share.most == 12
    shares = lambda number: [(num_words, number * share.update), (2, number * share.numbers)]
    counted = len(run.counted(0))
    assert drawn == shares(1) * counted + shares(12 - counted)


def test_the_server_never_has_a_sum_without_the_noise_of_its_clients(masked, enroll, monkeypatch):
    """What it unmasks, less the clients' own words, is noise of as many shares as there are clients."""
    plain, seen = [], []

    def line(self, mine, keys):
        plain.append(laid_out(self, mine, keys))
        return plain[-1].copy()

    def opened(*given):
        seen.append(unmasked(*given))
        return seen[-1].copy()

    laid_out = masked_form.LineForm.line
    monkeypatch.setattr(masked_form.LineForm, "line", line)
    monkeypatch.setattr(masked_sums, "unmasked", opened)
    run = masked(SKELLAM | {"rounds": 1, "cohort.sampling": "fixed"})
    take_part(agents(run, links(run, enroll, 2)))
    assert len(plain) == 6
    assert len(seen) == 1
    noise = (seen[0] - np.sum(plain, 0, dtype=np.uint32)).view(np.int32).astype(float)
    share, dense = share_of(run), run.hub.coordinator.server.sealed.lines
    update = np.delete(noise, numbers_of(dense))
    check_spread(update, 6 * share.update)
    check_spread(noise[numbers_of(dense)], 6 * share.numbers)
    assert run.hub.records()[0]["privacy"]["epsilon"] > 0
    assert all(np.isfinite(leaf).all() for leaf in run.hub.state(1).params.values())


def numbers_of(lines):
    return slice(lines._num_dense - 2, lines._num_dense)


def check_spread(numbers, variance):
    """The variance is right (chi-square)."""
    squares = float(np.sum(np.square(numbers))) / variance
    assert stats.chi2.ppf(1e-6, numbers.size) < squares < stats.chi2.isf(1e-6, numbers.size)


def test_letters_are_for_runs_with_masked_sums(federate):
    run = federate()
    link = run.link()
    assert link.send_letter("task", ADVERTISE, b"letter").reason == "malformed"
    assert "not masked" in link.answer("task", ADVERTISE).what


def test_routes_tell_what_is_wrong(masked, enroll):
    run = masked()
    link = HttpLink(run.url, enroll(run.hub))
    assert link.send_letter("task", ADVERTISE, b"letter").reason == "task"
    assert link.answer("task", ADVERTISE).reason == "task"
    assert link.answer("task", UNMASK).reason == "malformed"
    assert link.send_letter("task", MASK, b"letter").reason == "malformed"


def test_what_masked_sums_cannot_have_is_refused(tmp_path):
    for settings, match in (
        ({"deploy.reports": "sum"}, "takes a report of each client"),
        ({"deploy.precision": "float16"}, "longer than privacy.clip"),
        ({"deploy.buffer": 2, "deploy.concurrency": 6}, "deploy.buffer must be 0"),
        ({"cohort.size": 1}, "at least 2"),
        ({"privacy.clip": None, "privacy.noise": None}, "privacy.clip"),
        ({"privacy.mechanism": "skellam", "cohort.sampling": "poisson"}, "poisson:1[0-9] or more"),
    ):
        task, config = resolve("planted", None, MASKING)
        with pytest.raises(UserError, match=match):
            found_run(task, config.changed(settings), tmp_path / "run")


def test_flower_says_that_sums_cannot_be_masked(masked):
    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    from partwise.deployment.federation import Opened
    from partwise.deployment.flower_hub import FlowerHub

    run = masked()
    with pytest.raises(UserError, match="masked is not for Flower"):
        FlowerHub(Opened(run.hub, run.offer, None), grid=None)
