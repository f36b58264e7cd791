"""Which clients are drawn for a round over a network, of those that are there.

The draw depends on the seed (or on a secret, `Rules.drawing`), the round, and who is there. With `cohort.sampling =
apart:ROUNDS`, a client that took part waits so many rounds. To *take part* is to have a report in a version of the
model. It is noted in the same transaction that publishes the version, by the client's name. So the wait is kept
whatever happens: servers are killed, several of them serve the run, rounds are repeated, clients move to other
devices, come late or are long away. A client whose report came too late, or was of an attempt that failed, is in no
version, and need not wait: if it had to, failures could use up the population. As at most a cohort takes part in a
round, somebody is left to draw if all clients are there and are as many as ROUNDS cohorts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from partwise.deployment.book import Book, ClientRow, RoundRow, TaskRow
from partwise.deployment.rules import Rules
from partwise.server.cohort import FIXED, Recruiting, recruit


def candidates(book: Book, rules: Rules, row: RoundRow, now: float) -> list[ClientRow]:
    """The clients that can be drawn for a round: they are there, train, and have nothing else to do or to wait
    for."""
    away = book.busy(now) if rules.buffer else _waiting(book, rules, row.number)
    there = book.present(now - rules.fresh)
    return [each for each in there if each.name not in away and not rules.is_held_out(each.name)]


def draw(rules: Rules, there: Sequence[ClientRow], number: int, row: RoundRow) -> list[ClientRow]:
    """The clients that are asked to train: so many, or with Poisson sampling so many on average. Those who wait are
    not among `there`."""
    sampling = FIXED if rules.buffer or rules.wait > 1 else rules.recruiting.sampling
    return drawn(rules, there, Recruiting(number, sampling=sampling), row)


def drawn(rules: Rules, there: Sequence[ClientRow], wanted: Recruiting, row: RoundRow) -> list[ClientRow]:
    """Clients, by the seed and the round. Whether one has enough examples, its device knows."""
    seed = rules.seed if rules.drawing is None else rules.drawing
    cohort = recruit(wanted, np.zeros(len(there)), seed, row.number + (row.attempt << 32))
    return [there[place] for place in cohort.clients]


def note_turns(book: Book, rules: Rules, tasks: Iterable[TaskRow], number: int) -> None:
    """Note that the clients of these tasks took part in a round, if they are to wait from now on."""
    if rules.wait > 1:
        book.put_turns([name for task in tasks if task.reported for name in task.names], number)


def _waiting(book: Book, rules: Rules, number: int) -> set[str]:
    """Clients whose last round was too short a time ago for the round of this number."""
    return book.turns_since(number - rules.wait + 1) if rules.wait > 1 else set()
