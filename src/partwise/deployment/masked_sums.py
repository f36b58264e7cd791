"""Sums of masked reports, which one server adds up without seeing any of them (`deployment.stages`)."""

from __future__ import annotations

from collections.abc import Sequence

from partwise.algorithm import Algorithm
from partwise.deployment.book import TaskRow
from partwise.deployment.stages import Collected
from partwise.privacy.masked_server import unmasked_sum
from partwise.server.masked_form import MaskedForm
from partwise.server.total import Total
from partwise.server.word_form import WordForm


class MaskedSums:
    """What adds up the masked reports of a run.

    Args:
        algorithm: The run's algorithm.
    """

    def __init__(self, algorithm: Algorithm):
        self._words = WordForm(algorithm.aggregator, algorithm.partition)
        self.form = MaskedForm(self._words)

    def total(self, tasks: Sequence[TaskRow], collected: Collected) -> Total:
        """The sum of the reports of these tasks, in words. It has no noise yet (`deployment.server_noise`).

        Raises:
            TooFewError: Too few have helped to unmask it.
            UserError: Somebody's shares are wrong.
        """
        masked = {task.id: self.form.read(task.report, task.id) for task in tasks if task.report is not None}
        line = unmasked_sum(
            collected.context,
            collected.advertised,
            collected.shared,
            masked,
            collected.unmasking,
            collected.settings,
        )
        return self._words.total(self.form.lines.words(line))
