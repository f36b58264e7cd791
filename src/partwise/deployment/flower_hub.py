"""A run's server inside Flower: it writes letters to nodes, and hands their replies to the hub.

The hub decides and keeps all as over HTTP: a node is a device, named by its number at the SuperLink. What Flower
cannot do is in docs/flower.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from flwr.app import Message

from partwise.deployment.federation import Opened
from partwise.deployment.flower_letters import Letter, Reply, names_digest, read_reply, write_letter
from partwise.deployment.flower_link import MASKED_SUMS, ON_DEMAND
from partwise.deployment.jobs import Wait, Work
from partwise.deployment.journal import JournalDownError
from partwise.server.round import Refused
from partwise.types import UserError, counted

logger = logging.getLogger("partwise.server")

TICK = 0.1  # seconds between two looks
LOOK = 1.0  # seconds between two looks at which nodes are there
LAST_REPLIES = 10.0  # seconds for nodes to hear that the run has ended
GREETING = Wait(0.05)  # to a node whose clients are not known, or that was not ready
AGAIN = 15.0  # seconds until a node that was not ready is asked again
LONGEST_PAUSE = 60.0  # seconds until a node that failed is tried again


class FlowerGrid(Protocol):
    """What is used of Flower's `Grid`."""

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are there."""
        ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages. Returns their ids, or "" for those whose node is not there."""
        ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Those replies that are there."""
        ...


class FlowerNode:
    """What the server knows of a node."""

    def __init__(self) -> None:
        self.clients = names_digest([])  # digest of those that joined
        self.others: set[str] = set()  # those that could not join
        self.reply: Reply | None = None  # the last one
        self.letter: str | None = None  # id of the letter that it has
        self.failures, self.not_before = 0, 0.0

    def failed(self, now: float) -> None:
        """It is tried again later, and later each time."""
        self.failures += 1
        self.not_before = now + min(LONGEST_PAUSE, 2.0**self.failures)


class FlowerHub:
    """Serves a run to the nodes of a grid.

    Args:
        opened: The server's side of the run.
        grid: Flower's.
        sleep: Waits so many seconds.
    """

    def __init__(self, opened: Opened, grid: FlowerGrid, sleep: Callable[[float], Any] = time.sleep):
        self._hub, self._offer, self._folder = opened
        if not opened.offer.files and opened.offer.settings["serving.way"] != "broadcast":
            raise UserError(ON_DEMAND)
        if opened.offer.settings["privacy.sums"] == "masked":
            raise UserError(MASKED_SUMS)
        self._rules, self._grid, self._sleep = self._hub.coordinator.rules, grid, sleep
        self._nodes: dict[int, FlowerNode] = {}
        self._looked = float("-inf")

    def run(self) -> None:
        """Serve until the run has ended and the nodes have heard of it."""
        while not self._ended():
            try:
                self._turn()
            except JournalDownError as error:
                logger.warning("%s (trying again)", error)
            self._sleep(TICK)
        self._say_goodbye()

    def _ended(self) -> bool:
        try:
            return self._hub.round().phase == "ended"
        except JournalDownError:
            return False

    def _turn(self) -> None:
        """Take replies, do what is due, and write letters."""
        self._look()
        for number, node, message in self._collect():
            self._replied(number, node, message)
        while self._hub.tick():
            pass
        self._write({number: node for number, node in self._nodes.items() if self._is_free(node)})

    def _look(self) -> None:
        """Which nodes are there. One that has left is forgotten, with its letter."""
        if time.monotonic() - self._looked < LOOK:
            return
        there, self._looked = set(self._grid.get_node_ids()), time.monotonic()
        self._nodes = {number: self._nodes.get(number) or FlowerNode() for number in sorted(there)}

    def _is_free(self, node: FlowerNode) -> bool:
        return node.letter is None and time.monotonic() >= node.not_before

    def _collect(self) -> list[tuple[int, FlowerNode, Message]]:
        """The replies that have come, with their nodes, which are free now."""
        by_letter = {node.letter: number for number, node in self._nodes.items() if node.letter}
        found = []
        for message in self._grid.pull_messages(list(by_letter)) if by_letter else ():
            number = by_letter.get(message.metadata.reply_to_message_id)
            if number is not None:
                self._nodes[number].letter = None
                found.append((number, self._nodes[number], message))
        return found

    def _replied(self, number: int, node: FlowerNode, message: Message) -> None:
        now = time.monotonic()
        try:
            if message.has_error():
                raise UserError(f"it failed: {message.error.reason} (code {message.error.code})")
            reply = read_reply(message.content)
        except UserError as error:
            logger.warning("node %d: %s", number, error)
            return node.failed(now)
        if reply.clients is not None:
            others = self._join(number, reply.clients)
            if others and others != node.others:
                told = ", ".join(sorted(others)[:10])
                logger.warning("node %d: clients of another node could not join: %s", number, told)
            node.others = others
            if others and len(others) == len(reply.clients):
                node.reply = None  # it is greeted again
                return node.failed(now)
            joined = set(reply.clients) - others
            node.clients = names_digest(joined)  # of the others the node tells again with its next reply
            logger.info("node %d has %s", number, counted(len(joined), "client"))
        node.failures, node.reply = 0, reply
        waiting = [self._hub.report(_device(number), report) for report in reply.reports]
        lost = [self._hub.decline(_device(number), task) for task in reply.declined]
        for each in lost:
            each.result()
        for verdict in (each.result() for each in waiting):
            if isinstance(verdict, Refused):
                logger.info("a report of node %d is refused (%s): %s", number, verdict.reason, verdict.what)
        if not self._may_work(reply):
            node.not_before = now + AGAIN
        return None

    def _join(self, number: int, names: Sequence[str]) -> set[str]:
        """Have a node's clients join. Returns those that are another node's, and do not."""
        others: set[str] = set()
        while mine := [name for name in names if name not in others]:
            found = self._hub.join(_device(number), mine, has_left=self._has_left).result()
            if not found:
                break
            others |= set(map(str, found))
        return others

    def _has_left(self, device: str) -> bool:
        """Whether a node is not there any more. Without a registered key, a node that comes back is a new one."""
        return device not in {_device(number) for number in self._nodes}

    def _may_work(self, reply: Reply) -> bool:
        return reply.ready and self._rules.may_work(reply.status)

    def _write(self, nodes: dict[int, FlowerNode]) -> None:
        """A letter to each of these nodes that has something to do, or that is to say how it is."""
        asked: dict[int, Future[Work | Wait | Refused]] = {}
        for number, node in nodes.items():
            if node.reply is not None and self._may_work(node.reply):
                asked[number] = self._hub.poll(_device(number), True, node.reply.most)
        answers = {number: each.result() for number, each in asked.items()}
        greeted = {number: GREETING for number in nodes if number not in asked}
        work = {number: each for number, each in answers.items() if isinstance(each, Work)}
        self._send(greeted | work)

    def _send(self, answers: dict[int, Work | Wait]) -> None:
        letters = []
        for number, answer in answers.items():
            letter = Letter(self._offer, answer, self._nodes[number].clients, self._files(answer))
            patience = answer.lease if isinstance(answer, Work) else self._rules.lease
            content = write_letter(letter)
            letters.append(Message(content, dst_node_id=number, message_type="train", ttl=patience))
        for number, name in zip(answers, self._grid.push_messages(letters), strict=True):
            self._nodes[number].letter = name or None

    def _files(self, answer: Work | Wait) -> dict[str, bytes]:
        """The files with the slices of these tasks, unless nodes fetch them."""
        if isinstance(answer, Wait) or self._offer.files or self._folder is None:
            return {}
        return {name: Path(self._folder, name).read_bytes() for name in {job.slices for job in answer.jobs}}

    def _say_goodbye(self) -> None:
        """Tell the nodes that the run has ended, and wait a while until they have heard. What they reply does not
        matter any more, and many have left before it can be had."""
        end, untold = time.monotonic() + LAST_REPLIES, set(self._nodes)
        while time.monotonic() < end and (untold or any(node.letter for node in self._nodes.values())):
            self._collect()
            free = {number for number in untold if self._nodes[number].letter is None}
            self._send(dict.fromkeys(sorted(free), Wait(0.0, ended=True)))
            untold -= free
            self._sleep(TICK)


def _device(number: int) -> str:
    return f"flower-{number}"
