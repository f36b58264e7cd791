"""The life of an agent: ask for work, work, and go on whatever happens. docs/agents.md has its rules as a table."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from partwise.deployment.http_link import ClockError, UntrustedError
from partwise.deployment.jobs import Job, Wait
from partwise.deployment.link import DECLINES, Link, UnreachableError
from partwise.deployment.masked_group import MaskedGroup
from partwise.deployment.memory import give_back_memory
from partwise.deployment.workplace import TROUBLE, Worked, Workplace
from partwise.server.messages import Invitation
from partwise.types import UserError, counted

log = logging.getLogger("partwise.agent")

LONGEST_WAIT = 60.0  # seconds between two tries
TIDY_SECONDS = 1.0  # at least, between two times that memory is given back
OVER = (
    "closed",
    "duplicate",
    "task",
    "declined",
)  # why a task came to nothing that the server has ended itself
NAMES_AT_ONCE = 1000  # clients that are joined with one request
ASK_AGAIN = 600.0  # seconds after which clients that could not join are asked for again
ALL_AT_ONCE = 1000  # clients for which work is asked for if they must work together


class Pace(NamedTuple):
    """When an agent works, and how much."""

    ready: Callable[[], bool] = lambda: True  # whether the device may work now
    most: int = 1  # clients for which it asks for work at a time
    sleep: Callable[[float], object] = time.sleep
    stopped: Callable[[], bool] = lambda: False  # whether it is to end
    status: Callable[[], Mapping[str, Any]] = dict  # what the device tells of itself


class Resident:
    """An agent's life.

    Args:
        link: The way to the run.
        begin: Asks what the run is, and returns the workplace for it.
        pace: When it works.
    """

    def __init__(self, link: Link, begin: Callable[[], Workplace], pace: Pace):
        self._link, self._begin, self._pace = link, begin, pace
        self._place: Workplace | None = None
        self._group: MaskedGroup | None = None  # if sums are masked
        self._joined: set[str] = set()
        self._refused: set[str] = set()  # clients that could not join
        self._asked = time.monotonic()  # when they were last asked for
        self._gone: set[str] = set()  # tasks whose files were not there when they were last given
        self._begun = self._ended = False
        self._tidied = time.monotonic()
        self._tries, self._said, self._ready = 0, "", True

    def run(self) -> Iterator[Worked]:
        """Work until the run ends, or until the agent is stopped.

        Raises:
            UserError: The agent cannot begin: the data cannot be read, the device may not take part ... Later on
                such things are lines in the log, and are tried again.
        """
        while not (self._ended or self._pace.stopped()):
            try:
                yield from self._turn()
            except ClockError as error:
                self._later(f"the clock of this device is wrong: {error}", longest=True)
            except UntrustedError as error:
                if not self._begun:
                    raise UserError(str(error)) from None
                self._later(str(error))
            except UnreachableError as error:
                self._forget()  # as the server may have
                self._later(f"the server does not answer: {error}")
            except TROUBLE as error:
                if self._begun or not isinstance(error, UserError):
                    self._later(f"this cannot be done now: {str(error) or repr(error)}")
                else:
                    raise
        log.info("the agent ends: %s", "the run has ended" if self._ended else "it was told to stop")

    def _turn(self) -> Iterator[Worked]:
        """Ask once, and work on what was given."""
        place = self._place = self._place or self._start()
        if self._group and self._group.busy:
            yield from self._together(self._group)
        heard = place.finish()
        if heard:
            yield heard
        self._join(place.look())
        self._begun = True
        if time.monotonic() - self._tidied > TIDY_SECONDS:
            give_back_memory()
            self._tidied = time.monotonic()
        most = ALL_AT_ONCE if self._group else self._pace.most
        given = self._link.poll(self._may_work(), most, self._pace.status())
        if isinstance(given, Wait):
            self._wait(given)
            return
        good, self._gone = False, {each.invitation.about.task for each in given.jobs} & self._gone
        if self._group:
            if not any(self._has_moved(place, job.invitation) for job in given.jobs):
                self._group.begin(given.jobs, given.lease)
                yield from self._together(self._group)
            return
        for job in given.jobs[:most]:
            if self._pace.stopped() or self._has_moved(place, job.invitation):
                return
            place.look()
            done = place.work(job)
            good |= done.accepted or self._is_old(job, done.reason)
            if not done.accepted:
                self._decline(job, done.reason)
            yield done
        self._worked(good)

    def _worked(self, good: bool) -> None:
        """After tasks of which something came, the next poll is at once; else it waits."""
        if good:
            self._well()
        else:
            self._later("")

    def _start(self) -> Workplace:
        """The workplace for what the server offers now."""
        place = self._begin()
        waiting = (self._pace.sleep, self._pace.stopped)
        self._group = MaskedGroup(self._link, place, place.masking, *waiting) if place.masking else None
        return place

    def _together(self, group: MaskedGroup) -> Iterator[Worked]:
        """Work on all tasks of a round at the same time."""
        good = False
        for job, done in group.go_on():
            good |= done.accepted
            if not done.accepted:
                self._decline(job, done.reason)
            yield done
        self._worked(good)

    def _join(self, names: set[str]) -> None:
        """Tell the server about clients that it has not heard of. Each name that it refuses, because the client is
        on another device, is left out, and asked for again later."""
        if time.monotonic() - self._asked > ASK_AGAIN:
            self._refused.clear()
        new = sorted(names - self._joined - self._refused)
        for first in range(0, len(new), NAMES_AT_ONCE):
            some = new[first : first + NAMES_AT_ONCE]
            while some and (others := set(self._link.join(some))):
                some = [name for name in some if name not in others]
                self._refused |= others
            self._joined |= set(some)
        if refused := self._refused & set(new):
            self._asked = time.monotonic()
            which = f"{counted(len(refused), 'client')} of {len(names)} could not join ({_some(refused)})"
            told = f"{which}: they are on another device, or their names are not allowed"
            if not (self._begun or self._joined):
                raise UserError(f"{told}. If this device replaces the other one, revoke that one's key")
            log.warning("%s. The agent goes on without them, and asks again", told)

    def _may_work(self) -> bool:
        ready = self._pace.ready()
        if ready != self._ready:
            log.info("the device may work" if ready else "the device may not work now: its policy says so")
        self._ready = ready
        return ready

    def _has_moved(self, place: Workplace, invitation: Invitation) -> bool:
        """Whether the server now has another run or model than the one that this workplace is for."""
        if place.run is None or place.fits(invitation.about):
            return False
        offer = self._link.offer()
        if (offer.run, offer.model) == (place.run, place.model):
            return False
        log.warning(
            "the server now has another run or model (%s, before %s): beginning anew", offer.run, place.run
        )
        self._place = None
        self._forget()
        return True

    def _forget(self) -> None:
        self._joined.clear()
        self._refused.clear()

    def _is_old(self, job: Job, reason: str) -> bool:
        """Whether the files of a task are gone because it was given long ago: then the server is asked at once for
        what there is now. If it gives the same task again, files are missing that should be there."""
        return reason == "gone" and job.invitation.about.task not in self._gone

    def _decline(self, job: Job, reason: str) -> None:
        """Tell the server that nothing will come of a task, unless it knows."""
        task = job.invitation.about.task
        if self._is_old(job, reason):
            self._gone.add(task)
            return
        named = isinstance(task, str) and task.isalnum()  # a server that lies names anything
        if named and reason not in OVER:
            self._link.decline(task, reason if reason in DECLINES else "refused")

    def _wait(self, given: Wait) -> None:
        self._well()
        self._ended = given.ended
        if not given.ended:
            self._pace.sleep(_seconds(given.seconds, LONGEST_WAIT) * random.uniform(0.8, 1.2))

    def _well(self) -> None:
        if self._said:
            log.info("all is well again")
        self._tries, self._said = 0, ""

    def _later(self, what: str, longest: bool = False) -> None:
        """Say once what is wrong, and wait: longer every time, up to a minute."""
        self._tries = min(self._tries + 1, 10)
        kind = what[:40]
        if what and kind != self._said:
            log.warning("%s (trying again, at least every %.0f seconds)", what, LONGEST_WAIT)
            self._said = kind
        seconds = LONGEST_WAIT if longest else min(LONGEST_WAIT, 0.5 * 2**self._tries)
        self._pace.sleep(seconds * random.uniform(0.5, 1.0))


def _some(names: set[str]) -> str:
    """Some of many names."""
    few = [name[:40] for name in sorted(names)[:10]]
    return ", ".join(few) + (", ..." if len(few) < len(names) else "")


def _seconds(told: float, longest: float) -> float:
    """How long to wait, as a server tells it, which may be nonsense."""
    return told if 0 < told <= longest else longest
