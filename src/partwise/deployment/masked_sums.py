"""Sums of masked reports, which one server adds up without seeing any of them (`deployment.stages`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from partwise.algorithm import Algorithm
from partwise.deployment.book import TaskRow
from partwise.deployment.stages import Collected
from partwise.privacy.masked_server import masked_sum, unmasked
from partwise.privacy.skellam import NoiseShare
from partwise.server.masked_form import MaskedForm
from partwise.server.total import Total
from partwise.server.word_form import WordForm


class MaskedSums:
    """What adds up the masked reports of a run.

    Args:
        algorithm: The run's algorithm.
        share: The noise that every client has added, if they do. The server then adds the shares of those who did
            not come.
    """

    def __init__(self, algorithm: Algorithm, share: NoiseShare | None = None):
        self._words = WordForm(algorithm.aggregator, algorithm.partition)
        self.form, self._share = MaskedForm(self._words), share

    def total(self, tasks: Iterable[TaskRow], collected: Collected) -> Total:
        """The sum of the reports of these tasks, which are read one by one, in words. It has no noise yet
        (`deployment.server_noise`).

        Raises:
            TooFewError: Too few have helped to unmask it.
            UserError: Somebody's shares are wrong.
        """
        uploaded: list[str] = []
        letters = self._letters(tasks, uploaded)
        total = masked_sum(collected.context, letters, self.form.lines.num_words)
        line = unmasked(
            collected.context,
            collected.advertised,
            collected.shared,
            uploaded,
            total,
            collected.unmasking,
            collected.settings,
        )
        if self._share:
            line += self.form.lines.noise(self._share, self._share.most - len(uploaded))
        return self._words.total(self.form.lines.words(line))

    def _letters(self, tasks: Iterable[TaskRow], uploaded: list[str]) -> Iterator[tuple[str, bytes]]:
        """The letters in the reports of these tasks. Who has sent one is added to `uploaded`."""
        for task in tasks:
            if task.report is not None:
                uploaded.append(task.id)
                yield task.id, self.form.read(task.report, task.id)
            del task
