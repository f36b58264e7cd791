"""The device's side of a run: ask for work, train on one's own examples, report. Resident, so it compiles once.

An agent holds the examples of one client (a phone) or of many (a site). They stay here. What leaves is what
`Device.report` writes, and the keys that a client asks for.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from partwise.algorithm import Algorithm
from partwise.data.store import ClientStore
from partwise.deployment.link import Link
from partwise.deployment.offered import algorithm_of, check_model, least_examples
from partwise.deployment.own_data import OwnTable
from partwise.deployment.own_store import OwnStore, opened
from partwise.deployment.page_reader import Reader
from partwise.deployment.policy import policy_of, status
from partwise.deployment.resident import Pace, Resident
from partwise.deployment.secret import masking_of, secret_of
from partwise.deployment.workplace import PRECISION, REFRESH, Worked, Workplace
from partwise.types import UserError

log = logging.getLogger("partwise.agent")


def run_agent(
    link: Link,
    data: str,
    store: str | Path,
    policy: str = "",
    id: str | None = None,
    most: int = 1,
    refresh: int = REFRESH,
    helper_key: str | None = None,
) -> Iterator[Worked]:
    """Take part in a run with one's own table, until the run ends or the process is told to stop (SIGTERM).

    Args:
        link: The way to the run.
        data: The table (`deployment.own_data.open_store` says of which kinds).
        store: The folder of what the device keeps.
        policy: When the device may work, as in "charging,idle".
        id: The only client that is wanted; if the table does not name its clients, the client of all rows.
        most: For how many clients it asks for work at a time.
        refresh: After how many versions a local part is rebuilt, although the data is the same.
        helper_key: The public key of the run's helper in hex; None: what the server says is believed.

    Yields:
        What came of every task.
    """
    if most < 1 or refresh < 1:
        raise UserError(f"most is {most} and refresh is {refresh}: give at least 1")
    ready = policy_of(policy)
    with stopping() as stop, opened(store) as own:
        begin = lambda: _begin(link, data, id, own, refresh, helper_key)
        yield from Resident(link, begin, Pace(ready, most, stop.wait, stop.is_set, status)).run()


def _begin(
    link: Link, data: str, id: str | None, own: OwnStore, refresh: int, helper_key: str | None = None
) -> Workplace:
    """The workplace for what the server offers now."""
    offer = link.offer()
    table = OwnTable(offer, data, id)
    algorithm = algorithm_of(offer, table.now())
    own.belong(offer.run, offer.model)
    precision = str(offer.settings.get("deploy.precision", PRECISION))
    reader = Reader(link.files(offer.files), own.place("files"), algorithm.partition)
    least, secret = least_examples(offer), secret_of(offer, algorithm, helper_key)
    masking = masking_of(offer, algorithm)
    return Workplace(
        link, algorithm, table.now, own, offer.run, refresh, precision, reader, least, secret, masking
    )


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """What SIGTERM sets. The task in hand is finished first. In a thread, where there are no signals, nothing sets
    it."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


class Agent:
    """A device whose clients' examples are in memory.

    Args:
        link: The way to the run.
        algorithm: The run's algorithm.
        store: The clients' examples, with the columns that the model reads.
        ready: Whether the device may work now (charging, unmetered, idle ...).
        most: For how many clients it asks for work at a time.
        sleep: Waits so many seconds.
        own: What the device keeps for its clients. By default it is in memory, without their local parts.
    """

    def __init__(
        self,
        link: Link,
        algorithm: Algorithm,
        store: ClientStore,
        *,
        ready: Callable[[], bool] = lambda: True,
        most: int = 1,
        sleep: Callable[[float], None] = time.sleep,
        own: OwnStore | None = None,
    ):
        refresh = REFRESH if own else None
        kept = own or OwnStore()

        def begin() -> Workplace:
            offer = link.offer()
            check_model(offer, algorithm)
            kept.belong(offer.run, offer.model)
            reader = Reader(link.files(offer.files), None, algorithm.partition)
            more = {
                "least": least_examples(offer),
                "secret": secret_of(offer, algorithm),
                "masking": masking_of(offer, algorithm),
            }
            return Workplace(link, algorithm, lambda: store, kept, offer.run, refresh, reader=reader, **more)

        self._resident = Resident(link, begin, Pace(ready, most, sleep))

    def run(self) -> Iterator[Worked]:
        """Work until the run ends. A server that does not answer is tried again, later and later."""
        return self._resident.run()
