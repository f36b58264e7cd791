"""Clients of one device in a round with masked sums: one that fails leaves, and nothing is made twice."""

from __future__ import annotations

import contextlib

import numpy as np

from partwise.deployment.jobs import MASK, Job, Wait
from partwise.deployment.link import UnreachableError
from partwise.deployment.masked_group import MaskedGroup
from partwise.deployment.workplace import Sent
from partwise.privacy import masked_server
from partwise.privacy.graphs import mask_settings
from partwise.server.masked_form import masked_context
from partwise.server.messages import About, Invitation
from partwise.server.refusals import Refused
from partwise.server.round import Accepted

CONTEXT = masked_context("run", 3)
LINE = np.arange(10, dtype=np.uint32).tobytes()
SUM = np.arange(0, 30, 3, dtype=np.uint32).tobytes()


class Form:
    """Reports without a model: the letter is the report's name."""

    def report(self, belongs, letter):
        return belongs.task.encode() + b"/" + letter


class Place:
    """Trains everybody but `broken`."""

    def __init__(self):
        self.kept = []

    def trained(self, job):
        if job.invitation.client == "broken":
            return "malformed", "it makes no sense"
        return Sent(job, LINE, ())

    def keep(self, sent):
        self.kept.append(sent.job.invitation.client)


class Server:
    """The server's side of one round; every second request is not answered."""

    def __init__(self, members, fails=False):
        self.members, self.fails = members, fails
        self.letters = [{}, {}, {}, {}]
        self.requests = self.polls = 0

    def poll(self, ready, most):
        self.polls += 1

    def fail(self):
        self.requests += 1
        if self.fails and self.requests % 2:
            raise UnreachableError("not now")

    def send_letter(self, task, stage, letter):
        if self.letters[stage].setdefault(task, letter) != letter:
            return Refused("duplicate", "another letter")
        self.fail()
        return None

    def report(self, report):
        task, _, letter = report.partition(b"/")
        refused = self.send_letter(task.decode(), MASK, letter)
        return refused or Accepted("", valid=True)

    def answer(self, task, stage):
        self.fail()
        if len(self.letters[stage]) < self.members:
            return Wait(0.1)
        settings = mask_settings(self.members, b"seed")
        advertised, shared, masked, _ = self.letters
        make = (
            lambda: masked_server.directories(CONTEXT, advertised, settings),
            lambda: masked_server.deliveries(CONTEXT, advertised, shared, settings),
            lambda: masked_server.survivors(CONTEXT, advertised, shared, masked, settings),
        )
        return make[stage]()[task]

    def total(self):
        return masked_server.unmasked_sum(CONTEXT, *self.letters, mask_settings(self.members, b"seed"))


def jobs(*names):
    return [Job("train", Invitation(About("run", 3, f"task{name}", "m"), name, 0, 3)) for name in names]


def group(server, place, stopped=lambda: False):
    return MaskedGroup(server, place, Form(), lambda seconds: None, stopped)


def test_a_client_that_fails_leaves_and_the_others_go_on():
    server, place = Server(3), Place()
    working = group(server, place)
    working.begin(jobs("a", "broken", "b", "c"), lease=0.0)
    found = {job.invitation.client: done for job, done in working.go_on()}
    assert {name for name, done in found.items() if done.accepted} == {"a", "b", "c"}
    assert found["broken"].reason == "malformed"
    assert place.kept == ["a", "b", "c"]
    assert server.polls == 3  # the leases of those that still had to be trained
    assert server.total().tobytes() == SUM
    assert not working.busy


def test_a_server_that_does_not_answer_gets_the_same_letters_again():
    server, place = Server(3, fails=True), Place()
    working = group(server, place)
    working.begin(jobs("a", "b", "c"), lease=100.0)
    done = []
    for _ in range(200):
        with contextlib.suppress(UnreachableError):
            done += [each for _, each in working.go_on()]
    assert not working.busy
    assert place.kept == ["a", "b", "c"]
    assert server.total().tobytes() == SUM


def test_a_device_that_is_told_to_stop_leaves_the_round():
    server, place = Server(2), Place()  # another device's client never comes
    working = group(server, place, stopped=lambda: bool(server.letters[0]))
    working.begin(jobs("a"), lease=100.0)
    assert [done.reason for _, done in working.go_on()] == ["refused"]
    assert place.kept == []
