"""The stages of masked sums, without a network: who is in a sum, what is refused, and when rounds are repeated."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partwise import optimizers
from partwise.algorithms.fed_avg import fed_avg
from partwise.client import update
from partwise.client.batches import Batches
from partwise.deployment.coordinator import Coordinator
from partwise.deployment.jobs import ADVERTISE, MASK, SHARE, UNMASK, Wait
from partwise.deployment.journal import found_journal
from partwise.deployment.masked_sums import MaskedSums
from partwise.deployment.memory_book import MemoryBook
from partwise.deployment.one_by_one import whole_tasks
from partwise.deployment.rules import Rules
from partwise.deployment.server_noise import own_noise
from partwise.model.partition import keyed, partition
from partwise.privacy.masked_client import MaskedClient
from partwise.privacy.masked_letters import STAMP_BYTES, TooFewError, stamped
from partwise.server.cohort import Recruiting
from partwise.server.encoding import fixed_point
from partwise.server.masked_form import MaskingForm, masked_context
from partwise.server.mean import mean
from partwise.server.private_sum import Door
from partwise.server.round import Accepted, Server
from partwise.server.word_form import WordForm
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.types import UserError

MODEL = matrix_factorization(600, 4, num_users=6, scale=0.5)
ALGORITHM = fed_avg(
    MODEL,
    partition(MODEL, {"user": keyed("user"), "item": keyed("item")}),
    update=update.by_steps(Batches(4), 0.1),
    optimizer=optimizers.Sgd(1.0).on_server(),
    aggregator=fixed_point(mean(), 16),
)
WORDS = WordForm(ALGORITHM.aggregator, ALGORITHM.partition)
SUMS = MaskedSums(ALGORITHM)
SERVER = Server(ALGORITHM, "run", sealed=SUMS.form)
FORM = MaskingForm(WORDS)
NUM_WORDS = SUMS.form.lines.num_words
NAMES = "abcdefgh"


class Someone:
    """A client of a round, its line, and the letters that it has sent."""

    def __init__(self, row, line):
        self.row, self.id, self.device, self.line, self.sent = row, row.id, row.device, line, {}
        self.client = MaskedClient(masked_context("run", row.number), row.id)


class Desk:
    """A coordinator on a book, and its clients, each on a device of its own."""

    def __init__(self, transaction, num_clients=6, seed=0, **changes):
        rules = Rules(Recruiting(num_clients), seed=1, rounds=2, quorum=1, deadline=100, lease=10, fresh=1000)
        self.transaction, self.rules = transaction, rules._replace(**changes)
        self.coordinator, self.rng = Coordinator(SERVER, self.rules), np.random.default_rng(seed)
        for name in NAMES[: max(num_clients, self.rules.num_asked)]:
            self.do(lambda book, name=name: self.coordinator.join(book, f"device {name}", [name]))
            self.do(lambda book, name=name: self.coordinator.poll(book, f"device {name}", 0.0))
        self.open(0.0)

    def do(self, decide):
        with self.transaction() as book:
            return decide(book)

    def open(self, now):
        assert self.do(lambda book: self.coordinator.open(book, now))
        row = self.row
        tasks = self.do(lambda book: book.tasks("train", row.number, row.attempt))
        lines = self.rng.integers(0, 2**32, (len(tasks), NUM_WORDS), np.uint32)
        self.everyone = [Someone(task, line) for task, line in zip(tasks, lines, strict=True)]

    @property
    def row(self):
        return self.do(lambda book: book.round())

    def send(self, one, stage, letter=None, device=None):
        device = device or one.device
        return self.do(lambda book: self.coordinator.stages.take(book, device, one.id, stage, letter))

    def ask(self, one, stage):
        return self.do(lambda book: self.coordinator.stages.answer(book, one.device, one.id, stage))

    def report(self, one, letter, now=0.0):
        report = FORM.report(self.coordinator.about(one.row), letter)
        return self.do(lambda book: self.coordinator.accept(book, one.device, report, now))

    def make(self, one, stage):
        """Its letter, given what the server answers."""
        if stage == ADVERTISE:
            return one.client.advertise()
        answer = self.ask(one, stage - 1)
        assert isinstance(answer, bytes)
        given = {SHARE: one.client.share, UNMASK: one.client.unmask}
        return one.client.mask(answer, one.line) if stage == MASK else given[stage](answer)

    def step(self, stage, clients=None, now=0.0):
        """These clients send their letters of a stage."""
        for one in self.everyone if clients is None else clients:
            one.sent[stage] = self.make(one, stage)
            if stage == MASK:
                assert self.report(one, one.sent[stage], now) == Accepted(one.row.client, valid=True)
            else:
                assert self.send(one, stage, one.sent[stage]) is None

    def due(self, now=0.0):
        return self.do(lambda book: self.coordinator.due(book, "p", now))

    def total(self, due):
        collected = self.do(lambda book: self.coordinator.stages.collected(book, due.round))
        return SUMS.total(whole_tasks(self.do, due), collected)

    def whole_round(self):
        for stage in range(4):
            self.step(stage)
            due = self.due()
        return due


def same_sum(total, clients):
    """Whether a total is the sum of these clients' lines."""
    wanted = WORDS.total(SUMS.form.lines.words(np.sum([one.line for one in clients], 0, dtype=np.uint32)))
    same = [np.array_equal(total.update[path], leaf) for path, leaf in wanted.update.items()]
    return all(same) and total.clients == wanted.clients and total.loss.value == wanted.loss.value


def in_memory():
    book = MemoryBook()
    return lambda: contextlib.nullcontext(book)


@contextlib.contextmanager
def journal_at(url):
    journal = found_journal(url, "run")
    yield journal.transaction
    journal.close()


@pytest.fixture(params=["memory", "sqlite"])
def transaction(request, tmp_path):
    """What begins a transaction of an empty book."""
    if request.param == "memory":
        yield in_memory()
        return
    with journal_at(f"sqlite:///{tmp_path}/journal.db") as found:
        yield found


def test_a_round_on_postgresql(new_postgres):
    with journal_at(new_postgres()) as found:
        test_who_is_lost_in_a_stage_is_not_waited_for_longer_than_a_lease(found, MASK)
    with journal_at(new_postgres()) as found:
        test_a_round_in_which_all_stay(found)


def test_a_round_in_which_all_stay(transaction):
    desk = Desk(transaction)
    for stage in range(4):
        assert desk.row.stage == stage
        desk.step(stage, desk.everyone[:-1])
        assert desk.due() is None
        assert desk.row.stage == stage
        if stage < UNMASK:
            assert desk.ask(desk.everyone[0], stage) is None
        desk.step(stage, desk.everyone[-1:])
        due = desk.due()
    assert due is not None
    assert same_sum(desk.total(due), desk.everyone)
    assert desk.do(lambda book: desk.coordinator.commit(book, due, 1.0, "file"))
    assert desk.row[:3] == (1, 0, "waiting")
    for one in desk.everyone:
        for stage in (ADVERTISE, SHARE, UNMASK):
            assert desk.do(lambda book, one=one, stage=stage: book.letter(one.id, stage)) is None
        assert desk.send(one, UNMASK, one.sent[UNMASK]) is None  # it may not have heard, and it is counted
        assert desk.send(one, SHARE, one.sent[SHARE]).reason == "closed"
        assert desk.ask(one, MASK).reason == "closed"


@pytest.mark.parametrize("stage", range(4))
def test_who_is_lost_in_a_stage_is_not_waited_for_longer_than_a_lease(transaction, stage):
    desk = Desk(transaction, quorum=2)
    lost, staying = desk.everyone[2], [one for one in desk.everyone if one is not desk.everyone[2]]
    now = 0.0
    for each in range(4):
        desk.step(each, staying if each >= stage else None, now)
        if each == stage:
            assert desk.due(now + 9.9) is None
            assert desk.row.stage == stage
            now += 10.0
        due = desk.due(now)
    assert due is not None
    assert same_sum(desk.total(due), staying if stage < UNMASK else desk.everyone)
    if stage < UNMASK:  # it is out of all later stages
        for later in (ADVERTISE, SHARE, UNMASK):
            assert desk.send(lost, later, b"late").reason == "closed"
        assert desk.ask(lost, stage).reason == "closed"
        assert isinstance(desk.do(lambda book: desk.coordinator.poll(book, lost.device, now)), Wait)


def test_a_late_upload_is_in_no_sum(transaction):
    desk = Desk(transaction)
    late = desk.everyone[0]
    desk.step(ADVERTISE), desk.due(), desk.step(SHARE), desk.due()
    letter = desk.make(late, MASK)
    desk.step(MASK, desk.everyone[1:])
    desk.due(10.0)
    assert desk.row.stage == UNMASK
    assert desk.report(late, letter, 11.0).reason == "closed"
    desk.step(UNMASK, desk.everyone[1:])
    assert same_sum(desk.total(desk.due(10.0)), desk.everyone[1:])


@pytest.mark.parametrize("stage", range(1, 4))
def test_below_the_threshold_the_round_is_repeated_at_the_deadline(transaction, stage):
    desk = Desk(transaction)  # of 6, two thirds must stay
    before = desk.everyone
    for each in range(stage):
        desk.step(each), desk.due()
    desk.step(stage, before[:3])
    assert desk.due(50.0) is None
    assert desk.row[:2] == (0, 0)
    desk.due(100.0)
    assert desk.row == desk.row._replace(number=0, attempt=1, phase="waiting", stage=0, staged=0.0)
    for each in range(4):
        assert desk.do(lambda book, each=each: book.letters(0, 0, each)) == {}
    assert desk.send(before[4], SHARE, b"late").reason == "closed"
    desk.open(101.0)
    assert not {one.id for one in before} & {one.id for one in desk.everyone}
    assert same_sum(desk.total(desk.whole_round()), desk.everyone)


def test_the_quorum_counts_at_every_stage_up_to_the_upload(transaction):
    desk = Desk(transaction, quorum=6)
    desk.step(ADVERTISE, desk.everyone[:5])
    assert desk.due(50.0) is None
    assert desk.row.stage == ADVERTISE
    desk.due(100.0)
    assert desk.row[:3] == (0, 1, "waiting")


def test_a_stage_has_its_own_deadline(transaction):
    desk = Desk(transaction, lease=1000)
    for stage, now in enumerate((99.0, 198.0)):
        desk.step(stage, desk.everyone[:5] if stage else None, now)
        desk.due(now)
    assert desk.row.stage == SHARE
    desk.due(199.0)
    assert desk.row.stage == MASK


def test_letters_out_of_turn_and_of_others_are_refused_by_name(transaction):
    desk = Desk(transaction)
    one, other = desk.everyone[:2]
    mine = one.client.advertise()
    assert desk.send(one, ADVERTISE, mine, device=other.device).reason == "task"
    assert desk.send(one, ADVERTISE, other.client.advertise()).reason == "malformed"  # of another task
    assert desk.send(one, ADVERTISE, mine[:-1]).reason == "malformed"
    assert desk.send(one, MASK, mine).reason == "malformed"
    assert desk.send(one, 7, mine).reason == "malformed"
    assert desk.send(one, SHARE, mine).reason == "early"
    assert desk.ask(one, UNMASK).reason == "malformed"
    assert desk.report(one, bytes(STAMP_BYTES + 4 * NUM_WORDS)).reason == "early"
    for _ in range(2):
        assert desk.send(one, ADVERTISE, mine) is None
    again = MaskedClient(masked_context("run", 0), one.id).advertise()
    assert desk.send(one, ADVERTISE, again).reason == "duplicate"
    desk.do(lambda book: desk.coordinator.decline(book, other.device, other.id))
    assert desk.send(other, ADVERTISE, b"").reason == "declined"
    assert desk.ask(other, ADVERTISE).reason == "declined"
    desk.step(ADVERTISE, desk.everyone[2:])
    desk.due()  # who declines is not waited for
    assert desk.row.stage == SHARE
    assert desk.send(one, ADVERTISE, mine) is None
    assert desk.send(one, ADVERTISE, again).reason == "closed"
    assert desk.send(one, SHARE, one.client.share(desk.ask(one, ADVERTISE))[:-50]).reason == "malformed"


def test_letters_of_the_upload_and_after_it_are_checked(transaction):
    desk = Desk(transaction)
    one, other = desk.everyone[:2]
    desk.step(ADVERTISE), desk.due(), desk.step(SHARE), desk.due()
    letter = desk.make(one, MASK)
    assert desk.report(one, letter[:-1] + bytes([letter[-1] ^ 1])).reason == "malformed"
    assert desk.report(other, letter).reason == "malformed"
    for _ in range(2):
        assert isinstance(desk.report(one, letter), Accepted)
    desk.step(MASK, desk.everyone[1:])
    desk.due()
    assert isinstance(desk.report(one, letter), Accepted)  # it may not have heard
    assert desk.report(one, b"x" * len(letter)).reason == "duplicate"
    shares = desk.make(one, UNMASK)
    assert desk.send(one, UNMASK, shares[:-1]).reason == "malformed"
    assert desk.send(other, UNMASK, shares).reason == "malformed"
    assert desk.send(one, UNMASK, shares) is None


def test_another_process_goes_on_between_any_two_stages(transaction):
    desk = Desk(transaction, drawing=12345)
    for stage in range(4):
        desk.step(stage)
        desk.coordinator = Coordinator(SERVER, desk.rules)
        due = desk.due()
        desk.coordinator = Coordinator(SERVER, desk.rules)
    assert same_sum(desk.total(due), desk.everyone)


def test_a_reported_line_is_noise_to_the_server(transaction):
    desk = Desk(transaction)
    for one in desk.everyone:
        one.line = np.zeros(NUM_WORDS, np.uint32)
    due = desk.whole_round()
    for task in whole_tasks(desk.do, due):
        found = np.frombuffer(SUMS.form.read(task.report, task.id)[STAMP_BYTES:], np.uint8)
        counts = np.bincount(found, minlength=256)
        squared = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
        assert 150 < squared < 400  # 255 degrees of freedom
        assert task.keys is None


def test_the_server_adds_the_noise_that_is_promised():
    desk = Desk(in_memory())
    for one in desk.everyone:
        one.line = np.zeros(NUM_WORDS, np.uint32)
    due, noise = desk.whole_round(), own_noise(Door(0.1, 1000.0, 6.0, share=1e-4), 4)
    total, _ = noise(desk.total(due), {})
    words = np.concatenate([np.asarray(leaf).reshape(-1).view(np.int32) for leaf in total.update.values()])
    assert 1440 < words.std() < 1760  # 1000 times the clip, in steps of 1/16
    assert abs(words.mean()) < 160
    assert abs(int(np.asarray(total.clients).view(np.int32))) > 16_000  # of another size


def test_with_over_selection_only_as_many_go_on_as_the_cohort_needs(transaction):
    desk = Desk(transaction, 4, recruiting=Recruiting(4, over_selection=2.0))
    assert len(desk.everyone) == 8
    desk.step(ADVERTISE, desk.everyone[:3])
    assert desk.due() is None
    assert desk.row.stage == ADVERTISE
    desk.step(ADVERTISE, desk.everyone[3:6])
    desk.due()
    assert desk.row.stage == SHARE
    for one in desk.everyone[4:]:
        assert desk.ask(one, ADVERTISE).reason == "closed"
    for stage in (SHARE, MASK, UNMASK):
        desk.step(stage, desk.everyone[:4])
        due = desk.due()
    assert same_sum(desk.total(due), desk.everyone[:4])


def test_a_sum_of_one_is_never_made(transaction):
    desk = Desk(transaction, recruiting=Recruiting(1))
    desk.step(ADVERTISE)
    desk.due()
    assert desk.row[:3] == (0, 1, "waiting")


def test_a_cohort_that_is_too_small_is_drawn_again(transaction):
    """Poisson may draw fewer clients than a sum must be of."""
    desk = Desk(transaction, least=7)
    desk.step(ADVERTISE)
    desk.due()
    assert desk.row[:3] == (0, 1, "waiting")


def test_a_round_that_cannot_be_unmasked_is_repeated(transaction):
    desk = Desk(transaction)
    for stage in range(3):
        desk.step(stage), desk.due()
    liar = min(desk.everyone, key=lambda one: one.id)  # shares of the first ones are used
    letter = desk.make(liar, UNMASK)
    body = letter[STAMP_BYTES:]
    body = body[:STAMP_BYTES] + bytes(16) + body[STAMP_BYTES + 16 :]  # another share
    assert desk.send(liar, UNMASK, stamped(masked_context("run", 0), "unmask", liar.id, body)) is None
    desk.step(UNMASK, [one for one in desk.everyone if one is not liar])
    due = desk.due()
    with pytest.raises(UserError, match="do not fit together") as error:
        desk.total(due)
    assert not isinstance(error.value, TooFewError)
    desk.do(lambda book: desk.coordinator.repeat(book, due))
    assert desk.row[:3] == (0, 1, "waiting")
    desk.do(lambda book: desk.coordinator.repeat(book, due))  # once
    assert desk.row[:3] == (0, 1, "waiting")


DROPS = st.lists(st.sampled_from([ADVERTISE, SHARE, MASK, UNMASK, 9, 9, 9]), min_size=2, max_size=8)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(DROPS, st.integers(1, 8))
def test_the_sum_is_over_those_who_uploaded_or_there_is_none(drops, quorum):
    """`drops` has the stage before which each client leaves."""
    desk = Desk(in_memory(), len(drops), quorum=min(quorum, len(drops)))
    leaves, now, due = {one.id: stage for one, stage in zip(desk.everyone, drops, strict=True)}, 0.0, None
    there = lambda stage: [one for one in desk.everyone if leaves[one.id] > stage]
    need = -(-2 * len(there(ADVERTISE)) // 3)
    for stage in range(4):
        desk.step(stage, there(stage), now)
        now += 10.0
        due = desk.due(now)
        least = need if stage == UNMASK else max(2, desk.rules.quorum, need if stage else 0)
        if len(there(stage)) < least:
            assert desk.row.stage == stage
            desk.due(now + 100)
            assert desk.row[:3] == (0, 1, "waiting")
            return
    assert due is not None
    assert same_sum(desk.total(due), there(MASK))
