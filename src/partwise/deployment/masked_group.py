"""A device's clients in a round with masked sums: they go through the stages of `deployment.stages` together.

A stage ends when all clients of the round have sent their letter. A device with several clients in a round would
wait for itself if it worked on them one by one. So it trains them all, and then takes each stage for all of them.
A client that fails leaves, and the others go on. If the server does not answer, what was done is kept, and
`go_on` is called again: letters are made once, and the same bytes are sent again.

What a client keeps is saved once the server has its last letter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from partwise.deployment.jobs import ADVERTISE, MASK, SHARE, UNMASK, Job, Wait
from partwise.deployment.link import Link
from partwise.deployment.workplace import TROUBLE, Sent, Worked, Workplace, told
from partwise.privacy.masked_client import MaskedClient
from partwise.server.masked_form import MaskingForm, masked_context
from partwise.server.refusals import Refused

Refusal = tuple[str, str]  # the reason, and a sentence
STOPS: Refusal = ("refused", "the device stops")
LONGEST_WAIT = 60.0  # seconds between two looks whether a stage has ended


class Participant:
    """One client in a round: what it has trained, and how far it is."""

    def __init__(self, sent: Sent):
        about = sent.job.invitation.about
        self.sent, self.about, self.stage = sent, about, ADVERTISE
        self.client = MaskedClient(masked_context(about.run, about.version), about.task)
        self.letter: bytes | None = None  # of its stage, if it was made

    def make(self, answer: bytes) -> bytes:
        """The letter of its stage, given the server's answer to the one before."""
        if self.stage == ADVERTISE:
            return self.client.advertise()
        if self.stage == SHARE:
            return self.client.share(answer)
        if self.stage == MASK:
            return self.client.mask(answer, np.frombuffer(self.sent.report, np.uint32))
        return self.client.unmask(answer)


class MaskedGroup:
    """The clients of a device that are in a round now.

    Args:
        link: The way to the run.
        place: Where they train.
        form: How their reports are written.
        sleep: Waits so many seconds.
        stopped: Whether the device is to end.
    """

    def __init__(
        self,
        link: Link,
        place: Workplace,
        form: MaskingForm,
        sleep: Callable[[float], object],
        stopped: Callable[[], bool],
    ):
        self._link, self._place, self._form = link, place, form
        self._sleep, self._stopped = sleep, stopped
        self._jobs: list[Job] = []
        self._participants: list[Participant] = []
        self._lease = self._renewed = 0.0

    @property
    def busy(self) -> bool:
        """Whether something was begun and is not done."""
        return bool(self._jobs or self._participants)

    def begin(self, jobs: Iterable[Job], lease: float) -> None:
        """Take new tasks, for so many seconds; `go_on` works on them."""
        self._jobs += jobs
        self._lease, self._renewed = lease, time.monotonic()

    def go_on(self) -> Iterator[tuple[Job, Worked]]:
        """Work until nothing is left. Yields every task when it has come to its end.

        Raises:
            UnreachableError: The server does not answer. Call it again.
        """
        while self._jobs:
            job = self._jobs[0]
            found = STOPS if self._stopped() else self._place.trained(job)
            self._jobs.pop(0)
            if isinstance(found, Sent):
                self._participants.append(Participant(found))
            else:
                yield job, told(job, found)
            self._renew()
        while self._participants:
            one = min(self._participants, key=lambda each: each.stage)
            refused = self._step(one)
            if refused or one.stage > UNMASK:
                self._participants.remove(one)
                yield one.sent.job, told(one.sent.job, refused)

    def _renew(self) -> None:
        """Training all clients may take longer than a lease. A device that asks for work is there: the leases of
        all of its tasks begin anew."""
        if self._jobs and time.monotonic() - self._renewed >= self._lease / 3:
            self._link.poll(True, 1)
            self._renewed = time.monotonic()

    def _step(self, one: Participant) -> Refusal | None:
        """Take the next stage with one client. Returns why it leaves, if it does."""
        try:
            if one.letter is None:
                answer = self._answer(one) if one.stage > ADVERTISE else b""
                if isinstance(answer, tuple):
                    return answer
                one.letter = one.make(answer)
            refused = self._send(one, one.letter)
        except TROUBLE as error:
            return "malformed", str(error) or repr(error)
        if refused:
            return _leaves(refused)
        one.letter, one.stage = None, one.stage + 1
        if one.stage > UNMASK:
            self._place.keep(one.sent)
        return None

    def _answer(self, one: Participant) -> bytes | Refusal:
        """The server's answer to the last letter, when the stage has ended."""
        while not self._stopped():
            found = self._link.answer(one.about.task, one.stage - 1)
            if not isinstance(found, Wait):
                return _leaves(found) if isinstance(found, Refused) else found
            self._sleep(found.seconds if 0 < found.seconds <= LONGEST_WAIT else LONGEST_WAIT)
        return STOPS

    def _send(self, one: Participant, letter: bytes) -> Refused | None:
        if one.stage != MASK:
            return self._link.send_letter(one.about.task, one.stage, letter)
        verdict = self._link.report(self._form.report(one.about, letter))
        return verdict if isinstance(verdict, Refused) else None


def _leaves(refused: Refused) -> Refusal:
    """A client that cannot go on declines its task, whatever the reason: the others need not wait for it then."""
    return "refused", f"{refused.what} ({refused.reason})"
