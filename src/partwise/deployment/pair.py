"""The first server's share in what it does with a helper: rows that are sent privately, and sums."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from partwise.algorithm import Algorithm
from partwise.config.protection import protection
from partwise.config.secure_sums import bits_for
from partwise.config.settings import Config
from partwise.deployment.book import TaskRow
from partwise.deployment.helper import VERSIONS_KEPT
from partwise.deployment.helper_link import HelperLink, VersionMissingError
from partwise.privacy.sum_words import added
from partwise.privacy.two_servers import Agreement, first_share, for_helper, with_noise
from partwise.server.agreed import agreement_of
from partwise.server.messages import About
from partwise.server.private_slices import (
    Tables,
    bucketed,
    plain_rows,
    read_question,
    write_joined,
)
from partwise.server.sealed_form import SealedForm
from partwise.server.total import Total
from partwise.server.word_form import WordForm
from partwise.types import UserError


def make_agreement(algorithm: Algorithm, run: str) -> Agreement:
    """What the clients and both servers of a run have in common, without the noise."""
    return agreement_of(algorithm.aggregator, algorithm.partition, algorithm.choose, run)


def with_promise(agreement: Agreement, config: Config, num_clients: int, least: int) -> Agreement:
    """The agreement with the noise that each server adds, and the fewest reports of a sum."""
    promised = protection(config, num_clients)
    if promised is None:
        raise UserError("privacy.sums needs privacy.clip")
    scale, door = 2.0 ** bits_for(promised), promised.door
    counts = door.count_deviation if door.noise else 0.0
    return agreement._replace(noise=door.deviation * scale, count_noise=counts * scale, least=least)


class Pair:
    """This server and the helper.

    Args:
        agreement: What they agree on.
        algorithm: The run's algorithm.
        helper: The way to the helper.
    """

    def __init__(self, agreement: Agreement, algorithm: Algorithm, helper: HelperLink):
        self.agreement, self._partition, self._helper = agreement, algorithm.partition, helper
        self.form, self._words = SealedForm(agreement), WordForm(algorithm.aggregator, algorithm.partition)
        self.helper_key = helper.agree(agreement)
        self._tables: dict[int, Tables] = {}
        self._making = threading.Lock()

    def publish(self, number: int, params: Mapping[str, Any]) -> None:
        """Give the helper the rows of a version. It takes no others for it afterwards."""
        self._helper.put_rows(self.agreement.run, number, self._rows(params))

    def slices(self, belongs: About, params: Mapping[str, Any], rng: Any, message: bytes) -> bytes:
        """The answer to a client's question for slices."""
        asked = read_question(self.agreement, message)
        run, version = self.agreement.run, belongs.version
        try:
            theirs = self._helper.slices(run, version, belongs.task, asked.public, asked.sealed)
        except VersionMissingError:  # it was started again
            self.publish(version, params)
            theirs = self._helper.slices(run, version, belongs.task, asked.public, asked.sealed)
        tables = self._bucketed(version, params)
        return write_joined(self.agreement, self._partition, params, tables, asked, theirs, rng, belongs)

    def total(self, tasks: Iterable[TaskRow], version: int) -> Total:
        """The sum of the reports of these tasks, which are of one version, with both servers' noise. The helper is
        sent its parts of all of them at once, so they are in memory together (`deployment.memory`)."""
        reports = [self.form.read(task.report, task.id) for task in tasks if task.report is not None]
        theirs, refused = self._helper.share(self.agreement, version, [for_helper(each) for each in reports])
        kept = [each for place, each in enumerate(reports) if place not in set(refused)]
        mine = with_noise(self.agreement, first_share(self.agreement, version, kept))
        return self._words.total(added(mine, theirs))

    def _bucketed(self, version: int, params: Mapping[str, Any]) -> Tables:
        """The rows of a version in buckets. Those of the last versions are kept."""
        with self._making:
            if version not in self._tables:
                self._tables[version] = bucketed(self.agreement, version, self._rows(params))
                for old in sorted(self._tables)[:-VERSIONS_KEPT]:
                    del self._tables[old]
            return self._tables[version]

    def _rows(self, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return plain_rows(self._partition, params)
