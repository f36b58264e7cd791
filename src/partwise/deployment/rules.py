"""The rules by which rounds are run over a network, and what devices must say of themselves to be invited."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from partwise.config.parts import make_recruiting, one_of
from partwise.config.settings import Config
from partwise.config.sum_sizes import quorum_of
from partwise.privacy.secret_draws import Seed
from partwise.server.cohort import Recruiting
from partwise.types import UserError, unknown

Status = Mapping[
    str, Any
]  # what a device says of itself: battery, charging, metered, load; None: it cannot tell

# What can be asked of a device: the name, and whether its status is good enough, given the number behind the colon.
NEEDS: Mapping[str, tuple[str, Callable[[Any, float], bool]]] = {
    "charging": ("charging", lambda said, _: said is True),
    "unmetered": ("metered", lambda said, _: said is False),
    "battery": ("battery", lambda said, least: _is_number(said) and said >= least),
    "load": ("load", lambda said, most: _is_number(said) and said <= most),
}
LIMITED = ("battery", "load")


class Rules(NamedTuple):
    """How rounds are run. Times are in seconds.

    recruiting:     who is drawn, and how many reports are wanted
    seed:           of the run
    rounds:         how many there are
    quorum:         reports that a round needs
    deadline:       after which a round waits no longer
    lease:          that a device has for a task
    closing:        that a process has to close a round, before another one may
    fresh:          a device that has not asked for work for longer than this is not invited
    poll:           after which a device without work asks again
    population:     clients that must be there before a round opens (it needs those that it asks in any case)
    needs:          what a device must say of itself, {name: number}
    buffer:         reports that make a version, without rounds; 0: rounds
    concurrency:    tasks at a time (with a buffer)
    staleness:      a late update is divided by this power of 1 + the versions that it is late (with a buffer)
    stalest:        versions after which a late report is refused (with a buffer)
    held_out:       share of the clients that never train, and evaluate
    evaluate_every: versions between evaluations; 0: none
    keep:           versions of which tasks and files are kept
    reports:        a report for each client (clients), or one for all drawn clients of a device (sum)
    drawing:        what cohorts are drawn by; None: the seed
    least:          a round of fewer reports is tried again, although nobody is missing
    drawn_from:     clients that a cohort is drawn from at least, those who never train not among them: of fewer,
                    each would be drawn with a larger chance than was promised
    """

    recruiting: Recruiting
    seed: int
    rounds: int
    quorum: int
    deadline: float = 600.0
    lease: float = 120.0
    closing: float = 60.0
    fresh: float = 60.0
    poll: float = 0.2
    population: int = 0
    needs: Mapping[str, float] = {}
    buffer: int = 0
    concurrency: int = 0
    staleness: float = 0.5
    stalest: int = 20
    held_out: float = 0.0
    evaluate_every: int = 0
    keep: int = 20
    reports: str = "clients"
    drawing: Seed | None = None
    least: int = 1
    drawn_from: int = 0

    def check(self) -> Rules:
        """Itself, if rounds can be run by these rules."""
        if not 1 <= self.quorum <= self.recruiting.size:
            raise UserError(
                f"the quorum must be from 1 to the cohort's {self.recruiting.size} clients, not {self.quorum}"
            )
        for name in ("deadline", "lease", "closing", "fresh", "poll"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} must be more than 0 seconds, not {getattr(self, name)}")
        if self.buffer > self.concurrency:
            raise UserError(
                f"a buffer of {self.buffer} reports is never full with {self.concurrency} tasks at a time: raise "
                f"deploy.concurrency, or lower deploy.buffer"
            )
        if self.buffer and self.reports == "sum":
            raise UserError(
                f"deploy.reports = sum needs rounds: a buffer of {self.buffer} reports takes clients one by "
                f"one. Set deploy.buffer to 0, or deploy.reports to clients"
            )
        if self.buffer and self.wait > 1:
            raise UserError(
                f"cohort.sampling = {self.recruiting.sampling.name} counts rounds, and a buffer of {self.buffer} "
                f"reports has none: set deploy.buffer to 0, or cohort.sampling to fixed"
            )
        if self.evaluate_every and not self.held_out:
            raise UserError(
                "deploy.evaluate_every needs clients that are held out of the training: give deploy.held_out, as "
                "in 0.1, or set evaluate_every to 0"
            )
        return self

    @property
    def wait(self) -> int:
        """How many rounds after its own a client may take part again; 1: in the next."""
        return self.recruiting.sampling.wait

    @property
    def num_asked(self) -> int:
        """How many clients are drawn at a time."""
        return self.concurrency if self.buffer else self.recruiting.asked

    def may_work(self, status: Status) -> bool:
        """Whether a device that says this of itself may be given work."""
        return all(NEEDS[name][1](status.get(NEEDS[name][0]), limit) for name, limit in self.needs.items())

    def is_held_out(self, client: str) -> bool:
        """Whether a client never trains. It depends on the client's name and the seed."""
        if not self.held_out:
            return False
        digest = hashlib.sha256(f"{self.seed}/{client}".encode()).digest()
        return int.from_bytes(digest[:8], "little") < self.held_out * 2**64


def longest_hold(fresh: float) -> float:
    """Seconds that a poll may wait at most, so that a device that waits still counts as one that is there."""
    return fresh / 2


def check_hold(config: Config) -> None:
    """Raise `UserError` if polls would wait for so long that devices count as gone."""
    hold, fresh = config.deploy.hold, config.deploy.fresh
    if hold > longest_hold(fresh):
        raise UserError(
            f"deploy.hold is {hold:g} s, and a device that has not asked for deploy.fresh = {fresh:g} s is not "
            f"invited: with this deploy.fresh, set deploy.hold to at most {longest_hold(fresh):g}, or raise "
            f"deploy.fresh to at least {2 * hold:g}"
        )


def make_rules(config: Config, **changes: Any) -> Rules:
    """The rules that a configuration says; `changes` are other values of `Rules`."""
    part, recruiting = config.deploy, make_recruiting(config)
    one_of("deploy.reports", part.reports, ("clients", "sum"))
    if recruiting.dropout:
        raise UserError("cohort.dropout is for simulations: over a network, devices drop out by themselves")
    same = ("deadline", "lease", "closing", "fresh", "population", "buffer", "staleness", "stalest")
    more = ("held_out", "evaluate_every", "keep", "reports")
    rules = Rules(
        recruiting=recruiting,
        seed=config.seed,
        rounds=config.rounds,
        quorum=quorum_of(config),
        concurrency=part.concurrency or recruiting.size,
        needs=parse_needs(part.needs),
        **{name: getattr(part, name) for name in (*same, *more)},
    )
    return rules._replace(**changes).check()


def parse_needs(text: str) -> dict[str, float]:
    """Read the setting `deploy.needs`: names with a comma between them, some with a number, as in
    `charging,battery:0.3`."""
    needs = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, colon, number = each.partition(":")
        if name not in NEEDS:
            raise unknown("value of deploy.needs", name, NEEDS)
        if bool(colon) != (name in LIMITED):
            wanted = f"{name}:NUMBER" if name in LIMITED else name
            raise UserError(f"deploy.needs: write {wanted}, not '{each}'")
        try:
            needs[name] = float(number) if colon else 1.0
        except ValueError:
            raise UserError(f"deploy.needs: '{number}' in '{each}' must be a number from 0 to 1") from None
        if not 0 <= needs[name] <= 1:
            raise UserError(f"deploy.needs: '{number}' in '{each}' must be a number from 0 to 1")
    return needs


def _is_number(said: Any) -> bool:
    return type(said) in (int, float)
